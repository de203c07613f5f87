from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, model_validator

from vcagen import interpolants
from vcagen.callables import Model
from vcagen.interpolants import Path, Prediction
from vcagen.objectives.output import ObjectiveOutput, mean_per_sample
from vcagen.seeds import normal, standard_normal, uniform


class FlowConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The interpolant objective of SiT (arXiv 2401.08740).

    Attributes:
        path: the interpolant.
        prediction: what the model returns.
        loss_weight: for noise and score: none, `velocity` (drift_variance / sigma)^2, or `likelihood`
            drift_variance / sigma^2.
        timestep_sampling: how training draws times: `uniform`, as SiT; `logit_normal`, the sigmoid of a normal number
            (arXiv 2403.03206, section 3.1), which favours the middle.
        logit_mean: of that normal number; above 0 favours times near data.
        logit_std: its standard deviation.
    """

    name: Literal["flow"] = "flow"
    path: Path = "Linear"
    prediction: Prediction = "velocity"
    loss_weight: Literal["none", "velocity", "likelihood"] = "none"
    timestep_sampling: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _weight_needs_noise_or_score(self) -> "FlowConfig":
        if self.prediction == "velocity" and self.loss_weight != "none":
            raise ValueError(
                f"loss_weight={self.loss_weight} weighs noise and score predictions; use none with velocity"
            )
        return self


class FlowObjective:
    """Regression of velocity, noise or score along an interpolant."""

    def __init__(self, config: FlowConfig) -> None:
        self.config = config

    def loss(
        self, model: Model, latents: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
    ) -> ObjectiveOutput:
        """Loss at a random time, with fresh noise.

        Args:
            model: called once, with times (B,) in [0, 1], 0 = noise, fed unscaled.
            latents: (B, C, H, W).
            labels: (B,) int64, null labels included.
            generators: one per sample; each draws a time, then the noise.
        """
        start, end = interpolants.time_interval(self.config.path, self.config.prediction, training=True)
        if self.config.timestep_sampling == "uniform":
            times = uniform(generators, latents.device)
        else:
            drawn = standard_normal(generators, latents.device)
            times = torch.sigmoid(self.config.logit_mean + self.config.logit_std * drawn)
        timesteps = start + (end - start) * times
        return self.loss_at(model, latents, labels, timesteps, normal(latents, generators))

    def loss_at(
        self,
        model: Model,
        latents: torch.Tensor,
        labels: torch.Tensor,
        timesteps: torch.Tensor,
        noise: torch.Tensor,
    ) -> ObjectiveOutput:
        """Loss at given times (B,) and noise (B, C, H, W); SiT section 2 and its loss weights."""
        c = interpolants.coefficients(self.config.path, timesteps, latents)
        noised_latents = c.alpha * latents + c.sigma * noise
        output = model(noised_latents, timesteps, labels)[:, : latents.shape[1]].float()  # unused half dropped
        if self.config.prediction == "velocity":
            return ObjectiveOutput(mean_per_sample((output - (c.d_alpha * latents + c.d_sigma * noise)) ** 2))
        weight = {
            "none": torch.ones_like(c.sigma),
            "velocity": (c.drift_variance / c.sigma) ** 2,
            "likelihood": c.drift_variance / c.sigma**2,
        }[self.config.loss_weight]
        # The score target is -noise / sigma; multiplied by sigma it stays finite.
        error = output - noise if self.config.prediction == "noise" else output * c.sigma + noise
        return ObjectiveOutput(mean_per_sample(weight * error**2))
