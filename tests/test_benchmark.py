import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_runs import ROOT


def test_the_data_benchmark_runs_and_writes_what_it_prints(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "vcagen.benchmark", "data", "--num-latents", "512", "--rounds", "1"),
            *("--num-images", "4", "--image-size", "64", "--json", str(tmp_path / "result.json")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "result.json").read_text())
    assert {"latents/s read, one core, batch 256", "ratio (median of rounds)"} <= written.keys()
    assert all(key in result.stdout for key in written)


def test_the_scoring_benchmark_runs_and_writes_what_it_prints(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vcagen.benchmark", "fid", "--num-images", "0", "--dimension", "64"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "result.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "result.json").read_text())
    assert "ratio of Frechet distances" in written
    assert all(key in result.stdout for key in written)


def test_memory_of_scoring_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    from fid.benchmark import collect_noise

    collect_noise(40)
    assert float(capsys.readouterr().out.split()[-1]) > 100
