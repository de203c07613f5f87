from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# (noised latents (B, C, H, W), timesteps (B,), labels (B,)) -> output (B, C or 2C, H, W)
Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss per sample (B,), float32, and the named parts that it is the sum of, (B,) each."""

    loss: torch.Tensor
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


def mean_per_sample(x: torch.Tensor) -> torch.Tensor:
    """(B, ...) to (B,)."""
    return x.flatten(1).mean(1)
