from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss per sample (B,), float32, and the named parts that it is the sum of, (B,) each."""

    loss: torch.Tensor
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


def mean_per_sample(x: torch.Tensor) -> torch.Tensor:
    """(B, ...) to (B,)."""
    return x.flatten(1).mean(1)
