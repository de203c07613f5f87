"""A run made ready: everything built, checked and resumed before the first step."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, GradientAccumulationPlugin

from vcagen import checkpoint as checkpoints
from vcagen.autoencoder import Autoencoder, build_autoencoder
from vcagen.config import RunConfig, TrainConfig, dump_config
from vcagen.data import LatentCache, TrainingData, build_data
from vcagen.ema import ExponentialMovingAverage
from vcagen.files import locked, require_writable, write_text
from vcagen.initial_weights import load_initial_weights
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant
from vcagen.objectives import Objective, build_objective
from vcagen.optimizer import OptimizerTensors, build_optimizer
from vcagen.resume import resume
from vcagen.seeds import seed_from
from vcagen.sharding import is_sharded, split_model_like


@dataclass(frozen=True)
class Run:
    """The parts of a run that stay the same from step to step."""

    config: RunConfig
    accelerator: Accelerator
    data: TrainingData
    micro_batch_size: int  # samples per forward pass of one process
    raw_model: DiffusionTransformer
    model: torch.nn.Module  # raw_model, wrapped where there are several processes; under FSDP2 it is split itself
    ema: ExponentialMovingAverage
    optimizer: torch.optim.Optimizer
    moments: OptimizerTensors
    objective: Objective
    autoencoder: Autoencoder

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return Path(self.config.run_dir)

    @property
    def ema_model(self) -> DiffusionTransformer:
        """The averaged weights as a model."""
        assert isinstance(self.ema.module, DiffusionTransformer)
        return self.ema.module


def prepare_run(config: RunConfig, stack: contextlib.ExitStack) -> tuple[Run, int]:
    """Builds and checks everything, resumes if there is a checkpoint; returns the run and the step to go on from.

    The run folder's lock is the stack's to release.

    Raises:
        ValueError: config, data, folder, disk or checkpoint do not allow it; before the run folder is made, but for
            the folder's own faults and the checkpoint's.
    """
    folder = Path(config.run_dir)
    accelerator = _build_accelerator(config)
    micro_batch_size = _micro_batch_size(config.train, accelerator.num_processes)
    data = build_data(config.data)
    autoencoder = build_autoencoder(config.autoencoder, config.decoding)
    if isinstance(data, LatentCache):
        data.require_autoencoder(config.autoencoder, autoencoder)
    raw_model = build_model(config, data, autoencoder)
    if config.train.init_from is not None and not checkpoints.list_checkpoints(folder):
        load_initial_weights(raw_model, config, data.class_names)
    ema = ExponentialMovingAverage(raw_model, config.train.ema_decay)
    optimizer = build_optimizer(raw_model, config.train)
    moments = OptimizerTensors(raw_model, optimizer)
    num_parameters = sum(parameter.numel() for parameter in raw_model.parameters())
    _require_same_data(accelerator, data)
    if accelerator.is_main_process:
        require_writable(folder)
        stack.enter_context(locked(folder))
    accelerator.wait_for_everyone()
    found = checkpoints.list_checkpoints(folder)
    if config.train.resume == "must" and not found:
        raise ValueError(
            f"{folder}: train.resume=must, but there is no checkpoint to go on from; use auto to start anew"
        )
    if config.train.resume == "never" and found:
        raise ValueError(
            f"{folder}: train.resume=never, but {found[-1][1].name} is there; choose another run_dir, or auto to go on"
        )
    if accelerator.is_main_process:
        # Two sets of weights and two of moments, in every checkpoint that is still to come.
        new_checkpoints = max(1, config.train.keep_checkpoints + 1 - len(found))
        require_writable(folder, 16 * num_parameters * new_checkpoints)
    first_step, resumed = 0, None
    if found:
        first_step, newest = found[-1]
        resumed = resume(newest, config, data, raw_model, ema, moments)
    if accelerator.is_main_process:
        write_text(folder / "run.yaml", dump_config(config))
    accelerator.print(
        f"data: {data.report}: {_class_table(data.class_names)}\n"
        f"model: {config.model.variant} with {config.model.attention.name}, {num_parameters:,} parameters\n"
        f"run folder: {folder}"
        + (f", going on from step {first_step}" if first_step else "")
        + (f"\nchanged since then: {'; '.join(resumed.changes)}" if resumed and resumed.changes else "")
        + (f", starting from the weights of {config.train.init_from}" if config.train.init_from and not found else "")
    )
    if config.train.tf32:
        torch.set_float32_matmul_precision("high")
    if config.train.compile:
        raw_model.compile_blocks()
    model, prepared_optimizer = accelerator.prepare(raw_model, optimizer)
    ema.to(accelerator.device)
    if is_sharded(raw_model):
        split_model_like(ema.module, raw_model)
    if resumed:
        moments.write(resumed.moments)
    if accelerator.scaler is not None and resumed and resumed.state.scaler:
        accelerator.scaler.load_state_dict(resumed.state.scaler)
    objective = build_objective(config.objective, accelerator.device)
    return (
        Run(
            config,
            accelerator,
            data,
            micro_batch_size,
            raw_model,
            model,
            ema,
            prepared_optimizer,
            moments,
            objective,
            autoencoder.to(accelerator.device),
        ),
        first_step,
    )


def build_model(config: RunConfig, data: TrainingData, autoencoder: Autoencoder) -> DiffusionTransformer:
    """The run's model, initialised from its seed; a `ValueError` where sizes do not fit each other."""
    variant = parse_variant(config.model.variant)
    channels, height, width = autoencoder.latent_shape(data.image_shape)
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
            learn_sigma=config.model.learn_sigma,
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
    accelerator = Accelerator(
        # Without this, several processes on a machine without accelerator do not find each other.
        cpu=not torch.accelerator.is_available(),
        # Micro-batches are ours: what a launcher's settings say of them would divide the loss once more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        mixed_precision={"fp32": "no", "bf16": "bf16", "fp16": "fp16"}[config.train.precision],
        log_with=list(config.train.trackers) or None,
        project_dir=config.run_dir,
    )
    _require_known_sharding(accelerator)
    return accelerator


def _require_known_sharding(accelerator: Accelerator) -> None:
    """Takes Accelerate's FSDP2 as it is, but for what would change results, and refuses its other ways to split."""
    kind = accelerator.distributed_type
    if accelerator.is_fsdp2:
        plugin = accelerator.state.fsdp_plugin
        if plugin.activation_checkpointing:
            raise ValueError(
                "accelerate: fsdp_activation_checkpointing renames weights; use model.gradient_checkpointing"
            )
        # Autocast decides, as without FSDP, what is computed in half precision; FSDP would cast times and norms too.
        plugin.mixed_precision_policy = None
        # Every process has all weights at the start; Accelerate's other way stumbles over the position table.
        plugin.cpu_ram_efficient_loading = False
    elif kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"accelerate: {kind.value} is not known here; use fsdp_version 2, or none of them")
    elif os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise ValueError("accelerate: FSDP is for several processes with a GPU each; start without it here")


def _require_same_data(accelerator: Accelerator, data: TrainingData) -> None:
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
    shown = ", ".join(f"{index} = {name}" for index, name in enumerate(names[:10]) if str(index) != name)
    if not shown:
        return "every class is named by its label"
    return shown + (f", ... ({len(names)} in all)" if len(names) > 10 else "")
