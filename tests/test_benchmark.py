import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_runs import ROOT


def test_the_data_benchmark_runs_and_writes_what_it_prints(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "vcagen.benchmark", "data", "--num-latents", "512", "--rounds", "1"),
            *("--num-images", "4", "--image-size", "64", "--steps", "0", "--json", str(tmp_path / "result.json")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "result.json").read_text())
    assert {"latents/s read, one core, batch 256", "ratio (median of rounds)"} <= written.keys()
    assert all(key in result.stdout for key in written)
