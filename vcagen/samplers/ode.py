"""Solvers of the probability flow ODE dx = v(x, t) dt from noise (t = 0) to data (t = 1)."""

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from vcagen.callables import ModelFn
from vcagen.samplers.checks import require_finite

Steps = Annotated[int, Field(ge=1)]


class EulerConfig(BaseModel, extra="forbid", frozen=True):
    """Euler's method: `num_steps` model calls. The official code's N is our N - 1."""

    name: Literal["euler"] = "euler"
    num_steps: Steps = 50


class HeunConfig(BaseModel, extra="forbid", frozen=True):
    """Heun's second-order method: 2 `num_steps` model calls."""

    name: Literal["heun"] = "heun"
    num_steps: Steps = 25


def sample_ode(
    velocity_fn: ModelFn, noise: torch.Tensor, interval: tuple[float, float], config: EulerConfig | HeunConfig
) -> torch.Tensor:
    """Integrates `noise` (B, C, H, W) over a uniform grid of `interval`; float32 throughout.

    Raises:
        ValueError: the state stops being finite.
    """
    x = noise
    times = torch.linspace(*interval, config.num_steps + 1)
    for start, end in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        step = end - start
        velocity = velocity_fn(x, x.new_full((len(x),), start))
        if config.name == "heun":
            at_end = velocity_fn(x + step * velocity, x.new_full((len(x),), end))
            velocity = (velocity + at_end) / 2
        x = x + step * velocity
        require_finite(x, end)
    return x
