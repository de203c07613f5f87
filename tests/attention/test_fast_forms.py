"""Each fast form of a part against the plain one it stands for, gradients included."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attention.helpers import HIDDEN_SIZE, Grid, randomised
from tests.fast_forms import LIMITS, require_equal
from vcagen.attention import DifferentialConfig, VCAConfig
from vcagen.attention.differential import _wide_attention
from vcagen.attention.lambda_weight import ScaledRMSNorm
from vcagen.attention.vca import VCA


@LIMITS
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_norm_by_the_length(scale: float, dtype: torch.dtype, limit: float) -> None:
    module = ScaledRMSNorm(8, 3).to(dtype)

    def fast(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, x)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * weight * module.scale

    require_equal(fast, plain, [scale * torch.randn(2, 3, 5, 8, dtype=dtype), torch.randn(8, dtype=dtype)], limit)


def test_norm_of_nothing_has_gradients() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ScaledRMSNorm(8, 0)(x).sum(), x)
    assert torch.allclose(gradient, torch.full_like(x, 0.8 / 1e-5**0.5))


@LIMITS
@pytest.mark.parametrize(("grid", "contrast_grid"), [((4, 6), (2, 2)), ((6, 4), (3, 4)), ((5, 4), (2, 2))])
def test_pooling(grid: Grid, contrast_grid: Grid, dtype: torch.dtype, limit: float) -> None:
    module = randomised(VCAConfig(contrast_grid=contrast_grid), grid_size=grid)
    assert isinstance(module, VCA)

    def plain(queries: Tensor) -> Tensor:
        image = queries.transpose(1, 2).unflatten(2, grid)
        return F.adaptive_avg_pool2d(image.contiguous(), contrast_grid).flatten(2).transpose(1, 2)

    require_equal(module._pool, plain, [torch.randn(2, grid[0] * grid[1], HIDDEN_SIZE, dtype=dtype)], limit)


@LIMITS
def test_attention_of_wide_values(dtype: torch.dtype, limit: float) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    q, k = (torch.randn(2, 3, 6, 4, dtype=dtype) for _ in range(2))
    require_equal(_wide_attention, plain, [q, k, torch.randn(2, 3, 6, 8, dtype=dtype)], limit)


def test_differential_attention_stores_no_map() -> None:
    tokens = 512
    module = randomised(DifferentialConfig(), grid_size=(16, 32))
    stored: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(torch.randn(1, tokens, HIDDEN_SIZE))
    assert max(stored) < tokens * tokens
