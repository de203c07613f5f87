"""Classifier-free guidance (arXiv 2207.12598): the null label in training, the guided model in sampling."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, field_validator, model_validator

from vcagen.callables import Model, ModelFn
from vcagen.seeds import uniform


class GuidanceConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """How samples are guided.

    Attributes:
        scale: s in uncond + s (cond - uncond); 1 is off.
        channels: how many of the first latent channels are guided; `all`, or 3 to reproduce DiT's and SiT's tables.
        interval: (low, high), both included: timesteps at which samples are guided; none guides all. Flow: within
            [0, 1], 1 = data, so REPA's [low, high] is [1 - high, 1 - low] here and LightningDiT's start s is
            [s, 1]. Diffusion: within [0, 999], 999 = noise.
    """

    scale: Annotated[float, Field(ge=1)] = 1.0
    channels: Literal["all"] | Annotated[int, Field(ge=1)] = "all"
    interval: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] | None = None

    @field_validator("interval", mode="before")
    @classmethod
    def _interval_has_two_ends(cls, interval: Any) -> Any:
        if interval is not None and not (isinstance(interval, list | tuple) and len(interval) == 2):
            raise ValueError("expected [low, high], such as [0.3, 1.0]")
        return interval

    @model_validator(mode="after")
    def _interval_is_one(self) -> "GuidanceConfig":
        if self.interval is not None and self.interval[0] > self.interval[1]:
            raise ValueError(f"interval={list(self.interval)}: expected [low, high] with low <= high")
        return self


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
        config: at scale 1, and at timesteps outside the interval, the model is called for the labels alone.

    Raises:
        ValueError: guidance is asked of a model without a null label.
    """
    if config.scale == 1:
        return lambda latents, timesteps: model(latents, timesteps, labels)
    if null_label is None:
        raise ValueError(
            f"guidance.scale={config.scale:g} needs a null label, but this model was trained without label dropout "
            "and has none; use guidance.scale=1"
        )
    both_labels = torch.cat([labels, torch.full_like(labels, null_label)])

    def model_fn(latents: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        if config.interval is not None:
            low, high = config.interval
            inside = (low <= timesteps) & (timesteps <= high)
            assert inside.all() == inside.any(), "samplers evaluate a batch at one time"
            if not inside[0]:
                return model(latents, timesteps, labels)
        output = model(torch.cat([latents, latents]), torch.cat([timesteps, timesteps]), both_labels)
        conditional, unconditional = output.chunk(2)
        guided = latents.shape[1] if config.channels == "all" else min(config.channels, latents.shape[1])
        base = unconditional[:, :guided]
        mix = base + config.scale * (conditional[:, :guided] - base)
        return torch.cat([mix, conditional[:, guided:]], dim=1)

    return model_fn
