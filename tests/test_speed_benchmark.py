import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vcagen.benchmark.__main__ import main
from vcagen.benchmark.measure import Work, measure, profiled

CPU = torch.device("cpu")
# A checkout of a repository of another's: a `models.py` with a table of models by name.
STANDS_IN = """
from vcagen.benchmark.model import build_transformer

class Model(type(build_transformer("SiT-tiny/8", "mhsa"))):
    def forward(self, *inputs):
        return super().forward(*inputs).chunk(2, dim=1)[0]

def build():
    model = build_transformer("SiT-tiny/8", "mhsa")
    model.__class__ = Model
    return model

SiT_models = {"SiT-tiny/8": build}
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcagen.benchmark.measure.SHORTEST", 1e-4)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict[str, Any]:
    common = ["--device", "cpu", "--rounds", "2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, *common])
    assert main() == 0
    return json.loads(out.read_text())


def test_peak_memory_is_what_is_held_at_a_time() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            torch.empty(1_000_000)

    def together() -> None:
        _ = [torch.empty(1_000_000) for _ in range(3)]

    assert profiled(one_after_the_other, CPU)[0] == 4_000_000
    assert profiled(together, CPU)[0] == 12_000_000


def test_an_operators_time_is_its_own_without_what_it_calls() -> None:
    big, small = torch.randn(600, 600), torch.randn(1000, 1000)
    shares = profiled(lambda: (torch.nn.functional.linear(big, big), small.exp()), CPU)[1]
    assert next(iter(shares)) == "mm"  # which linear calls
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert "exp" in shares
    assert 0.9 < sum(shares.values()) <= 1 + 1e-9


def test_memory_of_several_runs_is_that_of_one() -> None:
    assert profiled(lambda: torch.empty(1_000_000), CPU, repeats=3)[0] == 4_000_000


def test_ratios_are_of_times_within_a_round() -> None:
    big, small = torch.randn(400, 400), torch.randn(100, 100)
    works = {
        "small": Work(lambda: small @ small, 2 * 100**3, "fp32"),
        "big": Work(lambda: big @ big, 2 * 400**3, "fp32"),
    }
    first, second = measure(works, 5, CPU, "products")
    assert (first.name, first.ratio, first.lowest, first.highest) == ("small", 1, 1, 1)
    assert 5 < second.lowest <= second.ratio <= second.highest
    assert second.fastest <= second.seconds
    assert second.peak_bytes == 400 * 400 * 4
    assert second.flops_per_second == pytest.approx(2 * 400**3 / second.seconds)
    assert 0.05 < second.share_of_peak < 3


def test_attention_is_measured_for_each_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "attention.png"
    settings = ["--hidden-size", "16", "--num-heads", "2", "--grid", "2", "4", "--dtype", "fp32", "bf16"]
    result = run(monkeypatch, tmp_path / "a.json", "attention", *settings, "--png", str(picture))
    for tokens in (4, 16):
        for dtype in ("fp32", "bf16"):
            for passes in ("forward", "forward + backward"):
                rows = result[f"N={tokens}, {dtype}, {passes}"]
                assert [row["name"] for row in rows] == ["mhsa", "vca", "vca separate", "differential"]
                assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
    assert picture.read_bytes()[1:4] == b"PNG"


def test_the_model_is_compared_with_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models.py").write_text(STANDS_IN)
    arguments = ["model", "--variant", "SiT-tiny/8", "--batch", "1", "--official", str(tmp_path)]
    try:
        result = run(monkeypatch, tmp_path / "m.json", *arguments)
    finally:
        sys.modules.pop("models", None)
    assert [row["name"] for row in result["SiT-tiny/8, forward"]] == ["official, fp32", "mhsa, fp32", "vca, fp32"]
    assert result["largest difference from official, fp32, of the largest value"] == "0.0e+00"
    assert str(tmp_path) not in sys.path


def test_a_training_step_and_its_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, tmp_path / "t.json", "train", "--variant", "DiT-tiny/8", "--batch", "1")
    names = [f"{name}, fp32{more}" for name in ("mhsa", "vca") for more in ("", ", gradient checkpointing")]
    assert [row["name"] for row in result["DiT-tiny/8, training step"]] == names
    shares = [value for key, value in result.items() if key.startswith("share of a step")]
    assert len(shares) == 5
    assert all(share > 0 for share in shares)
    assert sum(shares) == pytest.approx(100)
    assert 0 < result["not the model (data, EMA, logging), mhsa, fp32, %"] < 100


def test_sampling_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["sample", "--variant", "SiT-tiny/8", "--batch", "1", "--num-steps", "1", "--dtype", "fp32", "bf16"]
    result = run(monkeypatch, tmp_path / "s.json", *arguments)
    rows = {row["name"]: row for row in result["SiT-tiny/8, sampling"]}
    assert list(rows) == ["mhsa, fp32", "mhsa, bf16", "vca, fp32", "vca, bf16"]
    assert result["images/s: vca, fp32"] == pytest.approx(1 / rows["vca, fp32"]["seconds"])
    assert result["mhsa, fp32: difference from fp32, RMS over RMS"] == "0.0e+00"
    assert 0 < float(result["mhsa, bf16: difference from fp32, RMS over RMS"]) < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--official", "nowhere"], "--official nowhere: there is no models in it"),
        (["sample", "--variant", "DiT-S/2"], "--variant DiT-S/2: the sampler measured is SiT's"),
        (["train", "--variant", "DiT-S/3"], "unknown variant 'DiT-S/3'"),
        (["model", "--device", "toaster"], "device 'toaster' cannot be used"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    assert main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
