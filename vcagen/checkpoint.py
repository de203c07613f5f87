"""Checkpoints: step folders, written aside then renamed, found by number, never a pickle.

<run_dir>/checkpoints/step_0001200/
    model/, ema/             config.json and safetensors weights (diffusers' layout)
    optimizer.safetensors    both moments of every trained parameter, by parameter name
    state.json               step, counters, class names, versions
    run.yaml                 the resolved config
"""

import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vcagen.config import RunConfig, dump_config, load_config
from vcagen.files import write_json
from vcagen.models.transformer import DiffusionTransformer

Weights = Literal["ema", "model"]

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


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
    scaler: dict[str, float] | None
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
    """The checkpoint folder that `path` names: itself, or the newest one of a run folder.

    Raises:
        ValueError: it is neither.
    """
    if (path / "state.json").is_file():
        return path
    checkpoints = list_checkpoints(path)
    if checkpoints:
        return checkpoints[-1][1]
    if not path.exists():
        raise ValueError(f"{path}: no such run or checkpoint folder")
    raise ValueError(f"{path}: no checkpoint in it; expected a run folder with checkpoints/step_N, or such a folder")


def save_checkpoint(
    run_dir: Path,
    state: CheckpointState,
    model: DiffusionTransformer,
    ema: DiffusionTransformer,
    optimizer_tensors: dict[str, torch.Tensor],
    config: RunConfig,
) -> Path:
    """Writes a checkpoint; afterwards all but the newest `train.keep_checkpoints` are deleted.

    Raises:
        OSError: the disk refused; what was there before is as it was.
    """
    folder = run_dir / "checkpoints" / f"step_{state.step:07d}"
    aside = folder.with_name(f".{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        model.save_pretrained(aside / "model")
        ema.save_pretrained(aside / "ema")
        save_file(optimizer_tensors, aside / "optimizer.safetensors")
        (aside / "run.yaml").write_text(dump_config(config))
        write_json(aside / "state.json", state.model_dump())
        if folder.exists():  # a step trained again after an older checkpoint was resumed
            shutil.rmtree(folder)
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for _, old in list_checkpoints(run_dir)[: -config.train.keep_checkpoints]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


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


def load_model(checkpoint: Path, weights: Weights = "ema") -> DiffusionTransformer:
    """A model with the EMA or the raw weights of a checkpoint, in eval mode, on the CPU.

    Raises:
        ValueError: a part is missing or damaged, or a tensor missing, unknown or of another shape; all are listed.
    """
    folder = checkpoint / weights
    _require_weights(checkpoint, weights)
    try:
        settings = DiffusionTransformer.load_config(folder, local_files_only=True)
    except OSError as error:
        raise ValueError(f"{folder / 'config.json'}: missing or not readable") from error
    model = DiffusionTransformer.from_config(settings)
    load_weights(model, checkpoint, weights)
    return model.eval()


def load_weights(model: DiffusionTransformer, checkpoint: Path, weights: Weights) -> None:
    """Loads weights into a model that was built already. Errors as `load_model`."""
    path = _require_weights(checkpoint, weights)
    model.load_state_dict(_matching_tensors(path, model.state_dict()))


def _require_weights(checkpoint: Path, weights: Weights) -> Path:
    path = checkpoint / weights / WEIGHTS_FILE
    if not path.is_file():
        kinds = [kind for kind in ("ema", "model") if (checkpoint / kind / WEIGHTS_FILE).is_file()]
        has = f"it has {', '.join(kinds)} weights" if kinds else "it has no weights at all"
        raise ValueError(f"{path}: no {weights} weights in this checkpoint; {has}")
    return path


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file; a `ValueError` that names it where it is missing or cut off."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); use another checkpoint") from error


def _matching_tensors(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = load_tensors(path)
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError(f"{path}: tensors do not fit the model: {'; '.join(problems)}")
    return tensors


def load_optimizer_tensors(checkpoint: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimiser's tensors by name; `expected` holds one of the right shape for each. Errors as `load_model`."""
    return _matching_tensors(checkpoint / "optimizer.safetensors", expected)
