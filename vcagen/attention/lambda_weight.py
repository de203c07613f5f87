import math

import torch
from torch import nn


def lambda_init(layer_index: int) -> float:
    """Starting weight of the subtracted map: 0.2 in layer 0, towards 0.8 deeper (arXiv 2410.05258, section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


class LambdaWeight(nn.Module):
    """lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init (arXiv 2410.05258, equation 2).

    One scalar a layer, shared by its heads; may become negative or exceed 1. The near-cancelling regime is the
    normal one, so the scalar is computed in at least float32, also under autocast.
    """

    def __init__(self, head_dim: int, layer_index: int) -> None:
        super().__init__()
        # A scalar tensor on the CPU: a number would compile to a graph of its own in every other layer, a buffer would
        # be rounded with the weights.
        self.lambda_init = torch.tensor(lambda_init(layer_index), dtype=torch.float64, device="cpu")
        self.q1 = nn.Parameter(torch.empty(head_dim).normal_(std=0.1))
        self.k1 = nn.Parameter(torch.empty(head_dim).normal_(std=0.1))
        self.q2 = nn.Parameter(torch.empty(head_dim).normal_(std=0.1))
        self.k2 = nn.Parameter(torch.empty(head_dim).normal_(std=0.1))

    def forward(self) -> torch.Tensor:
        """The scalar lambda, float32 (float64 for a float64 model)."""
        dtype = torch.promote_types(self.q1.dtype, torch.float32)
        q1, k1, q2, k2 = (vector.to(dtype) for vector in (self.q1, self.k1, self.q2, self.k2))
        # Products and sums, not a matmul: autocast leaves them in float32.
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init.to(dtype)


class ScaledRMSNorm(nn.Module):
    """(1 - lambda_init) * RMSNorm(x) over the last dimension, learned gain, eps 1e-5, in at least float32."""

    eps = 1e-5

    def __init__(self, size: int, layer_index: int) -> None:
        super().__init__()
        self.scale = torch.tensor(
            1.0 - lambda_init(layer_index), dtype=torch.float64, device="cpu"
        )  # as in LambdaWeight's
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., size) to (..., size) in the same dtype."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        # By the vector norm: one pass over x each way, where squares and their mean write and keep a copy of it.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        normed = x * torch.rsqrt(length.square() / x.shape[-1] + self.eps)  # in `dtype`, as `length` is
        return (normed * (self.weight.to(dtype) * self.scale)).to(x.dtype)
