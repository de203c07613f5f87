"""An experiment: the same run under several attentions and seeds, trained and scored alike, each finished run kept.

A run's result is one small JSON; what is there is not trained again, so a stopped experiment goes on where it was.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError
from tqdm import tqdm

from vcagen.config import RunConfig, load_config
from vcagen.files import require_writable, write_grid, write_json

GRID_LABELS = 10
GRID_COLUMNS = 4


class Experiment(BaseModel, extra="forbid", frozen=True):
    """What an experiment's file says.

    Attributes:
        base: the run, a config file beside this one.
        seeds: each row is trained with every one.
        overrides: `key=value` for all runs.
        families: more overrides, by the name of a group; rows are compared within it.
        rows: more overrides, by the name of a row; the first one is the control.
        only: rows of a family that has not all of them.
    """

    base: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    overrides: tuple[str, ...] = ()
    families: Annotated[dict[str, tuple[str, ...]], Field(min_length=1)]
    rows: Annotated[dict[str, tuple[str, ...]], Field(min_length=2)]
    only: dict[str, tuple[str, ...]] = {}

    def rows_of(self, family: str) -> list[str]:
        """Names of a family's rows, the control first."""
        return [row for row in self.rows if row in self.only.get(family, self.rows)]


@dataclass(frozen=True)
class PlannedRun:
    """One training of an experiment.

    Attributes:
        family: of the run.
        row: of the run.
        seed: of weights, data order, noise, times and label drops.
        name: of its files.
        overrides: beside the base's own settings.
    """

    family: str
    row: str
    seed: int
    name: str
    overrides: tuple[str, ...]


def read_experiment(path: Path) -> Experiment:
    """Reads and checks an experiment's file.

    Raises:
        ValueError: it cannot be read, or names rows and families that it has not; every run's settings are checked.
    """
    try:
        experiment = Experiment(**yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, TypeError) as error:
        raise ValueError(f"{path}: not an experiment ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {place}: {first['msg']}") from error
    for family, rows in experiment.only.items():
        if family not in experiment.families:
            raise ValueError(f"{path}: only.{family} is no family; there are {', '.join(experiment.families)}")
        unknown = [row for row in rows if row not in experiment.rows]
        if unknown:
            raise ValueError(f"{path}: only.{family} names {unknown[0]!r}, which is no row")
        if next(iter(experiment.rows)) not in rows:
            raise ValueError(f"{path}: only.{family} leaves out the control, the first of the rows")
    for run in plan_runs(experiment, experiment.seeds[:1]):
        config = run_config(path, experiment, run, Path("unused"))
        if config.score is None:
            raise ValueError(f"{path}: no score; add overrides score.reference=... and score.every=...")
    return experiment


def plan_runs(experiment: Experiment, seeds: tuple[int, ...]) -> list[PlannedRun]:
    """All runs, seed by seed, so that a stopped experiment has whole seeds."""
    return [
        PlannedRun(
            family=family,
            row=row,
            seed=seed,
            name=f"{_slug(family)}-{_slug(row)}-{seed}",
            overrides=(*experiment.overrides, *overrides, *experiment.rows[row], f"seed={seed}"),
        )
        for seed in seeds
        for family, overrides in experiment.families.items()
        for row in experiment.rows_of(family)
    ]


def run_config(path: Path, experiment: Experiment, run: PlannedRun, runs: Path) -> RunConfig:
    """The config of a run, which lies in a folder of its own below `runs`."""
    return load_config(path.parent / experiment.base, [*run.overrides, f"run_dir={runs / run.name}"])


def result_path(out: Path, run: PlannedRun) -> Path:
    """Where a run's result is kept."""
    return out / "runs" / f"{run.name}.json"


def read_result(path: Path, config: RunConfig) -> dict[str, Any] | None:
    """The result of a finished run, or None.

    Raises:
        ValueError: it is of other settings.
    """
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    # Through the model, so that a setting which did not exist then has its default now.
    before = RunConfig(**result["config"])
    if before.model_copy(update={"run_dir": config.run_dir}) != config:
        raise ValueError(f"{path}: the result of other settings; choose another --out, or delete it to train again")
    return result


def train_all(path: Path, experiment: Experiment, planned: list[PlannedRun], out: Path, runs: Path, jobs: int) -> None:
    """Trains and scores what has no result yet, `jobs` runs at a time, each in a process of its own.

    Raises:
        ValueError: a run failed; its last line is shown, and all others that have begun are finished first.
    """
    missing = []
    for run in planned:
        if read_result(result_path(out, run), run_config(path, experiment, run, runs)) is None:
            missing.append(run)
    if not missing:
        return
    require_writable(out / "runs")
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}

    def start(run: PlannedRun) -> tuple[PlannedRun, str | None]:
        command = [sys.executable, "-m", "fid.experiment", str(path), run.name, str(out), str(runs)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return run, None if done.returncode == 0 else (done.stderr.strip() or "no message").splitlines()[-1]

    failures = []
    bar = tqdm(total=len(planned), initial=len(planned) - len(missing), desc="runs", unit="run")
    with bar, ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(start, run) for run in missing]):
            run, failure = future.result()
            bar.update()
            if failure is not None:
                failures.append(f"{run.name}: {failure}")
                tqdm.write(failures[-1])
    if failures:
        raise ValueError(f"{len(failures)} of {len(missing)} runs failed; first {failures[0]}")


def train_one(path: Path, name: str, out: Path, runs: Path) -> None:
    """Trains one planned run, or goes on with it, and writes its result and its grid."""
    import numpy as np
    import torch

    from fid.scorer import TrainingScorer
    from vcagen.generation import load_model, plan_samples
    from vcagen.metrics import read_metrics
    from vcagen.training import SCORES_FILE, train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    experiment = read_experiment(path)
    (run,) = [run for run in plan_runs(experiment, experiment.seeds) if run.name == name]
    config = run_config(path, experiment, run, runs)
    assert config.score is not None
    started = time.time()
    train(config, TrainingScorer(config.score))
    model = load_model(Path(config.run_dir))
    labels = [label for label in range(min(GRID_LABELS, len(model.class_names))) for _ in range(GRID_COLUMNS)]
    samples = plan_samples(labels, 0, len(model.class_names))  # the same noise for all runs
    images = np.stack([image for _, image in model.maker.images(samples, 64, progress=False)])
    grid = out / "grids" / f"{run.name}.png"
    grid.parent.mkdir(parents=True, exist_ok=True)
    write_grid(grid, images, GRID_COLUMNS)
    metrics = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    result = {
        "family": run.family,
        "row": run.row,
        "seed": run.seed,
        "config": config.model_dump(mode="json"),
        "num_parameters": sum(parameter.numel() for parameter in model.maker.model.parameters()),
        "losses": [[row["step"], round(row["loss"], 6)] for row in metrics],
        "scores": read_metrics(Path(config.run_dir) / SCORES_FILE),
        "seconds": round(time.time() - started, 1),
    }
    write_json(result_path(out, run), result)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    from vcagen.commands import exit_code

    _, file, run_name, out_folder, runs_folder = sys.argv
    sys.exit(exit_code(lambda: train_one(Path(file), run_name, Path(out_folder), Path(runs_folder))))
