"""Euler-Maruyama for the reverse SDE of SiT (arXiv 2401.08740, equation 5) from noise (t = 0) to data (t = 1)."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from vcagen import interpolants
from vcagen.callables import ModelFn
from vcagen.interpolants import Coefficients, Path
from vcagen.samplers.checks import require_finite
from vcagen.seeds import normal

Form = Literal["sigma", "linear", "constant", "decreasing", "increasing-decreasing", "SBDM"]

# SBDM's strength is infinite at t = 0 for Linear and GVP, so its trajectory starts here.
SBDM_START = 1e-3


class EulerMaruyamaConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """dx = (v + w s) dt + sqrt(2 w) dW, with velocity v and score s from one model call per step.

    Attributes:
        num_steps: steps over [0, 1 - last_step_size]; one more call where there is a last step. The official
            code's N is our N - 1.
        form: diffusion strength w(t): `sigma` sigma_t, `linear` 1 - t, `constant` 1, `decreasing`
            (cos(pi t) + 1)^2 / 4, `increasing-decreasing` sin^2(pi t), `SBDM` the path's own.
        norm: factor on w.
        last_step: `mean` the drift without noise, `euler` the velocity alone, `tweedie` the expected data,
            `none` no last step: the grid runs to the end of the interval.
        last_step_size: its length in time.
    """

    name: Literal["euler_maruyama"] = "euler_maruyama"
    num_steps: Annotated[int, Field(ge=1)] = 249
    form: Form = "sigma"
    norm: Annotated[float, Field(gt=0)] = 1.0
    last_step: Literal["mean", "euler", "tweedie", "none"] = "mean"
    last_step_size: Annotated[float, Field(ge=1e-3, le=0.5)] = 0.04


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
    config: EulerMaruyamaConfig,
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

    def evaluate(x: torch.Tensor, time: float) -> tuple[Coefficients, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Coefficients, velocity, score and w at one time, from one model call."""
        t = x.new_full((len(x),), time)
        c = interpolants.coefficients(path, t, x)
        velocity = velocity_fn(x, t)
        score = interpolants.score_from_velocity(c, velocity, x)
        return c, velocity, score, diffusion_strength(config.form, c, t.view_as(c.alpha), config.norm)

    x = noise
    times = torch.linspace(first, last, config.num_steps + 1)
    for start, end in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        step = end - start
        _, velocity, score, strength = evaluate(x, start)
        x = x + step * (velocity + strength * score)
        x = x + (2 * strength * step).sqrt() * normal(x, generators)
        require_finite(x, end)
    if config.last_step == "none":
        return x
    c, velocity, score, strength = evaluate(x, last)
    if config.last_step == "tweedie":
        x = x / c.alpha + (c.sigma**2 / c.alpha) * score
    else:
        drift = velocity + strength * score if config.last_step == "mean" else velocity
        x = x + config.last_step_size * drift
    require_finite(x, 1.0)
    return x
