"""Differential attention where its output is known without the equations' loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attention.helpers import HIDDEN_SIZE, random_tokens, randomised, relative_error
from vcagen.attention import DifferentialConfig, build_attention

HEADS = 4
HEAD_DIM = HIDDEN_SIZE // HEADS


def norm_input(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What reaches the norm, (B, heads/2, N, 2d), and the module's output."""
    seen: list[Tensor] = []
    handle = module.get_submodule("norm").register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    out = module(x)
    handle.remove()
    return seen[0], out


def set_exponents(module: nn.Module, first: float, second: float) -> None:
    """lq1 . lk1 and lq2 . lk2 become the given numbers."""
    with torch.no_grad():
        for query, key, exponent in (("q1", "k1", first), ("q2", "k2", second)):
            module.get_parameter(f"lambda_weight.{query}").zero_()[1] = exponent
            module.get_parameter(f"lambda_weight.{key}").zero_()[1] = 1.0


@pytest.mark.parametrize("layer_index", [0, 3])
@pytest.mark.parametrize("value_conv", [False, True])
def test_without_the_second_map_it_is_plain_attention_normed_and_scaled(layer_index: int, value_conv: bool) -> None:
    config = DifferentialConfig(value_conv=value_conv)
    module = randomised(config, num_heads=HEADS, layer_index=layer_index).double()
    start = 0.8 - 0.6 * math.exp(-0.3 * layer_index)
    set_exponents(module, 0.0, math.log1p(start))
    assert abs(module.get_submodule("lambda_weight")().item()) < 1e-15

    x = random_tokens().double()
    q, k, v = module.get_submodule("qkv")(x).chunk(3, dim=-1)
    heads = []
    for i in range(HEADS // 2):
        first_map = slice(2 * i * HEAD_DIM, (2 * i + 1) * HEAD_DIM)
        values = v[..., 2 * i * HEAD_DIM : (2 * i + 2) * HEAD_DIM]
        heads.append(F.scaled_dot_product_attention(q[..., first_map], k[..., first_map], values))
    plain = torch.stack(heads, dim=1)
    before, out = norm_input(module, x)
    assert relative_error(before, plain) < 1e-12

    gain = module.get_parameter("norm.weight")
    normed = (1 - start) * F.rms_norm(plain, (2 * HEAD_DIM,), gain, eps=1e-5)
    tokens = torch.cat(normed.unbind(1), dim=-1)
    if value_conv:
        tokens = tokens + module.get_submodule("value_conv")(v)
    assert relative_error(out.detach(), module.get_submodule("proj")(tokens).detach()) < 1e-12


def rounded(values: Tensor) -> Tensor:
    """Multiples of 1/8: sums of their products are exact, whatever the order of a matrix product's kernel."""
    return (values * 8).round() / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_maps_with_weight_one_cancel_exactly(dtype: torch.dtype) -> None:
    module = randomised(DifferentialConfig(), num_heads=HEADS).to(dtype)
    with torch.no_grad():
        for parameter in (module.get_parameter("qkv.weight"), module.get_parameter("qkv.bias")):
            parameter.copy_(rounded(parameter))
            maps = parameter[: 2 * HIDDEN_SIZE].unflatten(0, (2, HEADS // 2, 2, HEAD_DIM))
            maps[:, :, 1] = maps[:, :, 0]
    set_exponents(module, math.log(0.8), -200.0)
    assert module.get_submodule("lambda_weight")().item() == 1.0

    x = rounded(random_tokens()).to(dtype).requires_grad_()
    before, out = norm_input(module, x)
    assert before.count_nonzero() == 0
    assert torch.equal(out, module.get_parameter("proj.bias").expand_as(out))
    gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("num_heads", [1, 3, 5])
def test_odd_head_count_is_refused(num_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"num_heads={num_heads} is odd"):
        build_attention(DifferentialConfig(), 8 * num_heads, num_heads, (3, 4), 0)


def test_projections_keep_the_shape_of_plain_attention() -> None:
    module = build_attention(DifferentialConfig(), HIDDEN_SIZE, HEADS, (3, 4), 0)
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {
        "qkv.weight": (3 * HIDDEN_SIZE, HIDDEN_SIZE),
        "qkv.bias": (3 * HIDDEN_SIZE,),
        "proj.weight": (HIDDEN_SIZE, HIDDEN_SIZE),
        "proj.bias": (HIDDEN_SIZE,),
        **{f"lambda_weight.{name}": (HEAD_DIM,) for name in ("q1", "k1", "q2", "k2")},
        "norm.weight": (2 * HEAD_DIM,),
    }
