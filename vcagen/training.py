"""The training loop. Running it again on the same run folder goes on from the newest checkpoint.

All randomness of a step comes from (seed, step, position in the global batch), so a resumed run has nothing to
restore but weights, optimiser moments and counters.
"""

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import set_seed
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
from vcagen.generation import Generator, plan_samples
from vcagen.guidance import drop_labels
from vcagen.metrics import LossWindow, MetricsFile
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant
from vcagen.objectives import build_objective
from vcagen.seeds import sample_generator, seed_from, uniform

# Keys that a resumed run may change; any other would make it another experiment.
RESUMABLE_KEYS = (
    "run_dir",
    "sampler",
    "guidance",
    "model.gradient_checkpointing",
    "train.max_steps",
    "train.gradient_accumulation_steps",
    "train.num_workers",
    "train.log_every",
    "train.preview_every",
    "train.preview_images",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.max_bad_steps",
    "train.trackers",
)


class Interrupted(Exception):  # noqa: N818
    """A signal asked the run to stop; the checkpoint is written. `exit_code` is 128 + the signal's number."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.exit_code = 128 + signal_number


class TrainingImages(Dataset[tuple[torch.Tensor, int, int, int, int]]):
    """(image uint8 (C, H, W), label, sample index, step, position) for the keys of `TrainingOrder`."""

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[torch.Tensor, int, int, int, int]:
        index = key[0]
        return torch.from_numpy(self.data.image(index)), self.data.label(index), *key


def build_model(config: RunConfig, data: ImageData) -> DiffusionTransformer:
    """The run's model, initialised from its seed; a `ValueError` where sizes do not fit each other."""
    family, shape, patch_size = parse_variant(config.model.variant)
    channels, height, width = IdentityAutoencoder().latent_shape(data.image_shape)
    set_seed(seed_from(config.seed, "init") % 2**32)
    model = DiffusionTransformer(
        latent_size=(height, width),
        in_channels=channels,
        patch_size=config.model.patch_size or patch_size,
        hidden_size=config.model.hidden_size or shape.hidden_size,
        depth=config.model.depth or shape.depth,
        num_heads=config.model.num_heads or shape.num_heads,
        num_classes=len(data.class_names),
        has_null_label=config.train.label_dropout > 0,
        attention=config.model.attention.model_dump(mode="json"),
    )
    if config.model.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    return model


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant, or a cosine to 0 at `max_steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(model: DiffusionTransformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on the weights of linear and convolution layers alone (not embeddings, norms, lambdas)."""
    decayed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) in decayed], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


class OptimizerTensors:
    """The moments of an AdamW optimiser as named tensors, and back."""

    kinds = ("exp_avg", "exp_avg_sq", "step")

    def __init__(self, model: DiffusionTransformer, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.named = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]

    def read(self) -> dict[str, torch.Tensor]:
        """Tensors by `kind.parameter_name`; empty before the first update."""
        states = ((name, self.optimizer.state.get(parameter, {})) for name, parameter in self.named)
        return {f"{kind}.{name}": state[kind] for name, state in states if state for kind in self.kinds}

    def expected(self) -> dict[str, torch.Tensor]:
        """A tensor of the right shape for each name that `read` returns after an update."""
        scalar = torch.zeros(())
        return {
            f"{kind}.{name}": scalar if kind == "step" else parameter
            for name, parameter in self.named
            for kind in self.kinds
        }

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """Puts tensors that `read` returned back."""
        state = {
            index: {kind: tensors[f"{kind}.{name}"] for kind in self.kinds}
            for index, (name, _) in enumerate(self.named)
        }
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})


def train(config: RunConfig) -> None:
    """Trains the run that `config` describes, or goes on with it.

    Raises:
        ValueError: the run cannot start (config, data, folder, disk, checkpoint), or `max_bad_steps` updates in a
            row were not finite.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written first.
    """
    run_dir = Path(config.run_dir)
    accelerator = _build_accelerator(config)
    is_main = accelerator.is_main_process
    micro_batch_size = _micro_batch_size(config.train, accelerator.num_processes)
    data = build_data(config.data)
    raw_model = build_model(config, data)
    ema = AveragedModel(raw_model, multi_avg_fn=get_ema_multi_avg_fn(config.train.ema_decay))
    ema.n_averaged.fill_(1)  # the initial weights count, as in DiT; at 0 the first update would only copy
    optimizer = build_optimizer(raw_model, config.train)
    moments = OptimizerTensors(raw_model, optimizer)
    num_parameters = sum(parameter.numel() for parameter in raw_model.parameters())
    if is_main:
        # Two copies of the weights and two moments, for every kept checkpoint and the one being written.
        require_writable(run_dir, 16 * num_parameters * (config.train.keep_checkpoints + 1))
    first_step, scaler_state = _resume(config, raw_model, ema, moments, data)
    if first_step >= config.train.max_steps:
        accelerator.print(f"{run_dir}: already trained to step {first_step}, train.max_steps is reached")
        return
    if is_main:
        write_text(run_dir / "run.yaml", dump_config(config))
        accelerator.print(f"data: {data.report}\nclasses: {_class_table(data.class_names)}")
        accelerator.print(
            f"model: {config.model.variant}, attention {config.model.attention.name}, "
            f"{num_parameters:,} parameters; run folder {run_dir}"
            + (f"; going on from step {first_step}" if first_step else "")
        )
    model, optimizer = accelerator.prepare(raw_model, optimizer)
    ema.to(accelerator.device)
    if accelerator.scaler is not None and scaler_state:
        accelerator.scaler.load_state_dict(scaler_state)
    accelerator.init_trackers("vcagen", config={"config": dump_config(config)})

    objective, autoencoder = build_objective(config.objective), IdentityAutoencoder()
    num_micro = config.train.gradient_accumulation_steps
    order = TrainingOrder(
        len(data), config.seed, config.train.global_batch_size, micro_batch_size,
        accelerator.process_index, accelerator.num_processes, first_step, config.train.max_steps,
    )  # fmt: skip
    batches = iter(
        DataLoader(
            TrainingImages(data),
            batch_sampler=order,
            num_workers=config.train.num_workers,
            pin_memory=accelerator.device.type == "cuda",
        )
    )
    preview = Generator(ema.module, config.objective, config.sampler, config.guidance, autoencoder)
    null_label = len(data.class_names)
    metrics = MetricsFile(run_dir / "metrics.jsonl", first_step, accelerator)
    window = LossWindow(accelerator)
    bad_steps = 0
    bar = tqdm(
        total=config.train.max_steps, initial=first_step, desc="training", unit="step", disable=not is_main
    )
    with bar, _stop_signal(accelerator) as received:
        for step in range(first_step, config.train.max_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.train, step)
            sample_ids: list[int] = []
            step_parts: list[dict[str, torch.Tensor]] = []
            for micro in range(num_micro):
                images, labels, indices, steps, positions = next(batches)
                generators = [
                    sample_generator(config.seed, "train", int(s), int(p))
                    for s, p in zip(steps, positions, strict=True)
                ]
                images, labels = images.to(accelerator.device), labels.to(accelerator.device)
                if data.can_mirror:
                    mirrored = uniform(generators, images.device) < 0.5
                    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
                latents = autoencoder.sample_latents(autoencoder.encode(images))
                if config.train.label_dropout:
                    labels = drop_labels(labels, config.train.label_dropout, null_label, generators)
                is_last = micro == num_micro - 1
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    with accelerator.autocast():
                        output = objective.loss(model, latents, labels, generators)
                    accelerator.backward(output.loss.mean() / num_micro)
                step_parts.append({"loss": output.loss.detach(), **output.parts})
                sample_ids += indices[~torch.isfinite(output.loss.detach()).cpu()].tolist()
            gradient_norm = accelerator.clip_grad_norm_(
                model.parameters(), config.train.gradient_clip or math.inf
            )
            is_good = bool(torch.isfinite(gradient_norm))  # the same on every process: gradients are averaged
            if is_good or accelerator.scaler is not None:  # a scaler skips the update itself and lowers its scale
                optimizer.step()
            optimizer.zero_grad()
            step_number = step + 1
            if is_good:
                bad_steps = 0
                ema.update_parameters(raw_model)
                window.add(step_parts, gradient_norm)
            else:
                bad_steps += 1
                tqdm.write(
                    f"step {step_number}: loss or gradient is not finite (samples {sample_ids}); update skipped",
                    file=sys.stderr,
                )
                if bad_steps >= config.train.max_bad_steps:
                    last = checkpoints.list_checkpoints(run_dir)
                    kept = f"the last good checkpoint is {last[-1][1]}" if last else "no checkpoint was written"
                    raise ValueError(
                        f"step {step_number}: {bad_steps} updates in a row were not finite; {kept}; "
                        "lower train.learning_rate, set train.gradient_clip, or use train.precision=fp32"
                    )
            bar.update()

            stop = received()
            is_end = step_number == config.train.max_steps
            saves = bool(stop) or is_end or step_number % config.train.checkpoint_every == 0
            if (saves or step_number % config.train.log_every == 0) and window.num_samples:
                row = window.close(step_number, optimizer.param_groups[0]["lr"])
                metrics.write(row)
                bar.set_postfix(loss=f"{row['loss']:.4f}", refresh=False)
            if saves and is_main and not bad_steps:
                state = {
                    "ema_updates": int(ema.n_averaged) - 1,
                    "ema_decay": config.train.ema_decay,
                    "class_names": list(data.class_names),
                    "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else None,
                    "torch": torch.__version__,
                }
                _save(run_dir, step_number, raw_model, ema, moments, state, config)
            if is_main and (is_end or step_number % config.train.preview_every == 0):
                _write_preview(preview, run_dir, step_number, config, len(data.class_names))
            if stop:
                raise Interrupted(stop, step_number)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    if is_main:
        plot_losses([run_dir], run_dir / "loss.png")
        accelerator.print(
            f"trained to step {config.train.max_steps}\n"
            f"  {run_dir}/checkpoints  weights, EMA weights and optimiser\n"
            f"  {run_dir}/previews     grids of EMA samples from the same noise\n"
            f"  {run_dir}/loss.png     the loss curve, from metrics.jsonl"
        )


def _build_accelerator(config: RunConfig) -> Accelerator:
    known = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    for tracker in config.train.trackers:
        if tracker not in known:
            raise ValueError(
                f"train.trackers: {tracker!r} is not installed or not known; installed here: {', '.join(known)}"
            )
    if config.train.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("train.precision=fp16 needs a GPU; use bf16 or fp32 on the CPU")
    return Accelerator(
        mixed_precision={"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[config.train.precision],
        log_with=list(config.train.trackers) or None,
        project_dir=config.run_dir,
    )


def _micro_batch_size(config: TrainConfig, num_processes: int) -> int:
    parts = num_processes * config.gradient_accumulation_steps
    if config.global_batch_size % parts:
        raise ValueError(
            f"train.global_batch_size={config.global_batch_size} does not divide into {num_processes} processes x "
            f"{config.gradient_accumulation_steps} train.gradient_accumulation_steps; it must be a multiple of {parts}"
        )
    return config.global_batch_size // parts


def _class_table(names: Sequence[str]) -> str:
    shown = ", ".join(f"{index}={name}" for index, name in enumerate(names[:10]))
    return shown + (f", ... ({len(names)} in all)" if len(names) > 10 else "")


def _resume(
    config: RunConfig,
    model: DiffusionTransformer,
    ema: AveragedModel,
    moments: OptimizerTensors,
    data: ImageData,
) -> tuple[int, dict[str, Any] | None]:
    """Loads the newest checkpoint, if there is one; returns its step and its loss scaler's state."""
    found = checkpoints.list_checkpoints(Path(config.run_dir))
    if not found:
        return 0, None
    step, folder = found[-1]
    _require_same_run(config, checkpoints.load_run_config(folder), folder)
    state = checkpoints.load_state(folder)
    for label, (old, new) in enumerate(zip(state["class_names"], data.class_names, strict=False)):
        if old != new:
            raise ValueError(f"{folder}: class {label} was {old!r} in training, but is {new!r} in the data now")
    if len(state["class_names"]) != len(data.class_names):
        raise ValueError(
            f"{folder}: trained on {len(state['class_names'])} classes, but the data has {len(data.class_names)} now"
        )
    model.load_state_dict(checkpoints.load_model(folder, "model").state_dict())
    ema.module.load_state_dict(checkpoints.load_model(folder, "ema").state_dict())
    ema.n_averaged.fill_(state["ema_updates"] + 1)
    moments.write(checkpoints.load_optimizer_tensors(folder, moments.expected()))
    return step, state["scaler"]


def _require_same_run(config: RunConfig, before: RunConfig, folder: Path) -> None:
    def flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in settings.items():
            if isinstance(value, dict):
                yield from flatten(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    old, new = dict(flatten(before.model_dump())), dict(flatten(config.model_dump()))
    allowed = [key for key in RESUMABLE_KEYS if key != "train.max_steps" or config.train.schedule == "constant"]
    changed = [
        f"{key} was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]
    if changed:
        raise ValueError(
            f"{folder}: this run was trained with other settings ({'; '.join(changed)}); "
            "put them back, or choose another run_dir"
        )


def _save(
    run_dir: Path,
    step: int,
    model: DiffusionTransformer,
    ema: AveragedModel,
    moments: OptimizerTensors,
    state: dict[str, Any],
    config: RunConfig,
) -> None:
    """A checkpoint; a disk that refuses costs a message, and the next interval tries again."""
    try:
        checkpoints.save_checkpoint(run_dir, step, model, ema.module, moments.read(), state, config)
    except OSError as error:
        tqdm.write(
            f"step {step}: no checkpoint written ({error}); the one before is as it was", file=sys.stderr
        )


def _write_preview(
    generator: Generator, run_dir: Path, step: int, config: RunConfig, num_classes: int
) -> None:
    """EMA samples of the first classes, from the same noise at every step."""
    columns = min(num_classes, 10)
    labels = [index % columns for index in range(config.train.preview_images)]
    samples = plan_samples(labels, config.seed, num_classes)
    generator.model.eval()
    images = np.stack([image for _, image in generator.images(samples, 64, progress=False)])
    folder = run_dir / "previews"
    folder.mkdir(exist_ok=True)
    write_grid(folder / f"step_{step:07d}.png", images, columns)


@contextlib.contextmanager
def _stop_signal(accelerator: Accelerator) -> Iterator[Any]:
    """Turns the first SIGINT or SIGTERM into a number that all processes agree on; a second SIGINT kills."""
    received = 0

    def remember(number: int, _: FrameType | None) -> None:
        nonlocal received
        if received and number == signal.SIGINT:
            os._exit(128 + number)
        received = number

    def agreed() -> int:
        if accelerator.num_processes == 1:
            return received
        flag = torch.tensor(received, device=accelerator.device)
        return int(accelerator.gather(flag[None]).max())

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, remember) for number in handled}
    try:
        yield agreed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
