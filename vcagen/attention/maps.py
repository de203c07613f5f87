"""What an attention looks at, as maps to be shown; the forward passes never build them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one stage of one layer.

    Attributes:
        positive: (B, heads, queries, keys), in [0, 1].
        negative: the map that is subtracted, of the same shape; None where none is.
        weight: lambda, its factor, a scalar; None where there is none.
    """

    positive: torch.Tensor
    negative: torch.Tensor | None = None
    weight: torch.Tensor | None = None

    def difference(self) -> torch.Tensor:
        """A+ - lambda A-, which the values are multiplied by; A+ where nothing is subtracted."""
        if self.negative is None:
            return self.positive
        assert self.weight is not None
        return self.positive - self.weight * self.negative


def softmax_map(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)): (B, heads, n, d) and (B, heads, m, d) to (B, heads, n, m)."""
    return (queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5).softmax(dim=-1)
