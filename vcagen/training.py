"""The training loop. Running it again on the same run folder goes on from the newest checkpoint.

All randomness of a step comes from (seed, step, position in the global batch), so a resumed run has nothing to
restore but weights, optimiser moments and counters.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch.profiler import record_function
from torch.utils.data import DataLoader
from tqdm import tqdm

from vcagen import checkpoint as checkpoints
from vcagen.bad_steps import BadSteps, NotFiniteError
from vcagen.checkpoint import CheckpointState
from vcagen.config import RunConfig, dump_config
from vcagen.curves import plot_losses
from vcagen.data.order import TrainingOrder
from vcagen.files import write_grid, write_json
from vcagen.generation import ImageMaker, plan_samples
from vcagen.metrics import LossWindow, MetricsFile
from vcagen.models.transformer import DiffusionTransformer
from vcagen.optimizer import learning_rate
from vcagen.run import Run, prepare_run
from vcagen.sampling_config import flat
from vcagen.sharding import is_sharded, whole_model, whole_tensors
from vcagen.signals import Interrupted, leave_signals_to_the_main_process, stop_signal
from vcagen.training_samples import TrainingSamples
from vcagen.updates import Batch, Updates

SCORES_FILE = "scores.jsonl"
SCORE_SETTINGS_FILE = "scores.json"  # what all its rows are made with


class Scorer(Protocol):
    """Scores the EMA weights during training. Evaluation lies above training, which is handed one of these."""

    def prepare(self, run: Run) -> None:
        """Makes all ready before the first step, on every process; a `ValueError` for what cannot be scored."""

    def score(self, run: Run, model: DiffusionTransformer) -> dict[str, float]:
        """Called on every process with the EMA weights; the scores by name on the main one, nothing on others."""


def train(config: RunConfig, scorer: Scorer | None = None) -> None:
    """Trains the run that `config` describes, or goes on with it.

    Args:
        config: the run.
        scorer: where `config.score` asks for scores.

    Raises:
        ValueError: the run cannot start (config, data, folder, disk, checkpoint), or `max_bad_steps` updates in a
            row were not finite.
        Interrupted: SIGINT, SIGTERM or SIGUSR1 came; the message says from which checkpoint the run goes on.
    """
    with contextlib.ExitStack() as stack:
        run, first_step = prepare_run(config, stack)
        accelerator = run.accelerator
        if first_step >= config.train.max_steps:
            accelerator.print(f"{run.folder}: trained to step {first_step} already; train.max_steps is reached")
            return
        if scorer is not None:
            _require_same_scoring(run)
            scorer.prepare(run)
        accelerator.init_trackers("vcagen", config={"config": dump_config(config)})
        stack.callback(accelerator.end_training)
        _loop(run, first_step, scorer)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _try("no loss curve", lambda: plot_losses([run.folder], run.folder / "loss.png"))
        accelerator.print(
            f"trained to step {config.train.max_steps}\n"
            f"  {run.folder}/checkpoints: weights, EMA weights and optimiser\n"
            f"  {run.folder}/previews: grids of EMA samples, from the same noise at every step\n"
            f"  {run.folder}/loss.png: the loss over the steps, from metrics.jsonl"
        )


def _loop(run: Run, first_step: int, scorer: Scorer | None) -> None:
    """All updates from `first_step` on, with rows, checkpoints, previews and scores at their intervals. See `train`."""
    config, accelerator = run.config.train, run.accelerator
    batches = micro_batches(run, first_step)
    metrics = MetricsFile(run.folder / "metrics.jsonl", first_step, accelerator)
    scores = MetricsFile(run.folder / SCORES_FILE, first_step, accelerator) if scorer else None
    window = LossWindow(accelerator)
    updates = Updates(run, window, BadSteps(run))
    done, is_saved = first_step, True
    bar = tqdm(
        total=config.max_steps,
        initial=first_step,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
        mininterval=0.2 if sys.stderr.isatty() else 10,  # a log file needs fewer lines
    )
    with bar, stop_signal(accelerator) as stop:
        try:
            for step in range(first_step + 1, config.max_steps + 1):
                updates.update(step, batches)
                done, is_saved = step, False
                bar.update()

                signal_number = stop.agreed()
                is_last = step == config.max_steps
                saves = is_last or bool(signal_number) or step % config.checkpoint_every == 0
                logs = saves or step % config.log_every == 0
                previews = is_last or step % config.preview_every == 0
                scores_now = scores and (is_last or (run.config.score and step % run.config.score.every == 0))
                if logs or previews or scores_now:
                    updates.settle()
                if logs and window.num_samples:
                    with record_function("logging"):
                        row = window.close(step, learning_rate(config, step - 1), config.ema_decay)
                        metrics.write(row)
                    rates = {"loss": f"{row['loss']:.4f}", "images/s": f"{row['images_per_second']:.0f}"}
                    rates |= {"memory": f"{row['memory_gb']:.1f} GB"} if "memory_gb" in row else {}
                    bar.set_postfix(rates, refresh=False)
                if saves:
                    is_saved = _save(run, step)
                if previews:
                    _preview(run, step)
                if scores_now:
                    assert scorer
                    assert scores
                    _score(run, step, scorer, scores)
                if signal_number:
                    accelerator.wait_for_everyone()  # for the checkpoint, before a launcher sees an exit
                    raise Interrupted(signal_number, step, _what_is_kept(run.folder))
        except (NotFiniteError, Interrupted):
            raise
        except Exception as error:  # data that cannot be read, a full disk: what was done is not lost
            # Weights that are split are lost with the first process that ends.
            if accelerator.is_main_process and not is_saved and not is_sharded(run.raw_model):
                updates.settle()
                _save(run, done)
            if stop.number:  # it reached the data workers too, and their end is this error
                raise Interrupted(stop.number, done, _what_is_kept(run.folder)) from error
            if "Connection closed by peer" in str(error):  # as gloo puts it
                raise ValueError(
                    f"step {done}: another process of this run ended, and said why; {_what_is_kept(run.folder)}"
                ) from error
            raise
    if accelerator.is_main_process and not is_saved:
        raise ValueError(f"step {done}: trained to the end, but not saved; {_what_is_kept(run.folder)}")


def _what_is_kept(folder: Path) -> str:
    found = checkpoints.list_checkpoints(folder)
    if not found:
        return "there is no checkpoint, so the same command starts anew"
    return f"the same command goes on from step {found[-1][0]}"


def _try(what_is_missing: str, work: Callable[[], None]) -> None:
    """Does something that training can do without; where it fails, a message says what is missing."""
    try:
        work()
    except (ValueError, OSError, SafetensorError) as error:
        tqdm.write(f"{what_is_missing} ({error})", file=sys.stderr)


def micro_batches(run: Run, first_step: int) -> Iterator[Batch]:
    """Micro-batches of this process from `first_step` (counted from 0) to the end of the run."""
    config, accelerator = run.config, run.accelerator
    order = TrainingOrder(
        num_samples=len(run.data),
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=run.micro_batch_size,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        first_step=first_step,
        max_steps=config.train.max_steps,
    )
    loader = DataLoader(
        TrainingSamples(run.data, config.seed),
        batch_sampler=order,
        num_workers=config.train.num_workers,
        worker_init_fn=leave_signals_to_the_main_process,
        pin_memory=accelerator.device.type == "cuda",
    )
    try:
        yield from loader
    except ValueError as error:  # a worker's error arrives with its traceback as text
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error


def _save(run: Run, step: int) -> bool:
    """Writes a checkpoint; a disk that refuses costs a message, and the next interval tries again.

    The main process writes and says whether it could; the others only hand over the weights that they hold.
    """
    is_main = run.accelerator.is_main_process
    started = time.perf_counter()
    model, ema = (whole_model(each, keep=is_main) for each in (run.raw_model, run.ema_model))
    moments = whole_tensors(run.moments.read(), keep=is_main)
    if not is_main:
        return True
    scaler = run.accelerator.scaler
    state = CheckpointState(
        step=step,
        ema_updates=int(run.ema.n_averaged),
        ema_decay=run.config.train.ema_decay,
        class_names=run.data.class_names,
        data_fingerprint=run.data.fingerprint,
        scaler=scaler.state_dict() if scaler is not None else None,
        torch_version=torch.__version__,
    )
    try:
        folder = checkpoints.save_checkpoint(run.folder, state, model, ema, moments, run.config)
    except (OSError, SafetensorError) as error:
        tqdm.write(f"step {step}: no checkpoint written ({error}); those before are as they were", file=sys.stderr)
        return False
    megabytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    tqdm.write(f"step {step}: checkpoint of {megabytes:.1f} MB written in {time.perf_counter() - started:.2f} s")
    return True


def _preview(run: Run, step: int) -> None:
    """Writes a preview on the main process, if it can be written."""
    is_main = run.accelerator.is_main_process
    model = whole_model(run.ema_model, keep=is_main)
    if is_main:
        _try(f"step {step}: no preview", lambda: _write_preview(run, model.to(run.accelerator.device), step))


def _require_same_scoring(run: Run) -> None:
    """Scores of other references or samplers are another curve; a `ValueError` that names what has changed."""
    path = run.folder / SCORE_SETTINGS_FILE
    sampling = run.config.model_dump(mode="json", include={"sampler", "guidance", "decoding", "label_mode"})
    score = run.config.score.model_dump(mode="json", exclude={"every"}) if run.config.score else {}
    now = json.loads(json.dumps(dict(flat({"score": score, **sampling}))))
    before = json.loads(path.read_text()) if path.exists() and (run.folder / SCORES_FILE).exists() else now
    changed = [key for key in sorted(now.keys() | before.keys()) if now.get(key) != before.get(key)]
    if changed:
        key = changed[0]
        raise ValueError(
            f"{run.folder / SCORES_FILE}: its scores were made with {key}={before.get(key)}, now it is {now.get(key)}; "
            "put it back, or move the file away to begin another curve"
        )
    if run.accelerator.is_main_process:
        write_json(path, now)
    run.accelerator.wait_for_everyone()


def _score(run: Run, step: int, scorer: Scorer, scores: MetricsFile) -> None:
    """Writes a row of scores of the EMA weights; all processes take part."""
    model = whole_model(run.ema_model, keep=True).to(run.accelerator.device).eval()
    scores.write({"step": step, **scorer.score(run, model)})


def _write_preview(run: Run, model: DiffusionTransformer, step: int) -> None:
    """EMA samples of the first ten classes, one class a row, from the same noise at every step."""
    config, num_classes = run.config, len(run.data.class_names)
    rows = min(num_classes, 10)
    columns = max(1, config.train.preview_images // rows)
    labels = [label for label in range(rows) for _ in range(columns)]
    maker = ImageMaker(model.eval(), config, run.autoencoder)
    samples = plan_samples(labels, config.seed, num_classes)
    images = np.stack([image for _, image in maker.images(samples, batch_size=64, progress=False)])
    folder = run.folder / "previews"
    folder.mkdir(exist_ok=True)
    write_grid(folder / f"step_{step:07d}.png", images, columns)
