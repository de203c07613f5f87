"""What stands between reading and writing: a model in official names, with all that sampling must know."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vcagen.conversion.source import Tensors
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import Family
from vcagen.pipeline_folder import mismatches
from vcagen.sampling_config import PipelineConfig

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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

    def local_autoencoder(self) -> Path | None:
        """The folder of an autoencoder that the overrides name, if it is one of this machine."""
        sources = [o.partition("=")[2] for o in self.overrides if o.startswith("autoencoder.source=")]
        return Path(sources[-1]) if sources and Path(sources[-1]).is_dir() else None


@dataclass(frozen=True)
class ConvertedModel:
    """A model that was read and not yet written.

    Attributes:
        settings: of `DiffusionTransformer`.
        tensors: by official name.
        config: of the pipeline.
        notes: what was found, decided and assumed, for people.
        vae: folder of the autoencoder to copy along, None for one that is fetched when it is needed.
    """

    settings: dict[str, Any]
    tensors: Tensors
    config: PipelineConfig
    notes: tuple[str, ...] = ()
    vae: Path | None = None

    def skeleton(self) -> DiffusionTransformer:
        """The model without memory for its weights."""
        with torch.device("meta"):
            return DiffusionTransformer(**self.settings)


def require_fitting(tensors: Tensors, settings: dict[str, Any], source: str, name: str) -> None:
    """Proves that the tensors are those of a model of these settings, floating-point and finite.

    Raises:
        ValueError: some are not; all are listed.
    """
    with torch.device("meta"):
        expected = dict(DiffusionTransformer(**settings).state_dict())
    problems = mismatches({key: tensor.shape for key, tensor in tensors.items()}, expected)
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOATS or tensor.layout != torch.strided:
            problems.append(f"{key} is {tensor.dtype} ({tensor.layout}), expected dense float16, 32, 64 or bfloat16")
        elif not torch.isfinite(tensor).all():
            problems.append(f"{key} has values that are not finite")
    if problems:
        raise ValueError(f"{source}: tensors do not fit a {name}: {'; '.join(problems)}")
