"""The training loop. Running it again on the same run folder goes on from the newest checkpoint.

All randomness of a step comes from (seed, step, position in the global batch), so a resumed run has nothing to
restore but weights, optimiser moments and counters.
"""

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
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
from vcagen.config import RunConfig, TrainConfig, dump_config
from vcagen.curves import plot_losses
from vcagen.data import ImageData, build_data
from vcagen.data.order import TrainingOrder
from vcagen.files import require_writable, write_grid, write_text
from vcagen.generation import ImageMaker, plan_samples
from vcagen.guidance import drop_labels
from vcagen.metrics import LossWindow, MetricsFile
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant
from vcagen.objectives import Objective, build_objective
from vcagen.optimizer import OptimizerTensors, build_optimizer, learning_rate
from vcagen.resume import resume
from vcagen.seeds import sample_generator, seed_from, uniform
from vcagen.signals import Interrupted, stop_signal

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
    run, first_step = _prepare(config)
    accelerator = run.accelerator
    if first_step >= config.train.max_steps:
        accelerator.print(f"{run.folder}: trained to step {first_step} already; train.max_steps is reached")
        return
    batches = _batches(run, first_step)
    metrics = MetricsFile(run.folder / "metrics.jsonl", first_step, accelerator)
    window = LossWindow(accelerator)
    bad_steps = 0
    bar = tqdm(
        total=config.train.max_steps,
        initial=first_step,
        desc="training",
        unit="step",
        disable=not accelerator.is_main_process,
    )
    with bar, stop_signal(accelerator) as received:
        for step in range(first_step + 1, config.train.max_steps + 1):
            bad_steps = 0 if _update(run, step, batches, window) else bad_steps + 1
            if bad_steps >= config.train.max_bad_steps:
                raise ValueError(_not_finite_message(run.folder, step, bad_steps))
            bar.update()

            signal_number = received()
            is_last = step == config.train.max_steps
            saves = is_last or bool(signal_number) or step % config.train.checkpoint_every == 0
            if (saves or step % config.train.log_every == 0) and window.num_samples:
                row = window.close(step, learning_rate(config.train, step - 1))
                metrics.write(row)
                bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)
            if accelerator.is_main_process:
                if saves and not bad_steps:
                    _save(run, step)
                if is_last or step % config.train.preview_every == 0:
                    _write_preview(run, step)
            if signal_number:
                raise Interrupted(signal_number, step)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        plot_losses([run.folder], run.folder / "loss.png")
        accelerator.print(
            f"trained to step {config.train.max_steps}\n"
            f"  {run.folder}/checkpoints: weights, EMA weights and optimiser\n"
            f"  {run.folder}/previews: grids of EMA samples, from the same noise at every step\n"
            f"  {run.folder}/loss.png: the loss over the steps, from metrics.jsonl"
        )


def _prepare(config: RunConfig) -> tuple[Run, int]:
    """Builds and checks everything, resumes if there is a checkpoint; the step to go on from. See `train`."""
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
    if accelerator.is_main_process:
        # Two sets of weights and two of moments, in every kept checkpoint and the one being written.
        require_writable(folder, 16 * num_parameters * (config.train.keep_checkpoints + 1))
    found = checkpoints.list_checkpoints(folder)
    first_step, state = 0, {}
    if found:
        first_step, newest = found[-1]
        state = resume(newest, config, data.class_names, raw_model, ema, moments)
    if accelerator.is_main_process:
        write_text(folder / "run.yaml", dump_config(config))
    accelerator.print(
        f"data: {data.report}; classes {_class_table(data.class_names)}\n"
        f"model: {config.model.variant} with {config.model.attention.name}, {num_parameters:,} parameters\n"
        f"run folder: {folder}" + (f", going on from step {first_step}" if first_step else "")
    )
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    ema.to(accelerator.device)
    if accelerator.scaler is not None and state.get("scaler"):
        accelerator.scaler.load_state_dict(state["scaler"])
    accelerator.init_trackers("vcagen", config={"config": dump_config(config)})
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
    return iter(
        DataLoader(
            TrainingImages(run.data),
            batch_sampler=order,
            num_workers=config.train.num_workers,
            pin_memory=accelerator.device.type == "cuda",
        )
    )


def _update(run: Run, step: int, batches: Iterator[Batch], window: LossWindow) -> bool:
    """One optimiser step, counted from 1, over all its micro-batches; False if it was not finite and was skipped."""
    config, accelerator = run.config.train, run.accelerator
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
        window.add(losses, norm)
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
        f"step {step}: {bad_steps} updates in a row were not finite; {kept}; "
        "lower train.learning_rate, set train.gradient_clip, or use train.precision=fp32"
    )


def _save(run: Run, step: int) -> None:
    """Writes a checkpoint; a disk that refuses costs a message, and the next interval tries again."""
    scaler = run.accelerator.scaler
    state = {
        "ema_updates": int(run.ema.n_averaged) - 1,
        "ema_decay": run.config.train.ema_decay,
        "class_names": list(run.data.class_names),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "torch": torch.__version__,
    }
    try:
        checkpoints.save_checkpoint(
            run.folder, step, run.raw_model, run.ema_model, run.moments.read(), state, run.config
        )
    except (OSError, SafetensorError) as error:
        tqdm.write(f"step {step}: no checkpoint written ({error}); the one before is as it was", file=sys.stderr)


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
