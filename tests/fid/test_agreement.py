"""All metrics of two folders, by the command, against torch-fidelity's own calculate_metrics."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_fidelity
from PIL import Image

from fid.__main__ import main as fid_main

NUM_IMAGES = 14
SUBSET_SIZE = 8


def write_folder(folder: Path, seed: int, low: int) -> None:
    """Smooth random images 32x32 of levels from `low`."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    for index in range(NUM_IMAGES):
        coarse = random.integers(low, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC).save(folder / f"{index:03d}.png")


def livelier_weights(source: Path, target: Path) -> Path:
    """Random weights whose layers keep the size of what passes through; torch's own make features of nearly 0."""
    state = torch.load(source, weights_only=True)
    for name, value in state.items():
        if name.endswith("conv.weight"):
            value *= 6**0.5
    state["fc.weight"] *= 20
    torch.save(state, target)
    return target


def test_torch_fidelity_gives_the_same_numbers(
    tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "generated", 0, 0)
    write_folder(tmp_path / "real", 1, 30)
    weights = livelier_weights(inception_path, tmp_path / "inception.pth")
    options = ["--metrics", "fid,is,pr,kid", "--kid-subset-size", str(SUBSET_SIZE), "--extractor-weights", str(weights)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fid", "score", "generated", "--reference", "real", *options])
    assert fid_main() == 0
    ours = {score["name"]: score["value"] for score in json.loads(Path("generated/score.json").read_text())["scores"]}
    theirs = torch_fidelity.calculate_metrics(
        input1="generated",
        input2="real",
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        fid=True,
        isc=True,
        isc_splits=1,
        kid=True,
        kid_subset_size=SUBSET_SIZE,
        prc=True,
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    expected = {
        f"FID-{NUM_IMAGES}": theirs["frechet_inception_distance"],
        f"IS-{NUM_IMAGES}": theirs["inception_score_mean"],
        f"precision-{NUM_IMAGES}": theirs["precision"],
        f"recall-{NUM_IMAGES}": theirs["recall"],
        f"KID-{NUM_IMAGES} (subsets of {SUBSET_SIZE})": theirs["kernel_inception_distance_mean"],
    }
    assert list(ours) == list(expected)
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, rel=1e-4), name
    assert ours[f"IS-{NUM_IMAGES}"] > 1.01
    assert 0 < ours[f"precision-{NUM_IMAGES}"] < 1 or 0 < ours[f"recall-{NUM_IMAGES}"] < 1
    weights.unlink()
