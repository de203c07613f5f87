"""Trains tiny models while killing them at random moments, and compares with runs that nothing stopped."""

import argparse
import contextlib
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from vcagen.benchmark.measure import launcher
from vcagen.checkpoint import list_checkpoints
from vcagen.files import write_json
from vcagen.metrics import read_metrics

STEPS = 600
CONFIG = f"""
data: {{name: digits}}
model: {{variant: SiT-tiny/2, hidden_size: 32, depth: 2, num_heads: 2, attention: {{name: vca}}}}
sampler: {{name: euler, num_steps: 2}}
train:
  max_steps: {STEPS}
  global_batch_size: 8
  learning_rate: 1.0e-3
  schedule: cosine
  gradient_clip: 1.0
  ema_decay: 0.99
  log_every: 1
  checkpoint_every: 10
  preview_every: 100
  preview_images: 4
  trackers: []
"""

# One process takes two micro-batches where two processes take one each: the sums are the same, bit for bit.
LAYOUTS = {1: "train.gradient_accumulation_steps=2", 2: "train.gradient_accumulation_steps=1"}
SMALL_DISK = 60_000  # bytes that a file may have in a leg whose disk refuses; a weights file has more


def soak(arguments: argparse.Namespace) -> None:
    """Kills and restarts until the time is up; prints what was survived and raises where anything differs."""
    if arguments.minutes <= 0:
        raise ValueError(f"--minutes {arguments.minutes}: must be more than 0")
    chance = random.Random(arguments.seed)
    ends = time.monotonic() + 60 * arguments.minutes
    counts: Counter[str] = Counter()
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vcagen-soak-") as name, tqdm(desc="kills", unit="kill") as bar:
        folder = Path(name)
        while time.monotonic() < ends:
            seed = counts["runs finished"]
            config = folder / f"{seed}.yaml"
            config.write_text(f"run_dir: {folder}/unused\nseed: {seed}\n{CONFIG}")
            straight, broken = folder / f"straight-{seed}", folder / f"broken-{seed}"
            _finish(config, straight)
            _break_until_finished(config, broken, chance, counts, bar.update, ends)
            counts["runs finished"] += 1
            found += differences(straight, broken)
    result: dict[str, Any] = {
        **{key: counts[key] for key in ("runs finished", "kills survived", "full disks survived", "steps lost")},
        **{f"legs with {number} processes": counts[f"{number}"] for number in LAYOUTS},
        "steps per run": STEPS,
        "differences": len(found),
    }
    for key, value in result.items():
        print(f"{key:24} {value}")
    if arguments.json:
        write_json(arguments.json, result | {"differing": found})
    if found:
        raise ValueError("the broken runs differ from the straight ones:\n" + "\n".join(found[:20]))


def _command(config: Path, run_dir: Path, processes: int) -> list[str]:
    return [*launcher(processes), "train.py", str(config), f"run_dir={run_dir}", LAYOUTS[processes]]


def _start(config: Path, run_dir: Path, processes: int, prepare: Callable[[], None] | None = None) -> Any:
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    log = (run_dir.with_suffix(".log")).open("ab")
    return subprocess.Popen(
        _command(config, run_dir, processes),
        cwd=root,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _finish(config: Path, run_dir: Path) -> None:
    process = _start(config, run_dir, 1)
    if process.wait():
        raise ValueError(f"the run that nothing stops failed:\n{run_dir.with_suffix('.log').read_text()[-2000:]}")


def _break_until_finished(
    config: Path,
    run_dir: Path,
    chance: random.Random,
    counts: Counter[str],
    tell: Callable[[], Any],
    ends: float,
) -> None:
    """Legs of one or two processes, each killed after a random time, until one ends by itself."""
    for leg in range(10_000):
        processes = chance.choice(list(LAYOUTS))
        is_last = time.monotonic() > ends  # the time is up: nothing stops this leg
        is_full = leg % 7 == 3 and not is_last
        before = _newest_step(run_dir)
        process = _start(config, run_dir, processes, _limit_files if is_full else None)
        counts[str(processes)] += 1
        # Most of a leg is start-up; the kill comes anywhere from there to well into training.
        patience = chance.uniform(2.5, 6.0) + 2.0 * (processes - 1)
        try:
            code = process.wait(timeout=None if is_last else patience)
        except subprocess.TimeoutExpired:
            reached = _logged_step(run_dir)
            _kill_all(run_dir)
            process.wait()
            counts["kills survived"] += 1
            counts["full disks survived"] += is_full
            counts["steps lost"] += max(0, reached - max(before, _newest_step(run_dir)))
            tell()
            continue
        if code == 0 and _newest_step(run_dir) == STEPS:
            return
        if not is_full:
            raise ValueError(f"a leg ended with exit code {code}:\n{run_dir.with_suffix('.log').read_text()[-2000:]}")
        counts["full disks survived"] += 1
    raise ValueError("no leg finished the run")


def _kill_all(run_dir: Path) -> None:
    """Kills every process of a run at once; torchrun's workers are not in its process group (Linux)."""
    mark = f"run_dir={run_dir}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, SMALL_DISK))


def _newest_step(run_dir: Path) -> int:
    found = list_checkpoints(run_dir)
    return found[-1][0] if found else 0


def _logged_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def differences(first: Path, second: Path) -> list[str]:
    """Every tensor of the last checkpoints and every logged loss that is not bit-equal."""
    found = []
    folders = [list_checkpoints(run)[-1][1] for run in (first, second)]
    for path in sorted(folders[0].rglob("*.safetensors")):
        name = path.relative_to(folders[0])
        ours, theirs = load_file(path), load_file(folders[1] / name)
        found += [f"{second.name}: {name}: {key}" for key in ours if not torch.equal(ours[key], theirs[key])]
    rows = [
        {row["step"]: (row["loss"], row["gradient_norm"]) for row in read_metrics(r / "metrics.jsonl")}
        for r in (first, second)
    ]
    found += [f"{second.name}: loss of step {step}" for step in rows[0] if rows[0][step] != rows[1].get(step)]
    return found
