"""Reads a model from anywhere, with all that sampling must know."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vcagen.autoencoder import IdentityConfig, KLConfig
from vcagen.checkpoint import resolve_checkpoint
from vcagen.config import complete_pipeline_config, override_sampling
from vcagen.conversion.diffusers_names import FREQUENCY_KEY, from_diffusers
from vcagen.conversion.repa import drop_projectors, is_repa, reverse_time
from vcagen.conversion.shapes import LABEL_TABLE, Reading, read_settings, variant_name
from vcagen.conversion.source import Source, Tensors, read_source
from vcagen.models.layers import position_table
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import Family, parse_variant
from vcagen.pipeline_folder import (
    is_pipeline_folder,
    load_tensors,
    mismatches,
    read_index,
    weights_file,
)
from vcagen.sampling_config import PipelineConfig, WeightsRecord

SD_VAE_CHANNELS = 4
SiT_PATHS = ("Linear", "GVP", "VP")


@dataclass(frozen=True)
class ConversionChoices:
    """What a file does not say, or says wrongly.

    Attributes:
        weights: which weights of a training checkpoint; None takes the EMA where there is one.
        family: DiT (diffusion) or SiT (flow), which share all names; None reads it from arguments or file name.
        num_heads: where width and depth are no published model's.
        trained_by: for weights in diffusers' names: `diffusers` computes what its class computes; `official` is for
            weights that the official code trained and somebody renamed, which that class computes differently.
        class_names: in label order; None takes ImageNet's for 1000 classes and numbers for others.
        overrides: `key=value` for the pipeline: objective, sampler, guidance, autoencoder, protocol, ...
    """

    weights: Literal["ema", "raw"] | None = None
    family: Family | None = None
    num_heads: int | None = None
    trained_by: Literal["diffusers", "official"] | None = None
    class_names: tuple[str, ...] | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvertedModel:
    """A model in official names, with all that sampling must know; not yet written.

    Attributes:
        settings: of `DiffusionTransformer`.
        tensors: by official name.
        config: of the pipeline.
        notes: what was found, decided and assumed, for people.
    """

    settings: dict[str, Any]
    tensors: Tensors
    config: PipelineConfig
    notes: tuple[str, ...] = ()

    def skeleton(self) -> DiffusionTransformer:
        """The model without memory for its weights."""
        with torch.device("meta"):
            return DiffusionTransformer(**self.settings)


def read_model(path: Path, choices: ConversionChoices) -> ConvertedModel:
    """Reads a model from anywhere: a file or folder that others wrote, or a run, checkpoint or pipeline folder.

    Raises:
        ValueError: it cannot be read, something must be chosen that is not, or tensors do not fit; all of these are
            listed.
    """
    model = _read_ours(path, choices) if _is_ours(path) else _read_theirs(read_source(path, choices.weights), choices)
    shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
    problems = mismatches(shapes, dict(model.skeleton().state_dict()))
    if problems:
        raise ValueError(f"{path}: tensors do not fit a {model.config.variant}: {'; '.join(problems)}")
    return model


def _is_ours(path: Path) -> bool:
    return (path / "checkpoints").is_dir() or (is_pipeline_folder(path) and _has_settings(path))


def _has_settings(path: Path) -> bool:
    try:
        return "settings" in json.loads((path / "model_index.json").read_text())
    except (OSError, json.JSONDecodeError):
        return True  # so that the error is about our own format


def _read_ours(path: Path, choices: ConversionChoices) -> ConvertedModel:
    folder = resolve_checkpoint(path)
    config = override_sampling(read_index(folder), choices.overrides)
    kind = choices.weights or "ema"
    file = weights_file(folder, kind)
    stored = DiffusionTransformer.load_config(file.parent, local_files_only=True)
    settings = {key: value for key, value in dict(stored).items() if not key.startswith("_")}
    if kind == "raw":
        config = config.model_copy(update={"weights": WeightsRecord(kind="raw", step=config.weights.step)})
    return ConvertedModel(settings, load_tensors(file), config)


def _read_theirs(source: Source, choices: ConversionChoices) -> ConvertedModel:
    notes, tensors = list(source.notes), source.tensors
    family, why = _family(source, choices.family)
    assumed = [f"{family}, {why}"]
    if is_repa(tensors):
        tensors, dropped = drop_projectors(tensors)
        notes.append(f"{len(dropped)} tensors of REPA's projectors dropped: only training needs them")
    if source.config is not None:
        reading, tensors = _read_diffusers(source)
    else:
        num_heads = choices.num_heads or _heads_by_arguments(source.arguments)
        reading = read_settings(tensors, num_heads, _num_classes(source.arguments), str(source.path))
    settings = reading.settings
    assumed += reading.assumed
    if source.config is not None:
        settings |= _arithmetic(source.config, choices.trained_by, notes, assumed)
    elif choices.trained_by is not None:
        raise ValueError(f"{source.path}: --trained-by is for weights in diffusers' names; leave it out")
    if is_repa(source.tensors):
        tensors = reverse_time(tensors)
        assumed.append("REPA's direction of time; reversed by folding 1 - t and the sign into the weights")
    if family == "SiT" and settings["learn_sigma"]:
        notes.append("the output has twice the latent channels; the second half is kept, and unused as in SiT")
    variant = variant_name(family, settings)
    names = choices.class_names or source.class_names or default_class_names(settings["num_classes"], assumed)
    if len(names) != settings["num_classes"]:
        raise ValueError(
            f"{source.path}: {LABEL_TABLE} is for {settings['num_classes']} classes, but {len(names)} class names were "
            "given; give one for each"
        )
    plain = {
        "objective": _objective(family, source.arguments, assumed),
        "sampler": {"name": "ddpm" if family == "DiT" else "euler_maruyama"},
        "autoencoder": _autoencoder(settings["in_channels"], choices.overrides, str(source.path), assumed),
        "variant": variant,
        "class_names": list(names),
        "weights": {"kind": source.kind, "step": source.step},
        "provenance": {"source": source.path.name, "sha256": source.sha256(), "notes": notes, "assumed": assumed},
    }
    config = complete_pipeline_config(plain, choices.overrides, str(source.path))
    return ConvertedModel(settings, tensors, config, (*notes, *(f"assumed: {line}" for line in assumed)))


def _family(source: Source, chosen: Family | None) -> tuple[Family, str]:
    """DiT or SiT, and how that is known; no tensor tells."""
    if chosen is not None:
        return chosen, "as chosen"
    if source.config is not None:
        return "DiT", "the only one that diffusers has"
    if is_repa(source.tensors):
        return "SiT", "since REPA's projectors are there"
    named = str(source.arguments.get("model", ""))
    for family in ("DiT", "SiT"):
        if named.startswith(family):
            return family, f"since the arguments in the file say {named}"
    found = {match.lower() for match in re.findall(r"(?i)(?<![a-z])(dit|sit)(?![a-z])", source.path.name)}
    if len(found) == 1:
        return ("DiT" if found == {"dit"} else "SiT"), "by the file's name"
    raise ValueError(
        f"{source.path}: DiT and SiT have the same tensors, and neither arguments nor the file's name say which this "
        "is; give --family DiT (diffusion) or --family SiT (flow)"
    )


def _heads_by_arguments(arguments: dict[str, Any]) -> int | None:
    try:
        return parse_variant(str(arguments.get("model"))).shape.num_heads
    except ValueError:
        return None


def _num_classes(arguments: dict[str, Any]) -> int | None:
    found = arguments.get("num_classes")
    return found if isinstance(found, int) else None


def _objective(family: Family, arguments: dict[str, Any], assumed: list[str]) -> dict[str, Any]:
    if family == "DiT":
        return {"name": "diffusion"}
    path, prediction = arguments.get("path_type"), arguments.get("prediction")
    if str(path).lower() in ("linear", "gvp", "vp") and prediction in ("velocity", "noise", "score"):
        path = next(name for name in SiT_PATHS if name.lower() == str(path).lower())
        return {"name": "flow", "path": path, "prediction": prediction}
    if str(path).lower() == "linear" and prediction == "v":  # REPA's names
        return {"name": "flow", "path": "Linear", "prediction": "velocity"}
    assumed.append("velocity on the Linear path, as in all releases of SiT")
    return {"name": "flow", "path": "Linear", "prediction": "velocity"}


def _autoencoder(in_channels: int, overrides: Sequence[str], source: str, assumed: list[str]) -> dict[str, Any]:
    if any(override.startswith("autoencoder.source=") for override in overrides):
        return KLConfig().model_dump()  # of which the source is overridden
    if any(override.startswith("autoencoder.name=") for override in overrides):
        return {}
    if in_channels == SD_VAE_CHANNELS:
        assumed.append(f"latents of {KLConfig().source}, as in all releases")
        return KLConfig().model_dump()
    if in_channels in (1, 3):
        assumed.append(f"pixels, since {in_channels} channels are no published autoencoder's")
        return IdentityConfig().model_dump()
    raise ValueError(
        f"{source}: latents of {in_channels} channels are of no autoencoder known here; give its hub id or folder with "
        "autoencoder.source=..."
    )


def _read_diffusers(source: Source) -> tuple[Reading, Tensors]:
    config = source.config
    assert config is not None
    expected = {"activation_fn": "gelu-approximate", "norm_type": "ada_norm_zero", "attention_bias": True}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ValueError(f"{source.path}: config {key}={config[key]!r}, expected {value!r}; not a DiT")
    depth, heads = int(config["num_layers"]), int(config["num_attention_heads"])
    width = heads * int(config["attention_head_dim"])
    tensors = from_diffusers(source.tensors, depth, str(source.path))
    side = int(config["sample_size"]) // int(config["patch_size"])
    tensors["pos_embed"] = position_table(width, (side, side))
    return read_settings(tensors, heads, int(config["num_embeds_ada_norm"]), str(source.path)), tensors


def _arithmetic(config: dict[str, Any], trained_by: str | None, notes: list[str], assumed: list[str]) -> dict[str, Any]:
    """Settings in which the official code and diffusers' class differ, for weights in diffusers' names."""
    if trained_by == "official":
        assumed.append("timestep frequencies and norms of the official code, which diffusers' class does not compute")
        return {}
    if trained_by is None and FREQUENCY_KEY in config:
        notes.append(f"{FREQUENCY_KEY} {config[FREQUENCY_KEY]}, as the folder's config.json says")
    else:
        assumed.append(
            "timestep frequencies and norms as diffusers' class computes them; weights that the official code trained "
            "need --trained-by official"
        )
    return {
        "timestep_frequency_shift": int(config.get(FREQUENCY_KEY, 1)) if trained_by is None else 1,
        "mlp_norm_eps": float(config.get("norm_eps", 1e-5)),
    }


def default_class_names(num_classes: int, assumed: list[str]) -> tuple[str, ...]:
    """ImageNet's for 1000 classes, else the numbers."""
    if num_classes != 1000:
        return tuple(str(label) for label in range(num_classes))
    from torchvision.models import ResNet50_Weights

    assumed.append("the 1000 classes of ImageNet, in their usual order")
    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])
