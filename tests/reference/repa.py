"""REPA's Euler-Maruyama sampler, transcribed literally and slowly from its definition.

Time t runs from noise (1) to data (0); the model's velocity is dx/dt; strength w = 2t; drift v - w s / 2; a uniform
grid from 1 to 0.04, then one step to 0 without noise; guided where low <= t <= high.
"""

from collections.abc import Callable, Sequence

import torch

Velocity = Callable[[torch.Tensor, float, torch.Tensor], torch.Tensor]


def sample_repa(
    velocity: Velocity,
    x: torch.Tensor,
    labels: torch.Tensor,
    null_label: int,
    scale: float,
    guided: tuple[float, float],
    num_steps: int,
    noises: Sequence[torch.Tensor],
) -> torch.Tensor:
    times = [*torch.linspace(1.0, 0.04, num_steps + 1).tolist(), 0.0]
    x = x.double()
    for index in range(num_steps + 1):
        t, dt = times[index], times[index + 1] - times[index]
        conditional = velocity(x, t, labels)
        drift = _drift(conditional, x, t)
        if guided[0] <= t <= guided[1]:
            unconditional = velocity(x, t, torch.full_like(labels, null_label))
            base = _drift(unconditional, x, t)
            drift = base + scale * (drift - base)
        x = x + drift * dt
        if index < num_steps:
            x = x + (2 * t * -dt) ** 0.5 * noises[index].double()
    return x


def _drift(velocity: torch.Tensor, x: torch.Tensor, t: float) -> torch.Tensor:
    """With x = (1 - t) data + t noise, so velocity = noise - data and score = -noise / t."""
    noise = x + (1 - t) * velocity
    return velocity - 0.5 * (2 * t) * (-noise / t)
