"""Trains and scores the runs of an experiment; what has a result is not trained again."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from fid.experiment.plan import Experiment, PlannedRun, plan_runs, read_experiment, read_result, result_path, run_config
from vcagen.files import require_writable, write_grid, write_json

GRID_LABELS = 10
GRID_COLUMNS = 4


def train_all(path: Path, experiment: Experiment, planned: list[PlannedRun], out: Path, runs: Path, jobs: int) -> None:
    """Trains and scores what has no result yet, `jobs` runs at a time, each in a process of its own.

    Raises:
        ValueError: a run failed; its last line is shown. Those that have begun are finished, no other is started.
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

    children: list[subprocess.Popen[str]] = []
    stopped = threading.Event()

    def start(run: PlannedRun) -> str | None:
        if stopped.is_set():
            return None
        command = [
            sys.executable,
            "-m",
            "fid.experiment.train",
            str(path),
            run.name,
            str(run.seed),
            str(out),
            str(runs),
        ]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
        children.append(child)
        _, message = child.communicate()
        if child.returncode == 0:
            return None
        stopped.set()  # runs that have begun are finished, no other is started
        return f"{run.name}: {(message.strip() or 'no message').splitlines()[-1]}"

    bar = tqdm(total=len(planned), initial=len(planned) - len(missing), desc="runs", unit="run")
    failures = []
    with bar, ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(start, run) for run in missing]):
                failures += [future.result()] if future.result() else []
                bar.update()
        except BaseException:  # Ctrl-C or a scheduler's stop: runs end by their checkpoints, none is started
            stopped.set()
            for child in children:
                child.terminate()
            raise
    if failures:
        raise ValueError(f"a run failed, and the same command goes on after it is mended: {failures[0]}")


def train_one(path: Path, name: str, seed: int, out: Path, runs: Path) -> None:
    """Trains one planned run, or goes on with it, and writes its result and its grid."""
    import numpy as np
    import torch

    from fid.scorer import TrainingScorer
    from vcagen.generation import load_model, plan_samples
    from vcagen.metrics import read_metrics
    from vcagen.training import SCORES_FILE, train

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    experiment = read_experiment(path)
    (run,) = [run for run in plan_runs(experiment, (seed,)) if run.name == name]
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
        "config": {**config.model_dump(mode="json"), "run_dir": "runs"},  # where it was trained says nothing
        "num_parameters": sum(parameter.numel() for parameter in model.maker.model.parameters()),
        "losses": [[row["step"], round(row["loss"], 6)] for row in metrics],
        "scores": read_metrics(Path(config.run_dir) / SCORES_FILE),
        "seconds": round(time.time() - started, 1),
    }
    write_json(result_path(out, run), result)


if __name__ == "__main__":
    from vcagen.commands import exit_code

    _, file, run_name, run_seed, out_folder, runs_folder = sys.argv
    sys.exit(exit_code(lambda: train_one(Path(file), run_name, int(run_seed), Path(out_folder), Path(runs_folder))))
