"""Reads weights that others wrote, files and diffusers' folders, and runs no code from them."""

import argparse
import json
import pickle
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from vcagen.files import file_sha256

Tensors = dict[str, torch.Tensor]
Kind = Literal["ema", "raw", "unknown"]

WRAPPERS = ("module.", "_orig_mod.")
DIFFUSERS_CLASS = "DiTTransformer2DModel"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


@dataclass(frozen=True)
class Source:
    """Weights as they were found.

    Attributes:
        path: the file.
        tensors: by name, without wrappers' prefixes; memory-mapped where the file allows it.
        kind: EMA or raw weights.
        step: updates they have seen, where the file says.
        arguments: what the training script was started with, where the file says.
        config: diffusers' config of a `DiTTransformer2DModel`; None for all other sources.
        class_names: where a diffusers pipeline names them.
        notes: what was found and decided on the way, for people.
    """

    path: Path
    tensors: Tensors
    kind: Kind
    step: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    def sha256(self) -> str:
        """Hash of the file's bytes."""
        return file_sha256(self.path)


def read_source(path: Path, weights: Literal["ema", "raw"] | None = None) -> Source:
    """Reads a weights file, or a folder that diffusers wrote.

    Args:
        path: which.
        weights: which of a training checkpoint's to take; None takes the EMA where there is one.

    Raises:
        ValueError: there is nothing, it is damaged, needs code to be run, or has not the weights asked for.
    """
    if path.is_dir():
        return _read_diffusers_folder(path, weights)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    content = _read_file(path)
    arguments = content.get("args")
    arguments = vars(arguments) if isinstance(arguments, argparse.Namespace) else arguments
    arguments = arguments if isinstance(arguments, dict) else {}
    named = {"ema": content.get("ema"), "raw": content.get("model", content.get("state_dict"))}
    kinds = [kind for kind, tensors in named.items() if isinstance(tensors, dict)]
    steps = content.get("steps", content.get("step", content.get("train_steps")))
    if kinds:
        kind = weights or kinds[0]
        if kind not in kinds:
            raise ValueError(f"{path}: no {kind} weights in this checkpoint; it has {' and '.join(kinds)}")
        tensors = named[kind]
        notes = [f"{kind} weights taken; the file has {' and '.join(kinds)}"]
    else:
        if weights is not None:
            raise ValueError(
                f"{path}: one bare set of weights that does not say what it is; leave out --weights {weights}"
            )
        kind, tensors = "unknown", content
        notes = ["one bare set of weights, as releases are; whether EMA or raw the file does not say"]
    assert isinstance(tensors, dict)
    _require_tensors(tensors, path)
    tensors, removed = strip_wrappers({name: t for name, t in tensors.items() if name != "n_averaged"})
    notes += [f"prefixes removed from names: {', '.join(removed)}"] if removed else []
    step = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
    return Source(path, tensors, kind, step, arguments, notes=tuple(notes))  # type: ignore[arg-type]


def _require_tensors(tensors: dict[Any, Any], path: Path) -> None:
    foreign = [str(k) for k, v in tensors.items() if not isinstance(v, torch.Tensor) or not isinstance(k, str)]
    if foreign or not tensors:
        found = ", ".join(foreign[:5]) or "nothing"
        raise ValueError(f"{path}: expected weights by name, or a checkpoint with ema or model; found {found}")


def strip_wrappers(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Names without what DistributedDataParallel and torch.compile put before them, in any nesting.

    A prefix goes only if every name has it, so a model's own child called `module` stays; `_orig_mod` is never
    anyone's own and goes from the middle of names too (compiled blocks).
    """
    removed = []
    while prefix := next((p for p in WRAPPERS if all(name.startswith(p) for name in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        removed.append(prefix)
    inner = [name for name in tensors if "._orig_mod." in name]
    if inner:
        tensors = {name.replace("._orig_mod.", "."): tensor for name, tensor in tensors.items()}
        removed.append("._orig_mod.")
    return tensors, removed


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: unknown kind of file; expected one of {', '.join(SUFFIXES)}")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); download it again") from error
    with path.open("rb") as file:
        start = file.read(20)
    if start and not start.startswith((b"PK", b"\x80")):
        raise ValueError(
            f"{path}: not a checkpoint file: it begins with {start!r}, as a web page or a pointer file would; download "
            "it again"
        )
    try:
        # Scripts store their argparse arguments, which are plain data. Nothing else that is not a tensor may come in.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"objects made by {named[1]}" if named else "objects other than tensors"
        raise ValueError(
            f"{path}: holds {what}, which only its own code could read; refused, because that would run whatever is "
            "in the file. Save its state dict alone, best as safetensors"
        ) from error
    except Exception as error:  # damaged files make torch raise nearly anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: not a whole checkpoint file ({reason}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds one {type(content).__name__}, expected weights by name")
    return content


def _read_diffusers_folder(path: Path, weights: Literal["ema", "raw"] | None) -> Source:
    folder = path / "transformer" if (path / "transformer/config.json").is_file() else path
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("not a config")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no readable config.json of a {DIFFUSERS_CLASS} in it or in transformer/") from error
    if config.get("_class_name") != DIFFUSERS_CLASS:
        raise ValueError(f"{folder / 'config.json'}: of class {config.get('_class_name')}, expected {DIFFUSERS_CLASS}")
    if weights is not None:
        raise ValueError(f"{path}: one set of weights that does not say what it is; leave out --weights {weights}")
    files = [folder / f"diffusion_pytorch_model{suffix}" for suffix in (".safetensors", ".bin")]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise ValueError(f"{folder}: neither {files[0].name} nor {files[1].name} in it")
    notes = ("a folder of diffusers; whether EMA or raw weights it does not say",)
    tensors = _read_file(found)
    _require_tensors(tensors, found)
    return Source(found, tensors, "unknown", config=config, class_names=_id2label(path), notes=notes)


def _id2label(pipeline: Path) -> tuple[str, ...] | None:
    """Class names of a diffusers pipeline, in label order."""
    try:
        labels = json.loads((pipeline / "model_index.json").read_text())["id2label"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(labels, dict) or not labels:
        return None
    return tuple(str(labels[str(index)]) for index in range(len(labels)) if str(index) in labels)
