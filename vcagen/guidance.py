"""Classifier-free guidance (arXiv 2207.12598): the null label in training, the guided model in sampling."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from vcagen.callables import Model, ModelFn
from vcagen.seeds import uniform


class GuidanceConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How samples are guided.

    Attributes:
        scale: s in uncond + s (cond - uncond); 1 is off.
        channels: how many of the first latent channels are guided; `all`, or 3 to reproduce DiT's and SiT's tables.
    """

    scale: Annotated[float, Field(ge=1)] = 1.0
    channels: Literal["all"] | Annotated[int, Field(ge=1)] = "all"


def drop_labels(
    labels: torch.Tensor, probability: float, null_label: int, generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """Replaces each label (B,) by the null label with the given probability; one draw from each generator."""
    return torch.where(uniform(generators, labels.device) < probability, null_label, labels)


def guided_model(
    model: Model,
    labels: torch.Tensor,
    null_label: int | None,
    config: GuidanceConfig,
) -> ModelFn:
    """The model as samplers call it: labels bound, conditional and unconditional halves in one call.

    Guided channels become uncond + s (cond - uncond). Latent channels beyond `config.channels`, and variance
    channels, keep the conditional prediction.

    Args:
        model: (latents, timesteps, labels) -> (B, C or 2C, H, W).
        labels: (B,) int64.
        null_label: the model's null label, or None where it has none.
        config: scale and channels; at scale 1 the model is called for the labels alone.

    Raises:
        ValueError: guidance is asked of a model without a null label.
    """
    if config.scale == 1:
        return lambda latents, timesteps: model(latents, timesteps, labels)
    if null_label is None:
        raise ValueError(
            f"guidance.scale={config.scale} needs a null label, but this model was trained with "
            "train.label_dropout=0; use guidance.scale=1"
        )
    both_labels = torch.cat([labels, torch.full_like(labels, null_label)])

    def model_fn(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        output = model(torch.cat([latents, latents]), torch.cat([timesteps, timesteps]), both_labels)
        conditional, unconditional = output.chunk(2)
        guided = latents.shape[1] if config.channels == "all" else min(config.channels, latents.shape[1])
        base = unconditional[:, :guided]
        mix = base + config.scale * (conditional[:, :guided] - base)
        return torch.cat([mix, conditional[:, guided:]], dim=1)

    return model_fn
