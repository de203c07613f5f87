"""Experiments: planned, trained once, reported with their spread."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fid.__main__ import main as fid_main
from fid.experiment.plan import Experiment, digest, plan_runs, read_experiment, read_result, result_path, run_config
from fid.experiment.report import Row
from fid.intervals import paired_difference, welch_difference
from tests.tiny_runs import ROOT, TINY
from vcagen.files import write_json

SETTINGS: dict[str, Any] = {
    "base": str(ROOT / "configs/demo.yaml"),
    "seeds": [0, 1],
    "overrides": [*TINY, "train.max_steps=4", "score.reference=digits", "score.every=2", "score.num_images=12"],
    "families": {"SiT": []},
    "rows": {"softmax": ["model.attention.name=mhsa"], "VCA": ["model.attention.name=vca"]},
    "controls": ["softmax"],
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(SETTINGS | changes, sort_keys=False))
    return path


def compare_runs(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["fid", "compare-runs", *map(str, arguments)])
    return fid_main()


def test_the_committed_experiment_is_read_and_rows_differ_in_attention_alone() -> None:
    path = ROOT / "configs/experiments/digits.yaml"
    experiment = read_experiment(path)
    runs = plan_runs(experiment, (3,))
    assert len({run.name for run in runs}) == len(runs) == 24
    for family in experiment.families:
        settings = []
        for run in runs:
            if run.family == family:
                config = run_config(path, experiment, run, Path("runs")).model_dump(exclude={"run_dir"})
                assert config["seed"] == 3
                config["model"].pop("attention")
                settings.append(config)
        assert all(config == settings[0] for config in settings)


def test_an_experiment_is_trained_once_and_a_second_run_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "experiment.yaml"), tmp_path / "out"
    arguments = (path, "--out", out, "--runs", tmp_path / "runs", "--seeds", "1", "--jobs", 2)
    assert compare_runs(monkeypatch, *arguments) == 0, capsys.readouterr().err
    report = (out / "README.md").read_text()
    assert "2 of 2 runs are in it" in report
    assert "FD-digits-12" in report
    assert {"README.md", "report.json", "measured.json", "scores.png", "losses.png", "samples.png"} <= {
        file.name for file in out.iterdir()
    }
    scores = json.loads((out / "report.json").read_text())["SiT"]
    assert [row["name"] for row in scores] == ["softmax", "VCA"]
    assert [row["steps"] for row in scores] == [[2, 4], [2, 4]]
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is trained
    assert compare_runs(monkeypatch, *arguments) == 0
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    write(path, overrides=[*SETTINGS["overrides"], "train.learning_rate=1e-3"])
    assert compare_runs(monkeypatch, *arguments) == 1
    assert "the result of other settings; choose another --out" in capsys.readouterr().err


def fabricate(path: Path, out: Path, scores: dict[str, list[float]]) -> None:
    """Results of every row and seed with the given last scores."""
    experiment = read_experiment(path)
    for run in plan_runs(experiment, experiment.seeds):
        last = scores[run.row][experiment.seeds.index(run.seed)]
        result = {
            "family": run.family,
            "row": run.row,
            "seed": run.seed,
            "config": run_config(path, experiment, run, out).model_dump(mode="json"),
            "num_parameters": 1,
            "losses": [[2, 1.0], [4, 0.5]],
            "scores": [{"step": 2, "FD-digits-12": last + 10}, {"step": 4, "FD-digits-12": last}],
        }
        file = result_path(out, run)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)


@pytest.mark.parametrize(
    ("vca", "verdict"),
    [
        ([40.0, 51.0, 60.5], "lower: VCA"),
        ([60.0, 71.0, 80.5], "higher: VCA"),
        ([50.0, 70.0, 65.0], "no difference shown: VCA"),
    ],
)
def test_the_report_says_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vca: list[float], verdict: str
) -> None:
    path, out = write(tmp_path / "experiment.yaml", seeds=[0, 1, 2]), tmp_path / "out"
    fabricate(path, out, {"softmax": [50.0, 61.0, 70.0], "VCA": vca})
    cost = {"parameters": 100, "multiply_adds": 10**6}
    costs = {"softmax": cost | {"step_seconds": 1.0}, "VCA": cost | {"step_seconds": 1.25}}
    experiment = read_experiment(path)
    settings = digest([run_config(path, experiment, run, out) for run in plan_runs(experiment, (0,))])
    write_json(
        out / "measured.json",
        {"settings_sha256": settings, "machine": "this", "floors": {"SiT": 1.5}, "costs": {"SiT": costs}},
    )
    assert compare_runs(monkeypatch, path, "--out", out, "--report-only") == 0
    report = (out / "README.md").read_text()
    assert f"- FD-digits-12 against **softmax**: {verdict}." in report
    assert "1.50 apart: the floor" in report
    mean, spread = np.mean(vca), np.std(vca, ddof=1)
    assert f"| VCA | 3 | 0.500 +- 0.000 | {mean:.1f} +- {spread:.1f} |" in report
    # At 1.25 times the cost of a step, the time of 4 steps is enough for 3.2: a line from +10 at 2 to +0 at 4.
    assert f"| VCA | 100 | 1.0 M | 1.25 | {mean + 4:.1f} +- {spread:.1f} |" in report


def test_other_settings_never_meet_in_one_run_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "experiment.yaml")
    before = plan_runs(read_experiment(path), (0,))[0]
    folder = run_config(path, read_experiment(path), before, tmp_path).run_dir
    write(path, overrides=[*SETTINGS["overrides"], "guidance.scale=4"])
    after = plan_runs(read_experiment(path), (0,))[0]
    assert after.name == before.name
    assert run_config(path, read_experiment(path), after, tmp_path).run_dir != folder


@pytest.mark.parametrize("content", ["{", "{}", '{"config": 3}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "experiment.yaml")
    experiment = read_experiment(path)
    run = plan_runs(experiment, (0,))[0]
    file = result_path(tmp_path / "out", run)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.raises(ValueError, match=f"{file.name}: not a run's result; delete it"):
        read_result(file, run_config(path, experiment, run, tmp_path))


def test_scores_in_equal_time_lie_between_scored_steps() -> None:
    def row(seconds: float) -> Row:
        scores = np.array([[30.0, 20.0, 10.0]])
        return Row("a", [0], [100, 200, 300], scores, [], np.zeros(1), {"step_seconds": seconds})

    assert row(2.0).at_time_of(row(1.0)) == pytest.approx([25.0])  # 150 steps
    assert row(1.0).at_time_of(row(1.0)) == pytest.approx([10.0])
    assert row(1.0).at_time_of(row(1.1)) is None  # would go on beyond its end
    assert row(4.0).at_time_of(row(1.0)) is None  # was not scored so early


def test_intervals_are_students_and_welchs() -> None:
    mine, theirs = np.array([3.0, 5.0, 10.0]), np.array([2.0, 5.0, 7.0])
    paired = paired_difference(mine, theirs)
    assert paired.value == pytest.approx(4 / 3)
    # Differences 1, 0, 3: standard deviation sqrt(7/3), and Student's 97.5% point of 2 degrees is 4.30265.
    assert paired.half_width == pytest.approx(4.30265 * np.sqrt(7 / 3) / np.sqrt(3), rel=1e-5)
    assert not paired.is_shown
    from scipy import stats

    welch = welch_difference(mine, theirs + 20)
    interval = stats.ttest_ind(mine, theirs + 20, equal_var=False).confidence_interval(0.95)
    assert (welch.value - (welch.half_width or 0), welch.value + (welch.half_width or 0)) == pytest.approx(interval)
    assert welch.is_shown
    assert paired_difference(mine[:1], theirs[:1]).half_width is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"controls": ["none"]}, "controls names 'none', which is no row"),
        ({"only": {"DiT": ["VCA"]}}, "only.DiT is no family; there are SiT"),
        ({"only": {"SiT": ["VCA"]}}, "only.SiT leaves out the control 'softmax'"),
        ({"only": {"SiT": ["softmax", "other"]}}, "only.SiT names 'other', which is no row"),
        ({"overrides": list(TINY)}, "no score; add overrides score.reference="),
        ({"seed": 3}, "seed: Extra inputs are not permitted"),
        ({"seeds": [0, 0]}, "seeds: 0, 0 has one twice"),
        (
            {"rows": {"softmax": [], "VCA+": [], "VCA -": []}},
            "row 'VCA+' of SiT would be called 'sit-vca-0'",
        ),
        ({"rows": {"a": ["model.attention.nam=vca"], "softmax": []}}, "model.attention"),
    ],
)
def test_a_wrong_experiment_is_refused_before_training(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + re.escape(message)):
        read_experiment(write(tmp_path / "experiment.yaml", **changes))


def test_runs_go_seed_by_seed() -> None:
    runs = plan_runs(Experiment(**SETTINGS), (0, 1))
    assert [(run.seed, run.row) for run in runs] == [(0, "softmax"), (0, "VCA"), (1, "softmax"), (1, "VCA")]
