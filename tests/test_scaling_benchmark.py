import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vcagen.benchmark import estimate, processes, scaling
from vcagen.benchmark.__main__ import main
from vcagen.benchmark.estimate import estimates, gpu_hours
from vcagen.benchmark.processes import TOLERANCE, ProcessesRow, largest_difference, train_rows, write_run
from vcagen.config import load_config
from vcagen.files import write_image
from vcagen.metrics import read_metrics
from vcagen.training import train

TINY = ["--device", "cpu", "--rounds", "1", "--variant", "SiT-tiny/8", "--grid", "2", "4"]
SIZES = ["--batches", "1", "2", "--depths", "1", "2"]


def rows_of_one_process(config: Path, attention: str, number: int) -> list[dict[str, Any]]:
    """As `train_rows`, without a process of its own."""
    run_dir = config.parent / f"{attention}-{number}-here"
    train(load_config(config, [f"run_dir={run_dir}", f"model.attention.name={attention}"]))
    return read_metrics(run_dir / "metrics.jsonl")


def test_two_processes_train_as_one_and_another_image_is_seen(tmp_path: Path) -> None:
    config = write_run(tmp_path, "SiT-tiny/8")
    two = train_rows(config, "vca", 2)
    one = rows_of_one_process(config, "vca", 1)
    assert len(one) == processes.STEPS
    assert 0 <= largest_difference(one, two) <= TOLERANCE
    write_image(tmp_path / "images/noise/0003.png", np.zeros((32, 32, 3), dtype=np.uint8))
    tampered = rows_of_one_process(config, "vca", 3)
    with pytest.raises(ValueError, match=r"in one process and .* in two"):
        largest_difference(tampered, two)


@pytest.mark.parametrize("key", ["loss", "gradient_norm"])
@pytest.mark.parametrize("value", [1 + 2 * TOLERANCE, 1 - 2 * TOLERANCE, float("nan")])
def test_every_step_is_compared(key: str, value: float) -> None:
    rows = [{"step": step, "loss": 1.0, "gradient_norm": 1.0} for step in (1, 2, 3)]
    others = [*rows[:2], rows[2] | {key: value}]
    assert largest_difference(rows, rows) == 0
    with pytest.raises(ValueError, match=f"step 3: {key}"):
        largest_difference(rows, others)
    with pytest.raises(ValueError, match="one process logged 3 steps, two logged 2"):
        largest_difference(rows, rows[:2])


def test_speed_up_is_of_times_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three rounds; in each, mhsa by one process and by two, then vca.
    seconds = iter([3, 2, 1, 1, 9, 3, 2, 1, 8, 8, 1, 2])

    def timed(config: Path, attention: str, number: int) -> list[dict[str, Any]]:
        same = {"loss": 1.0, "gradient_norm": 1.0}
        return [{"step": step, "steps_per_second": 1 / s, **same} for step, s in ((1, 99), (2, next(seconds)))]

    monkeypatch.setattr(processes, "train_rows", timed)
    mhsa, vca = processes.measure_processes("SiT-tiny/8", 3)
    assert (mhsa.seconds, mhsa.speed_up, mhsa.lowest, mhsa.highest) == ((8, 3), 1.5, 1, 3)
    assert mhsa.efficiency == 0.75
    assert (vca.seconds, vca.speed_up, vca.lowest, vca.highest) == ((1, 1), 1, 0.5, 2)


def test_the_estimate_is_this_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "MODELS", ("S/2",))
    mhsa, vca = estimates(1.25)
    assert (mhsa.model, mhsa.attention, vca.model, vca.attention) == ("S/2", "mhsa", "S/2", "vca")
    assert mhsa.forward_flops / 2e9 == pytest.approx(6.06, abs=0.005)  # DiT, table 4
    assert mhsa.step_flops == 3 * 256 * mhsa.forward_flops
    assert vca.step_flops == 3 * 256 * vca.forward_flops > mhsa.step_flops
    for index, flops_per_second in enumerate((989e12 / 5, 989e12 * 2 / 5)):
        seconds = 400_000 * 256 * 3 * mhsa.forward_flops / flops_per_second
        assert mhsa.training_gpu_hours[index] == pytest.approx(seconds / 3600)
        assert mhsa.training_days[index] == pytest.approx(seconds / 8 / 86_400)
        sampling = 50_000 * 250 * 2 * mhsa.forward_flops / flops_per_second / 8
        assert mhsa.sampling_hours[index] == pytest.approx(sampling / 3600)
        for of_vca, of_mhsa in (
            (vca.training_gpu_hours, mhsa.training_gpu_hours),
            (vca.training_days, mhsa.training_days),
            (vca.sampling_hours, mhsa.sampling_hours),
        ):
            assert of_vca[index] == pytest.approx(1.25 * of_mhsa[index])
    assert gpu_hours(989e12 * 3600, 0.5) == pytest.approx(2)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the last table under a heading, without its header."""
    section = page.split(f"\n## {heading}")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return lines[2:]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page, the figure and the JSON of a tiny run whose processes are made up."""
    folder = tmp_path_factory.mktemp("scaling")
    made_up = [ProcessesRow(name, (4.0, 2.5), 1.6, 1.5, 1.7, 0.8, 3e-7) for name in ("mhsa", "vca")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vcagen.benchmark.measure.SHORTEST", 1e-4)
        patch.setattr(estimate, "MODELS", ("tiny/8",))
        patch.setattr(scaling, "measure_processes", lambda *_: made_up)
        files = ["--json", f"{folder}/s.json", "--markdown", f"{folder}/s.md", "--png", f"{folder}/figures/s.png"]
        patch.setattr(sys, "argv", ["benchmark", "scaling", *TINY, *SIZES, *files])
        assert main() == 0
    return folder


def test_the_page_says_what_the_json_says(written: Path) -> None:
    page, result = (written / "s.md").read_text(), json.loads((written / "s.json").read_text())
    for heading, key, places in (("Tokens", "tokens", [4, 16]), ("Batch", "batch", [1, 2]), ("Depth", "depth", [1, 2])):
        assert [point["x"] for point in result[key]] == places
        for cells, point in zip(table(page, heading), result[key], strict=True):
            mhsa, vca = point["rows"]
            assert (mhsa["name"], vca["name"]) == ("mhsa", "vca")
            images = point["images"]
            milliseconds = [f"{1000 * row['seconds'] / images:.4g}" for row in (mhsa, vca)]
            megabytes = [f"{row['peak_bytes'] / 1e6 / (images if key == 'tokens' else 1):.4g}" for row in (mhsa, vca)]
            between = f"{vca['lowest']:.3f} to {vca['highest']:.3f}"
            assert cells == [str(point["x"]), *milliseconds, f"{vca['ratio']:.3f}", between, *megabytes]
    assert table(page, "Processes")[1] == ["vca", "4", "2.5", "1.600", "1.500 to 1.700", "80%", "3.0e-07"]
    assert result["processes"][1]["speed_up"] == 1.6
    lines = table(page, "ESTIMATE, not a measurement")
    assert [cells[:2] for cells in lines] == [[row["model"], row["attention"]] for row in result["estimate"]]
    for cells, row in zip(lines, result["estimate"], strict=True):
        assert cells[4:6] == [f"{hours:.4g}" for hours in row["training_gpu_hours"]]
    for value in (*result["setting"].values(), "20% or 40%", "989 TFLOP/s", "![time and memory](<figures/s.png>)"):
        assert str(value) in page


def test_the_estimate_takes_the_measured_ratio_of_bf16(written: Path) -> None:
    result = json.loads((written / "s.json").read_text())
    assert result["bf16"]["images"] == 2  # the largest batch
    ratio = result["bf16"]["rows"][1]["ratio"]
    assert ratio > 1.001
    mhsa, vca = result["estimate"][:2]
    assert vca["training_days"] == pytest.approx([ratio * days for days in mhsa["training_days"]])
    assert f"vca's step in bf16 takes {ratio:.3f} times mhsa's" in (written / "s.md").read_text()


def test_the_figure_is_small(written: Path) -> None:
    content = (written / "figures/s.png").read_bytes()
    assert content[1:4] == b"PNG"
    assert len(content) < 120_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--markdown", "."], ".: is a folder; give the name of a file"),
        (["--png", "/dev/null/s.png"], "/dev/null: cannot be written"),
        (["--variant", "SiT-S/3"], "unknown variant 'SiT-S/3'"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
    ],
)
def test_what_cannot_be_done_is_said_before_work_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work started")

    monkeypatch.setattr(scaling, "measure_processes", work)
    monkeypatch.setattr(sys, "argv", ["benchmark", "scaling", *arguments])
    assert main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
