"""Checkpoints: step folders, written aside then renamed, found by number, never a pickle.

<run_dir>/checkpoints/step_0001200/
    model_index.json         with transformer/ (the EMA weights) a pipeline folder: sampled from as it is
    transformer/, raw/       config.json and safetensors weights (diffusers' layout), EMA and raw
    optimizer.safetensors    both moments of every trained parameter, by parameter name
    state.json               step, counters, class names, versions
    run.yaml                 the resolved config
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import save_file

from vcagen.config import RunConfig, dump_config, load_config
from vcagen.files import write_json
from vcagen.models.transformer import DiffusionTransformer
from vcagen.pipeline_folder import RAW, TRANSFORMER, is_pipeline_folder, matching_tensors, write_index
from vcagen.sampling_config import PipelineConfig, SamplingConfig, WeightsRecord


class CheckpointState(BaseModel, extra="forbid", frozen=True):
    """Counters and identities of a checkpoint, `state.json`.

    Attributes:
        step: updates done, skipped ones included.
        ema_updates: updates that the EMA has seen.
        ema_decay: its decay.
        class_names: in label order.
        data_fingerprint: identity of the training data and its order.
        scaler: the loss scaler's state in fp16 training.
        torch_version: that wrote it.
    """

    step: int
    ema_updates: int
    ema_decay: float
    class_names: tuple[str, ...]
    data_fingerprint: str
    scaler: dict[str, int | float] | None
    torch_version: str


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    found = []
    for folder in (run_dir / "checkpoints").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", folder.name)
        if match and (folder / "state.json").is_file():
            found.append((int(match[1]), folder))
    return sorted(found)


def resolve_checkpoint(path: Path) -> Path:
    """The pipeline or checkpoint folder that `path` names: itself, or the newest checkpoint of a run folder.

    Raises:
        ValueError: it is neither.
    """
    if is_pipeline_folder(path):
        return path
    checkpoints = list_checkpoints(path)
    if checkpoints:
        return checkpoints[-1][1]
    if not path.exists():
        raise ValueError(f"{path}: no such run or checkpoint folder")
    raise ValueError(
        f"{path}: no checkpoint in it; expected a run folder with checkpoints/step_N, or a pipeline folder"
    )


def save_checkpoint(
    run_dir: Path,
    state: CheckpointState,
    model: DiffusionTransformer,
    ema: DiffusionTransformer,
    optimizer_tensors: dict[str, torch.Tensor],
    config: RunConfig,
) -> Path:
    """Writes a checkpoint; afterwards older ones go, but for those that `train` says to keep.

    Raises:
        OSError: the disk refused; what was there before is as it was.
    """
    folder = run_dir / "checkpoints" / f"step_{state.step:07d}"
    aside = folder.with_name(f".{folder.name}")
    for leftover in folder.parent.glob(".step_*"):  # of a process that was killed while it wrote or removed
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        ema.save_pretrained(aside / TRANSFORMER)
        model.save_pretrained(aside / RAW)
        save_file(optimizer_tensors, aside / "optimizer.safetensors")
        (aside / "run.yaml").write_text(dump_config(config))
        write_index(aside, _pipeline_config(config, state), has_vae=False)
        write_json(aside / "state.json", state.model_dump())
        if folder.exists():  # a step trained again after an older checkpoint was resumed
            shutil.rmtree(folder)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for step, old in list_checkpoints(run_dir)[: -config.train.keep_checkpoints]:
        if config.train.keep_every is None or step % config.train.keep_every:
            _remove(old)
    return folder


def _remove(folder: Path) -> None:
    """Renames, then removes: half a checkpoint is never listed."""
    going = folder.with_name(f".{folder.name}")
    with contextlib.suppress(OSError):
        folder.rename(going)
        shutil.rmtree(going)


def _pipeline_config(config: RunConfig, state: CheckpointState) -> PipelineConfig:
    shared = {name: getattr(config, name) for name in SamplingConfig.model_fields}
    weights = WeightsRecord(kind="ema", step=state.step, initial_share=state.ema_decay**state.ema_updates)
    return PipelineConfig(**shared, variant=config.model.variant, class_names=state.class_names, weights=weights)


def load_state(checkpoint: Path) -> CheckpointState:
    """The counters of a checkpoint; a `ValueError` where the file cannot be read."""
    path = checkpoint / "state.json"
    try:
        return CheckpointState.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read ({reason}); the checkpoint is damaged") from error


def load_run_config(checkpoint: Path) -> RunConfig:
    """The config that a checkpoint was trained with."""
    return load_config(checkpoint / "run.yaml")


def load_optimizer_tensors(checkpoint: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimiser's tensors by name; `expected` holds one of the right shape for each.

    Raises:
        ValueError: the file is missing or damaged, or a tensor missing, unknown or of another shape; all are listed.
    """
    return matching_tensors(checkpoint / "optimizer.safetensors", expected)
