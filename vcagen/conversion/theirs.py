"""Reads weights that others wrote, and says what they are."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from vcagen.autoencoder import IdentityConfig, KLConfig
from vcagen.config import complete_pipeline_config
from vcagen.conversion.diffusers_names import FREQUENCY_KEY, from_diffusers
from vcagen.conversion.model import ConversionChoices, ConvertedModel, require_fitting
from vcagen.conversion.repa import drop_projectors, is_repa, reverse_time
from vcagen.conversion.shapes import LABEL_TABLE, Reading, read_settings, variant_name
from vcagen.conversion.source import Source, Tensors
from vcagen.models.layers import position_table
from vcagen.models.variants import Family, parse_variant

SD_VAE_CHANNELS = 4

# What scripts call paths and predictions -> our names. REPA's cosine path is GVP.
PATHS = {"linear": "Linear", "gvp": "GVP", "cosine": "GVP", "vp": "VP"}
PREDICTIONS = {"velocity": "velocity", "v": "velocity", "noise": "noise", "score": "score"}


class DiffusersConfig(BaseModel, extra="ignore", frozen=True):
    """What is needed of the config of a `DiTTransformer2DModel`; the defaults are the class's."""

    num_attention_heads: int = Field(16, ge=1)
    attention_head_dim: int = Field(72, ge=1)
    num_layers: int = Field(28, ge=1)
    sample_size: int = Field(32, ge=1)
    patch_size: int = Field(2, ge=1)
    num_embeds_ada_norm: int = Field(1000, ge=1)
    norm_eps: float = Field(1e-5, gt=0)
    activation_fn: str = "gelu-approximate"
    norm_type: str = "ada_norm_zero"
    attention_bias: bool = True
    timestep_frequency_shift: int | None = Field(None, ge=0, le=1)


def read_theirs(source: Source, choices: ConversionChoices) -> ConvertedModel:
    """The model in a source.

    Raises:
        ValueError: something must be chosen that is not, is chosen against what the source is, or tensors do not fit;
            all of these are listed.
    """
    name, notes, tensors = str(source.path), list(source.notes), source.tensors
    family, why = _family(source, choices.family)
    assumed = [f"{family}, {why}"]
    if is_repa(tensors):
        tensors, dropped = drop_projectors(tensors)
        notes.append(f"{len(dropped)} tensors of REPA's projectors dropped: only training needs them")
    if source.config is not None:
        reading, tensors = _read_diffusers(source, choices, notes, assumed)
    elif choices.trained_by is not None:
        raise ValueError(f"{name}: --trained-by is for weights in diffusers' names; leave it out")
    else:
        num_heads = choices.num_heads or _heads_by_arguments(source.arguments)
        reading = read_settings(tensors, num_heads, _num_classes(source.arguments), name)
    settings = reading.settings
    assumed += reading.assumed
    variant = variant_name(family, settings)
    require_fitting(tensors, settings, name, variant)
    if is_repa(source.tensors):
        tensors = reverse_time(tensors)
        assumed.append("REPA's direction of time; reversed by folding 1 - t and the sign into the weights")
    if family == "SiT" and settings["learn_sigma"]:
        notes.append("the output has twice the latent channels; the second half is kept, and unused as in SiT")
    names = choices.class_names or source.class_names or default_class_names(settings["num_classes"], assumed)
    if len(names) != settings["num_classes"]:
        raise ValueError(
            f"{name}: {LABEL_TABLE} is for {settings['num_classes']} classes, but {len(names)} class names were given; "
            "give one for each"
        )
    plain = {
        "objective": _objective(family, source, choices.overrides, assumed),
        "sampler": {"name": "ddpm" if family == "DiT" else "euler_maruyama"},
        "autoencoder": _autoencoder(settings["in_channels"], choices.overrides, name, assumed),
        "variant": variant,
        "class_names": list(names),
        "weights": {"kind": source.kind, "step": source.step},
        "provenance": {"source": source.path.name, "sha256": source.sha256(), "notes": notes, "assumed": assumed},
    }
    config = complete_pipeline_config(plain, choices.overrides, name)
    said = (*notes, *(f"assumed: {line}" for line in assumed))
    return ConvertedModel(settings, tensors, config, said, choices.local_autoencoder())


def _family(source: Source, chosen: Family | None) -> tuple[Family, str]:
    """DiT or SiT, and how that is known; no tensor tells."""
    known: tuple[Family, str] | None = None
    if source.config is not None:
        known = "DiT", "the only one that diffusers has"
    elif is_repa(source.tensors):
        known = "SiT", "since REPA's projectors are there"
    if known is not None:
        if chosen not in (None, known[0]):
            raise ValueError(
                f"{source.path}: --family {chosen}, but it is a {known[0]}, {known[1]}; leave --family out"
            )
        return known
    if chosen is not None:
        return chosen, "as chosen"
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


def _objective(family: Family, source: Source, overrides: Sequence[str], assumed: list[str]) -> dict[str, Any]:
    if family == "DiT":
        return {"name": "diffusion"}
    path = _argument("path_type", PATHS, "objective.path", "Linear", source, overrides, assumed)
    prediction = _argument("prediction", PREDICTIONS, "objective.prediction", "velocity", source, overrides, assumed)
    return {"name": "flow", "path": path, "prediction": prediction}


def _argument(
    name: str,
    known: dict[str, str],
    key: str,
    default: str,
    source: Source,
    overrides: Sequence[str],
    assumed: list[str],
) -> str:
    """What the file's arguments say of the objective, or SiT's default where they do not."""
    given = source.arguments.get(name)
    if any(override.startswith(f"{key}=") for override in overrides):
        return default  # which the override replaces
    if given is None:
        assumed.append(f"{key}={default}, as in all releases of SiT")
        return default
    if str(given).lower() not in known:
        raise ValueError(
            f"{source.path}: its arguments say {name}={given!r}, which is not known here; give {key}= one of "
            f"{', '.join(dict.fromkeys(known.values()))}"
        )
    return known[str(given).lower()]


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
        f"{source}: latents of {in_channels} channels are of no autoencoder known here; convert it with the hub id or "
        "folder of theirs as autoencoder.source=..."
    )


def _read_diffusers(
    source: Source, choices: ConversionChoices, notes: list[str], assumed: list[str]
) -> tuple[Reading, Tensors]:
    try:
        config = DiffusersConfig.model_validate(source.config)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{source.path.with_name('config.json')}: {first['loc'][0]}: {first['msg']}") from error
    for key in ("activation_fn", "norm_type", "attention_bias"):
        if getattr(config, key) != DiffusersConfig.model_fields[key].default:
            raise ValueError(f"{source.path.with_name('config.json')}: {key}={getattr(config, key)!r}; not a DiT's")
    if choices.num_heads not in (None, config.num_attention_heads):
        raise ValueError(
            f"{source.path}: --num-heads {choices.num_heads}, but its config says {config.num_attention_heads}; "
            "leave it out"
        )
    width = config.num_attention_heads * config.attention_head_dim
    tensors = from_diffusers(source.tensors, config.num_layers, str(source.path))
    side = config.sample_size // config.patch_size
    tensors["pos_embed"] = position_table(width, (side, side))
    reading = read_settings(tensors, config.num_attention_heads, config.num_embeds_ada_norm, str(source.path))
    return Reading(reading.settings | _arithmetic(config, choices.trained_by, notes, assumed), reading.assumed), tensors


def _arithmetic(
    config: DiffusersConfig, trained_by: str | None, notes: list[str], assumed: list[str]
) -> dict[str, Any]:
    """Settings in which the official code and diffusers' class differ, for weights in diffusers' names."""
    if trained_by == "official":
        assumed.append("timestep frequencies and norms of the official code, which diffusers' class does not compute")
        return {}
    shift = 1
    if trained_by is None and config.timestep_frequency_shift is not None:
        shift = config.timestep_frequency_shift
        notes.append(f"{FREQUENCY_KEY} {shift}, as the folder's config.json says")
    else:
        assumed.append(
            "timestep frequencies and norms as diffusers' class computes them; weights that the official code trained "
            "need --trained-by official"
        )
    return {"timestep_frequency_shift": shift, "mlp_norm_eps": config.norm_eps}


def default_class_names(num_classes: int, assumed: list[str]) -> tuple[str, ...]:
    """ImageNet's for 1000 classes, else the numbers."""
    if num_classes != 1000:
        return tuple(str(label) for label in range(num_classes))
    from torchvision.models import ResNet50_Weights

    assumed.append("the 1000 classes of ImageNet, in their usual order")
    return tuple(ResNet50_Weights.DEFAULT.meta["categories"])
