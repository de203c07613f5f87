"""The same training steps by one process and by two, each with one thread of a CPU: `train.py` itself."""

import os
import shutil
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vcagen.benchmark.measure import launcher
from vcagen.benchmark.model import ATTENTIONS
from vcagen.files import write_image
from vcagen.metrics import read_metrics

PROCESSES = (1, 2)
GLOBAL_BATCH = 8
STEPS = 4
WARM_UP = 1  # the first steps of a run are not timed
TOLERANCE = 1e-5  # of losses and gradient norms, relative: sums in another order differ by far less
SIDE = 32  # of images of noise, which take the place of latents: no autoencoder is needed; 3 channels, not 4
CONFIG = """
run_dir: {folder}/unused
data: {{name: image_folder, root: {folder}/images, image_size: {side}}}
model: {{variant: {variant}}}
sampler: {{num_steps: 2}}
train:
  max_steps: {steps}
  global_batch_size: {batch}
  log_every: 1
  preview_images: 1
  keep_checkpoints: 1
  resume: never
  trackers: []
"""


@dataclass(frozen=True)
class ProcessesRow:
    """Training steps of one attention in one process and in two.

    Attributes:
        attention: its name.
        seconds: of a step in one process and in two; medians over the rounds.
        speed_up: median over the rounds of the time of one process over that of two in the same round.
        lowest, highest: of those.
        efficiency: speed-up over processes.
        difference: largest relative difference of a step's loss or gradient norm, in any round.
    """

    attention: str
    seconds: tuple[float, float]
    speed_up: float
    lowest: float
    highest: float
    efficiency: float
    difference: float


def measure_processes(variant: str, rounds: int) -> list[ProcessesRow]:
    """Trains with every attention in one process and in two, in turn, `rounds` times.

    Raises:
        ValueError: a run failed, or losses or gradient norms differ by more than `TOLERANCE`.
    """
    times: dict[tuple[str, int], list[float]] = {(name, number): [] for name in ATTENTIONS for number in PROCESSES}
    differences = dict.fromkeys(ATTENTIONS, 0.0)
    with tempfile.TemporaryDirectory(prefix="vcagen-scaling-") as name:
        config = write_run(Path(name), variant)
        with tqdm(total=rounds * len(times), desc="1 and 2 processes", unit="run", delay=2) as bar:
            for _ in range(rounds):
                for attention in ATTENTIONS:
                    rows = {}
                    for number in PROCESSES:
                        rows[number] = train_rows(config, attention, number)
                        seconds = [1 / row["steps_per_second"] for row in rows[number][WARM_UP:]]
                        times[attention, number].append(statistics.median(seconds))
                        bar.update()
                    difference = largest_difference(rows[1], rows[2])
                    differences[attention] = max(differences[attention], difference)
    return [_row(name, times[name, 1], times[name, 2], differences[name]) for name in ATTENTIONS]


def _row(attention: str, ones: list[float], twos: list[float], difference: float) -> ProcessesRow:
    speed_ups = [one / two for one, two in zip(ones, twos, strict=True)]
    speed_up = statistics.median(speed_ups)
    return ProcessesRow(
        attention,
        (statistics.median(ones), statistics.median(twos)),
        speed_up,
        min(speed_ups),
        max(speed_ups),
        speed_up / PROCESSES[-1],
        difference,
    )


def write_run(folder: Path, variant: str) -> Path:
    """Writes images of noise, one for each sample of a run, and a config that trains on them; returns its path."""
    images = folder / "images/noise"
    images.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(STEPS * GLOBAL_BATCH):
        write_image(images / f"{number:04d}.png", generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(folder=folder, side=SIDE, variant=variant, steps=STEPS, batch=GLOBAL_BATCH))
    return config


def train_rows(config: Path, attention: str, processes: int) -> list[dict[str, Any]]:
    """Trains the config in so many processes; the row of metrics of each step.

    Raises:
        ValueError: it failed; with the end of what it wrote.
    """
    run_dir = config.parent / f"{attention}-{processes}"
    settings = [f"run_dir={run_dir}", f"model.attention.name={attention}"]
    result = subprocess.run(
        [*launcher(processes), "train.py", str(config), *settings],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        raise ValueError(f"training with {attention} in {processes} processes failed:\n{result.stdout[-2000:]}")
    rows = read_metrics(run_dir / "metrics.jsonl")
    shutil.rmtree(run_dir)
    return rows


def largest_difference(ones: list[dict[str, Any]], twos: list[dict[str, Any]]) -> float:
    """The largest relative difference of a loss or gradient norm between the rows of two runs.

    Raises:
        ValueError: it is more than `TOLERANCE`, or there are not equally many rows.
    """
    if len(ones) != len(twos):
        raise ValueError(f"one process logged {len(ones)} steps, two logged {len(twos)}")
    largest = 0.0
    for one, two in zip(ones, twos, strict=True):
        for key in ("loss", "gradient_norm"):
            difference = abs(one[key] - two[key]) / abs(one[key])
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"step {one['step']}: {key} is {one[key]} in one process and {two[key]} in two; "
                    f"more than {TOLERANCE:g} of it apart"
                )
            largest = max(largest, difference)
    return largest
