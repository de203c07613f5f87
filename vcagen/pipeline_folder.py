"""The folder that a pipeline, a converted model and a training checkpoint have in common.

FOLDER/
    model_index.json     diffusers' index of a pipeline; `settings` in it is a `PipelineConfig`
    transformer/         config.json and safetensors weights; the EMA weights in a checkpoint
    raw/                 the same with the weights as the optimiser left them, in a checkpoint
    vae/                 the autoencoder, where it was copied along
"""

import json
from pathlib import Path
from typing import Any, Literal

import diffusers
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from vcagen.config import parse_config
from vcagen.files import write_json
from vcagen.models.transformer import DiffusionTransformer
from vcagen.sampling_config import PipelineConfig

Weights = Literal["ema", "raw"]

INDEX_FILE = "model_index.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
TRANSFORMER, RAW, VAE = "transformer", "raw", "vae"


def write_index(folder: Path, config: PipelineConfig, has_vae: bool) -> None:
    """Writes model_index.json, as a `ClassConditionalPipeline` of these parts would."""
    index = {
        "_class_name": "ClassConditionalPipeline",
        "_diffusers_version": diffusers.__version__,
        "settings": config.model_dump(mode="json"),
        "transformer": [DiffusionTransformer.__module__, DiffusionTransformer.__name__],
        "vae": ["diffusers", "AutoencoderKL"] if has_vae else [None, None],
    }
    write_json(folder / INDEX_FILE, index)


def is_pipeline_folder(folder: Path) -> bool:
    """Whether there is an index with our settings."""
    return (folder / INDEX_FILE).is_file()


def read_index(folder: Path) -> PipelineConfig:
    """The settings in a folder's index.

    Raises:
        ValueError: there is none, or it is another class's or damaged.
    """
    path = folder / INDEX_FILE
    try:
        index = json.loads(path.read_text())
        settings = index.get("settings") if isinstance(index, dict) else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected a pipeline or checkpoint folder") from error
    if not isinstance(settings, dict):
        kind = index.get("_class_name", "unknown") if isinstance(index, dict) else "unknown"
        raise ValueError(
            f"{path}: a pipeline of class {kind}, without vcagen's settings; python -m vcagen.conversion converts "
            "diffusers' DiT"
        )
    return parse_config(settings, str(path), PipelineConfig)


def load_transformer(folder: Path, weights: Weights = "ema") -> DiffusionTransformer:
    """The model of a pipeline or checkpoint folder, in eval mode, float32, on the CPU.

    Args:
        folder: what to load from.
        weights: `ema` takes transformer/, whatever it holds in a folder that has no other; `raw` takes raw/.

    Raises:
        ValueError: a part is missing or damaged, or a tensor missing, unknown or of another shape; all are listed.
    """
    model = DiffusionTransformer(**read_transformer_settings(weights_file(folder, weights).parent))
    load_weights(model, folder, weights)
    return model.eval()


def read_transformer_settings(part: Path) -> dict[str, Any]:
    """Arguments of `DiffusionTransformer` from the config.json of a folder of weights.

    Raises:
        ValueError: the file is missing or damaged, or no model can be built from it; the line says why.
    """
    path = part / "config.json"
    try:
        content = json.loads(path.read_text())
        settings = {key: value for key, value in content.items() if not key.startswith("_")}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: missing or not readable") from error
    try:
        with torch.device("meta"):
            DiffusionTransformer(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: attention.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not the config of a model here ({reason})") from error
    return settings


def load_weights(model: DiffusionTransformer, folder: Path, weights: Weights) -> None:
    """Loads weights into a model that was built already. Errors as `load_transformer`."""
    model.load_state_dict(matching_tensors(weights_file(folder, weights), model.state_dict()))


def weights_file(folder: Path, weights: Weights) -> Path:
    """Where the weights of a folder lie; a `ValueError` that says what there is if not these."""
    parts = {"ema": TRANSFORMER, "raw": RAW}
    path = folder / parts[weights] / WEIGHTS_FILE
    if not path.is_file():
        kinds = [kind for kind, part in parts.items() if (folder / part / WEIGHTS_FILE).is_file()]
        has = f"it has {', '.join(kinds)} weights" if kinds else "it has no weights at all"
        raise ValueError(f"{path}: no {weights} weights in this folder; {has}")
    return path


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads a safetensors file; a `ValueError` that names it where it is missing or cut off."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); use another checkpoint") from error


def matching_tensors(path: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file; a `ValueError` that lists all that are missing, unknown or of another shape."""
    tensors = load_tensors(path)
    problems = mismatches({name: tensor.shape for name, tensor in tensors.items()}, expected)
    if problems:
        raise ValueError(f"{path}: tensors do not fit the model: {'; '.join(problems)}")
    return tensors


def mismatches(shapes: dict[str, torch.Size], expected: dict[str, torch.Tensor]) -> list[str]:
    """What is missing, unknown, or of another shape than expected, one entry each."""
    problems = [f"missing {name}" for name in expected if name not in shapes]
    problems += [f"unknown {name}" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shapes[name])}, expected {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in shapes and shapes[name] != tensor.shape
    ]
    return problems
