"""Solvers of the probability flow ODE dx = v(x, t) dt from noise (t = 0) to data (t = 1)."""

from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from torchdiffeq import odeint

from vcagen.callables import ModelFn
from vcagen.samplers.checks import Trajectory, require_finite

Steps = Annotated[int, Field(ge=1)]
Tolerance = Annotated[float, Field(gt=0, lt=1)]

MAX_ADAPTIVE_STEPS = 10_000


class EulerConfig(BaseModel, extra="forbid", frozen=True):
    """Euler's method: `num_steps` model calls. The official code's N is our N - 1."""

    name: Literal["euler"] = "euler"
    num_steps: Steps = 50


class HeunConfig(BaseModel, extra="forbid", frozen=True):
    """Heun's second-order method: 2 `num_steps` model calls."""

    name: Literal["heun"] = "heun"
    num_steps: Steps = 25


class Dopri5Config(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Dormand-Prince 5(4) with adaptive steps, SiT's default for its ODE figures.

    The error that sizes a step is measured over the whole batch, as in the official code, so an image depends a
    little on what else is in its batch: by about the tolerance. All other samplers do not.
    """

    name: Literal["dopri5"] = "dopri5"
    rtol: Tolerance = 1e-3
    atol: Tolerance = 1e-6


ODEConfig = EulerConfig | HeunConfig | Dopri5Config


def sample_ode(
    velocity_fn: ModelFn, noise: torch.Tensor, interval: tuple[float, float], config: ODEConfig
) -> torch.Tensor:
    """Integrates `noise` (B, C, H, W) over `interval`, on a uniform grid or adaptively; float32 throughout.

    Raises:
        ValueError: the state stops being finite, or adaptive steps become too small.
    """
    if isinstance(config, Dopri5Config):
        return _sample_adaptively(velocity_fn, noise, interval, config)
    x, trajectory = noise, Trajectory()
    times = torch.linspace(*interval, config.num_steps + 1)
    for start, end in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        step = end - start
        velocity = velocity_fn(x, x.new_full((len(x),), start))
        if config.name == "heun":
            at_end = velocity_fn(x + step * velocity, x.new_full((len(x),), end))
            velocity = (velocity + at_end) / 2
        x = x + step * velocity
        trajectory.reaches(x, end)
    trajectory.ends()
    return x


def _sample_adaptively(
    velocity_fn: ModelFn, noise: torch.Tensor, interval: tuple[float, float], config: Dopri5Config
) -> torch.Tensor:
    def derivative(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        velocity = velocity_fn(x, t.to(x.dtype).expand(len(x)))
        require_finite(velocity, t.item())
        return velocity

    times = torch.tensor(interval, dtype=torch.float64, device=noise.device)
    options: dict[str, Any] = {"max_num_steps": MAX_ADAPTIVE_STEPS}
    if interval[1] < 1:
        # Something is infinite at t = 1, so a step must end before it. Otherwise the last step goes past t = 1 and
        # is interpolated back, as in the official code; ending it at 1 changes an image by 7e-4 of its range.
        options["step_t"] = times[1:]
    try:
        x = odeint(derivative, noise, times, method="dopri5", rtol=config.rtol, atol=config.atol, options=options)[-1]
    except AssertionError as error:  # how torchdiffeq says that a step came out too small
        raise ValueError(
            f"dopri5 found no step small enough for rtol={config.rtol:g}, atol={config.atol:g} ({error}); use larger "
            "tolerances, or sampler.name=heun"
        ) from error
    require_finite(x, interval[1])
    return x
