"""Real but tiny runs for tests: digits, two narrow blocks, a few steps."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vcagen.checkpoint import list_checkpoints
from vcagen.config import RunConfig, load_config

ROOT = Path(__file__).parents[1]

TINY = (
    "model.variant=SiT-tiny/2",
    "model.hidden_size=32",
    "model.depth=2",
    "model.num_heads=2",
    "sampler.num_steps=3",
    "train.max_steps=12",
    "train.global_batch_size=8",
    "train.warmup_steps=0",
    "train.schedule=constant",
    "train.log_every=1",
    "train.checkpoint_every=4",
    "train.preview_every=12",
    "train.preview_images=4",
    "train.trackers=[]",
)


def tiny_overrides(run_dir: Path, *overrides: str) -> list[str]:
    return [*TINY, f"run_dir={run_dir}", *overrides]


def tiny_config(run_dir: Path, *overrides: str) -> RunConfig:
    return load_config(ROOT / "configs/demo.yaml", tiny_overrides(run_dir, *overrides))


def run_train(run_dir: Path, *overrides: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """train.py in a process of its own, or in several under torchrun."""
    return subprocess.run(
        train_command(run_dir, *overrides, processes=processes), cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def train_command(run_dir: Path, *overrides: str, processes: int = 1) -> list[str]:
    launcher: Sequence[str] = [sys.executable]
    if processes > 1:
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(processes)),
        ]
    return [*launcher, "train.py", "configs/demo.yaml", *tiny_overrides(run_dir, *overrides)]


def rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl by step; every step at most once, and in order."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == sorted({row["step"] for row in found})
    return {row["step"]: row for row in found}


def losses(run_dir: Path) -> dict[int, float]:
    return {step: row["loss"] for step, row in rows(run_dir).items()}


def tensors_of(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, by file and name."""
    return {
        f"{path.relative_to(checkpoint)}:{name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Losses, norms, learning rates, weights, EMA, optimiser and counters are bit-equal."""
    columns = ("loss", "gradient_norm", "learning_rate", "ema_decay")
    found, expected = ([[row[c] for c in columns] for row in rows(folder).values()] for folder in (run_dir, reference))
    assert found == expected
    step, checkpoint = list_checkpoints(run_dir)[-1]
    reference_step, reference_checkpoint = list_checkpoints(reference)[-1]
    assert step == reference_step
    assert (checkpoint / "state.json").read_text() == (reference_checkpoint / "state.json").read_text()
    ours, theirs = tensors_of(checkpoint), tensors_of(reference_checkpoint)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
