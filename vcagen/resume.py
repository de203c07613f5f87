from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vcagen import checkpoint as checkpoints
from vcagen.checkpoint import CheckpointState
from vcagen.config import SAMPLING_KEYS, RunConfig
from vcagen.data import TrainingData
from vcagen.ema import ExponentialMovingAverage
from vcagen.models.transformer import DiffusionTransformer
from vcagen.optimizer import OptimizerTensors
from vcagen.pipeline_folder import load_weights
from vcagen.sampling_config import flat

# Keys that a resumed run may change; any other would make it another experiment.
RESUMABLE_KEYS = (
    "run_dir",
    "data.root",
    *SAMPLING_KEYS,
    "model.gradient_checkpointing",
    "train.init_from",  # read at the start alone
    "train.init_labels",
    "train.init_positions",
    "train.max_steps",
    "train.gradient_accumulation_steps",
    "train.num_workers",
    "train.log_every",
    "train.preview_every",
    "train.preview_images",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.keep_every",
    "train.resume",
    "train.compile",
    "train.max_bad_steps",
    "train.trackers",
    "score",
)


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint says of the run that goes on: counters, moments, and the settings that have changed since."""

    state: CheckpointState
    moments: dict[str, torch.Tensor]
    changes: tuple[str, ...]


def resume(
    checkpoint: Path,
    config: RunConfig,
    data: TrainingData,
    model: DiffusionTransformer,
    ema: ExponentialMovingAverage,
    moments: OptimizerTensors,
) -> Resumed:
    """Loads the weights of a checkpoint; the rest is read, compared with the run and returned.

    Raises:
        ValueError: the checkpoint is of another run (other settings, classes or data) or damaged; what was loaded by
            then is not to be trained on.
    """
    changes = _allowed_changes(config, checkpoints.load_run_config(checkpoint), checkpoint)
    state = checkpoints.load_state(checkpoint)
    _require_same_classes(data.class_names, state.class_names, checkpoint)
    if state.data_fingerprint != data.fingerprint:
        raise ValueError(
            f"{checkpoint}: trained on other data (files were added, removed or renamed since); "
            "put them back, or choose another run_dir"
        )
    load_weights(model, checkpoint, "raw")
    assert isinstance(ema.module, DiffusionTransformer)
    load_weights(ema.module, checkpoint, "ema")
    ema.n_averaged.fill_(state.ema_updates)
    return Resumed(state, checkpoints.load_optimizer_tensors(checkpoint, moments.expected()), changes)


def _require_same_classes(now: tuple[str, ...], before: tuple[str, ...], checkpoint: Path) -> None:
    for label, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            raise ValueError(f"{checkpoint}: class {label} was {old!r} in training, but is {new!r} in the data now")
    if len(before) != len(now):
        raise ValueError(f"{checkpoint}: trained on {len(before)} classes, but the data has {len(now)} now")


def _allowed_changes(config: RunConfig, before: RunConfig, checkpoint: Path) -> tuple[str, ...]:
    """Compares key by key: a line for each change that a run may resume with; a `ValueError` that lists the others."""
    old, new = dict(flat(before.model_dump())), dict(flat(config.model_dump()))
    resumable = set(RESUMABLE_KEYS)
    if config.train.schedule != "constant":
        resumable.remove("train.max_steps")  # it sets the learning rate of every step
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    allowed = [key for key in changed if any(key == k or key.startswith(f"{k}.") for k in resumable)]
    refused = [key for key in changed if key not in allowed]
    if refused:
        told = _without_exchanged(refused)
        why = ", which sets the length of the cosine schedule" if told == ["train.max_steps"] else ""
        raise ValueError(
            f"{checkpoint}: this run was trained with other settings ({'; '.join(_changes(told, old, new))}{why}); "
            "put them back, or choose another run_dir"
        )
    return _changes(_without_exchanged(allowed), old, new)


def _without_exchanged(changed: list[str]) -> list[str]:
    """Where a section's name changed, its other keys say nothing more."""
    exchanged = tuple(key.removesuffix("name") for key in changed if key.endswith(".name"))
    return [key for key in changed if key.endswith(".name") or not key.startswith(exchanged)]


def _changes(keys: list[str], old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in keys)
