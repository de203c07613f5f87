"""How a fast form is proven equal to the plain one it stands for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.conftest import relative_error

# float64 tells a wrong formula from rounding.
LIMITS = pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


def require_equal(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], limit: float
) -> None:
    """Same output, and same gradients of all inputs for a random upstream."""
    inputs = [each.detach().requires_grad_() for each in inputs]
    out, expected = fast(*inputs), plain(*inputs)
    upstream = torch.randn_like(expected)
    gradients, expected_gradients = (torch.autograd.grad(each, inputs, upstream) for each in (out, expected))
    assert relative_error(out.detach(), expected.detach()) < limit
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert expected_gradient.any()
        assert relative_error(gradient, expected_gradient) < limit
