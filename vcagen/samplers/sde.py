"""Solvers of the reverse SDE of SiT (arXiv 2401.08740, equation 5) from noise (t = 0) to data (t = 1)."""

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, model_validator

from vcagen import interpolants
from vcagen.callables import ModelFn
from vcagen.interpolants import Coefficients, Path
from vcagen.samplers.checks import Trajectory
from vcagen.seeds import normal

Form = Literal["sigma", "linear", "constant", "decreasing", "increasing-decreasing", "SBDM"]

# SBDM's strength is infinite at t = 0 for Linear and GVP, so its trajectory starts here.
SBDM_START = 1e-3


class _SDEConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """dx = (v + w s) dt + sqrt(2 w) dW, with velocity v and score s from one model call.

    Attributes:
        num_steps: steps over [0, 1 - last_step_size]; one more call where there is a last step. The official
            code's N is our N - 1.
        form: diffusion strength w(t): `sigma` sigma_t, `linear` 1 - t, `constant` 1, `decreasing`
            (cos(pi t) + 1)^2 / 4, `increasing-decreasing` sin^2(pi t), `SBDM` the path's own, which is infinite at
            t = 0 on Linear and GVP, so that sampling starts at t = 0.001 there.
        norm: factor on w.
        last_step: `mean` the drift without noise, `euler` the velocity alone, `tweedie` the expected data,
            `none` no last step: the grid runs to the end of the interval.
        last_step_size: its length in time.
    """

    num_steps: Annotated[int, Field(ge=1)] = 249
    form: Form = "sigma"
    norm: Annotated[float, Field(gt=0)] = 1.0
    last_step: Literal["mean", "euler", "tweedie", "none"] = "mean"
    last_step_size: Annotated[float, Field(ge=1e-3, le=0.5)] = 0.04


class EulerMaruyamaConfig(_SDEConfig, frozen=True):
    """Euler-Maruyama: one model call a step."""

    name: Literal["euler_maruyama"] = "euler_maruyama"


class StochasticHeunConfig(_SDEConfig, frozen=True):
    """Heun on the drift, after the step's noise has been added: two model calls a step."""

    name: Literal["stochastic_heun"] = "stochastic_heun"
    num_steps: Annotated[int, Field(ge=1)] = 125

    @model_validator(mode="after")
    def _score_is_finite(self) -> "StochasticHeunConfig":
        if self.last_step == "none":
            raise ValueError(
                "last_step=none would have stochastic_heun ask for the score at t=1, where it is 0/0; "
                "use last_step=mean"
            )
        return self


SDEConfig = EulerMaruyamaConfig | StochasticHeunConfig


def diffusion_strength(form: Form, c: Coefficients, t: torch.Tensor, norm: float) -> torch.Tensor:
    """w(t), shaped like t."""
    strength = {
        "sigma": c.sigma,
        "linear": 1 - t,
        "constant": torch.ones_like(t),
        "decreasing": 0.25 * (torch.cos(math.pi * t) + 1) ** 2,
        "increasing-decreasing": torch.sin(math.pi * t) ** 2,
        "SBDM": c.drift_variance,
    }[form]
    return norm * strength


def sample_sde(
    velocity_fn: ModelFn,
    noise: torch.Tensor,
    generators: Sequence[torch.Generator],
    path: Path,
    interval: tuple[float, float],
    config: SDEConfig,
) -> torch.Tensor:
    """Integrates `noise` (B, C, H, W); float32 throughout. Each generator draws once a step, for its sample.

    Args:
        velocity_fn: velocity from latents and times (B,).
        noise: the state at the first time.
        generators: one per sample.
        path: the interpolant the model was trained on; turns velocity into score.
        interval: first and last time at which the velocity is finite.
        config: see there.

    Raises:
        ValueError: the state stops being finite.
    """
    first, last = interval
    if config.form == "SBDM" and path != "VP":
        first = max(first, SBDM_START)
    if config.last_step != "none":
        last = 1.0 - config.last_step_size

    def times(time: float) -> torch.Tensor:
        return noise.new_full((len(noise),), time)

    def coefficients_at(time: float) -> Coefficients:
        return interpolants.coefficients(path, times(time), noise)

    def strength_at(time: float) -> torch.Tensor:
        c = coefficients_at(time)
        return diffusion_strength(config.form, c, times(time).view_as(c.alpha), config.norm)

    def predict(x: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity and score, from one model call."""
        velocity = velocity_fn(x, times(time))
        return velocity, interpolants.score_from_velocity(coefficients_at(time), velocity, x)

    def drift_at(x: torch.Tensor, time: float) -> torch.Tensor:
        velocity, score = predict(x, time)
        return velocity + strength_at(time) * score

    x, trajectory = noise, Trajectory()
    grid = torch.linspace(first, last, config.num_steps + 1).tolist()
    for start, end in itertools.pairwise(grid):
        step = end - start
        kick = (2 * strength_at(start) * step).sqrt() * normal(x, generators)
        if config.name == "euler_maruyama":
            x = x + step * drift_at(x, start) + kick
        else:
            x = x + kick
            drift = drift_at(x, start)
            x = x + step * (drift + drift_at(x + step * drift, end)) / 2
        trajectory.reaches(x, end)
    if config.last_step == "none":
        trajectory.ends()
        return x
    if config.last_step == "mean":
        x = x + config.last_step_size * drift_at(x, last)
    else:
        velocity, score = predict(x, last)
        if config.last_step == "euler":
            x = x + config.last_step_size * velocity
        else:
            c = coefficients_at(last)
            x = x / c.alpha + (c.sigma**2 / c.alpha) * score
    trajectory.reaches(x, 1.0)
    trajectory.ends()
    return x
