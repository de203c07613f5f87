import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tiny_runs import ROOT
from vcagen.models.transformer import DiffusionTransformer

# Converts, then prints the largest resident set of the process, in kilobytes (getrusage's is inherited from this one).
MEASURED = """
import sys
from vcagen.conversion.__main__ import main
code = main()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def test_an_xl_file_converts_in_less_than_twice_its_size(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("needs 8 GB of free disk")
    path = tmp_path / "DiT-XL-2-256x256.pt"
    try:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in DiffusionTransformer().state_dict().items()}
        assert sum(shape.numel() for shape in shapes.values()) == 675_129_632
        torch.save({name: torch.empty(shape).uniform_(-1, 1) for name, shape in shapes.items()}, path)
        target = tmp_path / "model"
        result = subprocess.run(
            [sys.executable, "-c", MEASURED, str(path), str(target)], cwd=ROOT, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert "DiT-XL/2: 675,129,632 parameters, latents 4 x 32 x 32, 1000 classes and a null label" in result.stdout
        assert int(result.stdout.splitlines()[-1]) * 1024 < 2 * path.stat().st_size
        source = torch.load(path, mmap=True, weights_only=True)
        with safe_open(target / "transformer/diffusion_pytorch_model.safetensors", "pt") as converted:
            assert set(converted.keys()) == set(shapes)
            for name in ["pos_embed", "blocks.27.mlp.fc2.weight", "y_embedder.embedding_table.weight"]:
                assert torch.equal(converted.get_tensor(name), source[name])
    finally:
        shutil.rmtree(tmp_path)  # 5 GB that pytest would keep
