"""The training loop. Running it again on the same run folder goes on from the newest checkpoint.

All randomness of a step comes from (seed, step, position in the global batch), so a resumed run has nothing to
restore but weights, optimiser moments and counters.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from safetensors import SafetensorError
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from vcagen import checkpoint as checkpoints
from vcagen.autoencoder import IdentityAutoencoder
from vcagen.checkpoint import CheckpointState
from vcagen.config import RunConfig, TrainConfig, dump_config
from vcagen.curves import plot_losses
from vcagen.data import ImageData, build_data
from vcagen.data.order import TrainingOrder
from vcagen.files import locked, require_writable, write_grid, write_text
from vcagen.generation import ImageMaker, plan_samples
from vcagen.guidance import drop_labels
from vcagen.metrics import LossWindow, MetricsFile
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant
from vcagen.objectives import Objective, build_objective
from vcagen.optimizer import OptimizerTensors, build_optimizer, learning_rate
from vcagen.resume import resume
from vcagen.seeds import sample_generator, seed_from, uniform
from vcagen.signals import Interrupted, leave_signals_to_the_main_process, stop_signal

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class TrainingImages(Dataset[tuple[torch.Tensor, int, int, int, int]]):
    """(image uint8 (C, H, W), label, sample index, step, position) for the keys of `TrainingOrder`."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[torch.Tensor, int, int, int, int]:
        index, step, position = key
        return torch.from_numpy(self.data.image(index)), self.data.label(index), index, step, position


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from step to step."""

    config: RunConfig
    accelerator: Accelerator
    data: ImageData
    raw_model: DiffusionTransformer
    model: torch.nn.Module  # raw_model, wrapped where there are several processes
    ema: AveragedModel
    optimizer: torch.optim.Optimizer
    moments: OptimizerTensors
    objective: Objective
    autoencoder: IdentityAutoencoder

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.config.run_dir)

    @property
    def ema_model(self) -> DiffusionTransformer:
        """The averaged weights as a model."""
        assert isinstance(self.ema.module, DiffusionTransformer)
        return self.ema.module


def train(config: RunConfig) -> None:
    """Trains the run that `config` describes, or goes on with it.

    Raises:
        ValueError: the run cannot start (config, data, folder, disk, checkpoint), or `max_bad_steps` updates in a
            row were not finite.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    with contextlib.ExitStack() as stack:
        run, first_step = _prepare(config, stack)
        accelerator = run.accelerator
        if first_step >= config.train.max_steps:
            accelerator.print(f"{run.folder}: trained to step {first_step} already; train.max_steps is reached")
            return
        _loop(run, first_step)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            _try("no loss curve", lambda: plot_losses([run.folder], run.folder / "loss.png"))
        accelerator.print(
            f"trained to step {config.train.max_steps}\n"
            f"  {run.folder}/checkpoints: weights, EMA weights and optimiser\n"
            f"  {run.folder}/previews: grids of EMA samples, from the same noise at every step\n"
            f"  {run.folder}/loss.png: the loss over the steps, from metrics.jsonl"
        )


class NotFiniteError(ValueError):
    """Too many updates in a row were not finite; the weights since the last checkpoint are not to be trusted."""


def _loop(run: Run, first_step: int) -> None:
    """All updates from `first_step` on, with rows, checkpoints and previews at their intervals. See `train`."""
    config, accelerator = run.config.train, run.accelerator
    batches = _batches(run, first_step)
    metrics = MetricsFile(run.folder / "metrics.jsonl", first_step, accelerator)
    window = LossWindow(accelerator)
    bad_steps, done, is_saved = 0, first_step, True
    bar = tqdm(
        total=config.max_steps,
        initial=first_step,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
    )
    with bar, stop_signal(accelerator) as stop:
        try:
            for step in range(first_step + 1, config.max_steps + 1):
                bad_steps = 0 if _update(run, step, batches, window) else bad_steps + 1
                if bad_steps >= config.max_bad_steps:
                    raise NotFiniteError(_not_finite_message(run.folder, step, bad_steps))
                done, is_saved = step, False
                bar.update()

                signal_number = stop.agreed()
                is_last = step == config.max_steps
                saves = is_last or bool(signal_number) or step % config.checkpoint_every == 0
                if (saves or step % config.log_every == 0) and window.num_samples:
                    row = window.close(step, learning_rate(config, step - 1))
                    metrics.write(row)
                    bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)
                if accelerator.is_main_process:
                    is_saved = saves and _save(run, step)
                    if is_last or step % config.preview_every == 0:
                        _try(f"step {step}: no preview", lambda step=step: _write_preview(run, step))  # type: ignore[misc]
                if signal_number:
                    accelerator.wait_for_everyone()  # for the checkpoint, before a launcher sees an exit
                    raise Interrupted(signal_number, step, _what_is_kept(run.folder))
        except (NotFiniteError, Interrupted):
            raise
        except Exception as error:  # data that cannot be read, a full disk: what was done is not lost
            if accelerator.is_main_process and not is_saved:
                _save(run, done)
            if stop.number:  # it reached the data workers too, and their end is this error
                raise Interrupted(stop.number, done, _what_is_kept(run.folder)) from error
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


def _prepare(config: RunConfig, stack: contextlib.ExitStack) -> tuple[Run, int]:
    """Builds and checks everything, resumes if there is a checkpoint; the step to go on from. See `train`.

    The run folder's lock and the trackers are the stack's to close.
    """
    folder = Path(config.run_dir)
    accelerator = _build_accelerator(config)
    _micro_batch_size(config.train, accelerator.num_processes)
    data = build_data(config.data)
    raw_model = build_model(config, data)
    ema = AveragedModel(raw_model, multi_avg_fn=get_ema_multi_avg_fn(config.train.ema_decay))
    ema.n_averaged.fill_(1)  # the initial weights count, as in DiT; at 0 the first update would only copy
    optimizer = build_optimizer(raw_model, config.train)
    moments = OptimizerTensors(raw_model, optimizer)
    num_parameters = sum(parameter.numel() for parameter in raw_model.parameters())
    _require_same_data(accelerator, data)
    found = checkpoints.list_checkpoints(folder)
    if accelerator.is_main_process:
        # Two sets of weights and two of moments, in every checkpoint that is still to come.
        new_checkpoints = max(1, config.train.keep_checkpoints + 1 - len(found))
        require_writable(folder, 16 * num_parameters * new_checkpoints)
        stack.enter_context(locked(folder))
    first_step, scaler_state = 0, None
    if found:
        first_step, newest = found[-1]
        scaler_state = resume(newest, config, data, raw_model, ema, moments).scaler
    if accelerator.is_main_process:
        write_text(folder / "run.yaml", dump_config(config))
    accelerator.print(
        f"data: {data.report}; classes {_class_table(data.class_names)}\n"
        f"model: {config.model.variant} with {config.model.attention.name}, {num_parameters:,} parameters\n"
        f"run folder: {folder}" + (f", going on from step {first_step}" if first_step else "")
    )
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    ema.to(accelerator.device)
    if accelerator.scaler is not None and scaler_state:
        accelerator.scaler.load_state_dict(scaler_state)
    accelerator.init_trackers("vcagen", config={"config": dump_config(config)})
    stack.callback(accelerator.end_training)
    objective, autoencoder = build_objective(config.objective), IdentityAutoencoder()
    return (
        Run(config, accelerator, data, raw_model, model, ema, optimizer, moments, objective, autoencoder),
        first_step,
    )


def build_model(config: RunConfig, data: ImageData) -> DiffusionTransformer:
    """The run's model, initialised from its seed; a `ValueError` where sizes do not fit each other."""
    variant = parse_variant(config.model.variant)
    channels, height, width = IdentityAutoencoder().latent_shape(data.image_shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed_from(config.seed, "init"))
        model = DiffusionTransformer(
            latent_size=(height, width),
            in_channels=channels,
            patch_size=config.model.patch_size or variant.patch_size,
            hidden_size=config.model.hidden_size or variant.shape.hidden_size,
            depth=config.model.depth or variant.shape.depth,
            num_heads=config.model.num_heads or variant.shape.num_heads,
            num_classes=len(data.class_names),
            has_null_label=config.train.label_dropout > 0,
            attention=config.model.attention.model_dump(mode="json"),
        )
    if config.model.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model


def _build_accelerator(config: RunConfig) -> Accelerator:
    installed = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    for tracker in config.train.trackers:
        if tracker not in installed:
            raise ValueError(
                f"train.trackers: {tracker!r} is not installed or not known; installed here: {', '.join(installed)}"
            )
    if config.train.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("train.precision=fp16 needs a GPU; use bf16 or fp32 on the CPU")
    return Accelerator(
        # Without this, several processes on a machine without accelerator do not find each other.
        cpu=not torch.accelerator.is_available(),
        mixed_precision={"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[config.train.precision],
        log_with=list(config.train.trackers) or None,
        project_dir=config.run_dir,
    )


def _require_same_data(accelerator: Accelerator, data: ImageData) -> None:
    fingerprint = torch.tensor([int(data.fingerprint[:15], 16)], device=accelerator.device)
    if len(accelerator.gather(fingerprint).unique()) > 1:
        raise ValueError("data: the processes see different files; give all of them the same folder")


def _micro_batch_size(config: TrainConfig, num_processes: int) -> int:
    parts = num_processes * config.gradient_accumulation_steps
    if config.global_batch_size % parts:
        raise ValueError(
            f"train.global_batch_size={config.global_batch_size} does not divide into {num_processes} processes "
            f"times train.gradient_accumulation_steps={config.gradient_accumulation_steps}; "
            f"it must be a multiple of {parts}"
        )
    return config.global_batch_size // parts


def _class_table(names: Sequence[str]) -> str:
    shown = ", ".join(f"{index}={name}" for index, name in enumerate(names[:10]))
    return shown + (f", ... ({len(names)} in all)" if len(names) > 10 else "")


def _batches(run: Run, first_step: int) -> Iterator[Batch]:
    """Micro-batches of this process from `first_step` (counted from 0) to the end of the run."""
    config, accelerator = run.config, run.accelerator
    order = TrainingOrder(
        num_samples=len(run.data),
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=_micro_batch_size(config.train, accelerator.num_processes),
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        first_step=first_step,
        max_steps=config.train.max_steps,
    )
    loader = DataLoader(
        TrainingImages(run.data),
        batch_sampler=order,
        num_workers=config.train.num_workers,
        worker_init_fn=leave_signals_to_the_main_process,
        pin_memory=accelerator.device.type == "cuda",
    )
    try:
        yield from loader
    except ValueError as error:  # a worker's error arrives with its traceback as text
        raise ValueError(str(error).strip().splitlines()[-1].removeprefix("ValueError: ")) from error


def _update(run: Run, step: int, batches: Iterator[Batch], window: LossWindow) -> bool:
    """One optimiser step, counted from 1, over all its micro-batches; False if it was not finite and was skipped."""
    config, accelerator = run.config.train, run.accelerator
    started = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, step - 1)
    bad_samples: list[int] = []
    losses: list[dict[str, torch.Tensor]] = []
    for remaining in reversed(range(config.gradient_accumulation_steps)):
        images, labels, indices, steps, positions = next(batches)
        generators = [
            sample_generator(run.config.seed, "train", int(s), int(p)) for s, p in zip(steps, positions, strict=True)
        ]
        latents, labels = _inputs(run, images, labels, generators)
        # Gradients are averaged over processes once, with the last micro-batch.
        with accelerator.no_sync(run.model) if remaining else contextlib.nullcontext():
            with accelerator.autocast():
                output = run.objective.loss(run.model, latents, labels, generators)
            accelerator.backward(output.loss.mean() / config.gradient_accumulation_steps)
        losses.append({"loss": output.loss.detach(), **output.parts})
        bad_samples += indices[~torch.isfinite(output.loss.detach()).cpu()].tolist()
    norm = accelerator.clip_grad_norm_(run.model.parameters(), config.gradient_clip or math.inf)
    is_good = bool(torch.isfinite(norm))  # the same on every process, as the gradients are
    if is_good or accelerator.scaler is not None:  # a scaler skips the update itself, and lowers its scale
        run.optimizer.step()
    run.optimizer.zero_grad()
    if is_good:
        run.ema.update_parameters(run.raw_model)
        window.add(losses, norm, time.perf_counter() - started)
    else:
        what = f"the loss of samples {bad_samples}" if bad_samples else "the gradient"
        tqdm.write(f"step {step}: {what} is not finite; update skipped", file=sys.stderr)
    return is_good


def _inputs(
    run: Run, images: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 (B, C, H, W) and labels (B,) to latents (B, C, H, W) and labels with some dropped."""
    images, labels = images.to(run.accelerator.device), labels.to(run.accelerator.device)
    if run.data.can_mirror:
        mirrored = uniform(generators, images.device) < 0.5
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    latents = run.autoencoder.sample_latents(run.autoencoder.encode(images))
    if run.config.train.label_dropout:
        labels = drop_labels(labels, run.config.train.label_dropout, run.raw_model.null_label, generators)
    return latents, labels


def _not_finite_message(folder: Path, step: int, bad_steps: int) -> str:
    found = checkpoints.list_checkpoints(folder)
    kept = f"the last good checkpoint is {found[-1][1]}" if found else "no checkpoint was written yet"
    return (
        f"step {step}: {bad_steps} updates in a row were not finite; {kept}; start another run_dir with a lower "
        "train.learning_rate, with train.gradient_clip, or with train.precision=fp32"
    )


def _save(run: Run, step: int) -> bool:
    """Writes a checkpoint; a disk that refuses costs a message, and the next interval tries again."""
    scaler = run.accelerator.scaler
    state = CheckpointState(
        step=step,
        ema_updates=int(run.ema.n_averaged) - 1,
        ema_decay=run.config.train.ema_decay,
        class_names=run.data.class_names,
        data_fingerprint=run.data.fingerprint,
        scaler=scaler.state_dict() if scaler is not None else None,
        torch_version=torch.__version__,
    )
    try:
        checkpoints.save_checkpoint(run.folder, state, run.raw_model, run.ema_model, run.moments.read(), run.config)
    except (OSError, SafetensorError) as error:
        tqdm.write(f"step {step}: no checkpoint written ({error}); those before are as they were", file=sys.stderr)
        return False
    return True


def _write_preview(run: Run, step: int) -> None:
    """EMA samples of the first classes, from the same noise at every step."""
    config, num_classes = run.config, len(run.data.class_names)
    columns = min(num_classes, 10)
    labels = [index % columns for index in range(config.train.preview_images)]
    maker = ImageMaker(run.ema_model.eval(), config.objective, config.sampler, config.guidance, run.autoencoder)
    samples = plan_samples(labels, config.seed, num_classes)
    images = np.stack([image for _, image in maker.images(samples, batch_size=64, progress=False)])
    folder = run.folder / "previews"
    folder.mkdir(exist_ok=True)
    write_grid(folder / f"step_{step:07d}.png", images, columns)
