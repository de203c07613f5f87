"""The weight of the subtracted map: start, range, and float32 under autocast."""

import math

import pytest
import torch
from torch import Tensor

from tests.attention.helpers import random_tokens, randomised, reference_output, relative_error
from vcagen.attention import AttentionConfig, DifferentialConfig, MHSAConfig, VCAConfig, build_attention
from vcagen.attention.lambda_weight import LambdaWeight, lambda_init

STARTS = [(0, 0.20), (1, 0.36), (20, 0.80)]
LAMBDAS = [
    (VCAConfig(), "lambda1"),
    (VCAConfig(), "lambda2"),
    (VCAConfig(stage2_softmax="separate"), "lambda2"),
    (DifferentialConfig(), "lambda_weight"),
]


def set_lambda(weight: LambdaWeight, first: float, second: float) -> None:
    """Makes lambda = exp(first) - exp(second) + lambda_init, with more than one channel taking part."""
    with torch.no_grad():
        for query, key, exponent in ((weight.q1, weight.k1, first), (weight.q2, weight.k2, second)):
            query.zero_()
            key.zero_()
            query[:2] = torch.tensor([0.25, 0.5], dtype=torch.float64)
            key[:2] = torch.tensor([1.0, 1.5], dtype=torch.float64) * exponent


@pytest.mark.parametrize(("layer_index", "start"), STARTS)
def test_start_by_layer_counted_from_zero(layer_index: int, start: float) -> None:
    assert round(lambda_init(layer_index), 2) == start
    for config, name in LAMBDAS:
        module = build_attention(config, 16, 4, (3, 4), layer_index)
        weight = module.get_submodule(name)
        for parameter in weight.parameters():
            torch.nn.init.zeros_(parameter)
        assert round(weight().item(), 2) == start


def test_the_start_is_not_rounded_with_the_weights() -> None:
    weight = LambdaWeight(4, 1)
    for parameter in weight.parameters():
        torch.nn.init.zeros_(parameter)
    assert weight.bfloat16()().item() == pytest.approx(0.8 - 0.6 * math.exp(-0.3), rel=1e-7)
    assert not list(weight.buffers())


@pytest.mark.parametrize(("config", "name"), LAMBDAS)
def test_vectors_start_with_std_a_tenth(config: AttentionConfig, name: str) -> None:
    torch.manual_seed(0)
    weight = build_attention(config, 1024, 2, (2, 2), 0).get_submodule(name)
    assert [(n, p.shape) for n, p in weight.named_parameters()] == [(n, (512,)) for n in ("q1", "k1", "q2", "k2")]
    values = torch.cat([parameter.detach() for parameter in weight.parameters()])
    assert values.std().item() == pytest.approx(0.1, rel=0.05)
    assert abs(values.mean().item()) < 0.01


@pytest.mark.parametrize(("first", "second"), [(1.2, 0.0), (0.0, 1.2), (0.7, -3.0), (-4.0, 2.0)])
@pytest.mark.parametrize(("config", "name"), LAMBDAS)
def test_lambda_is_not_clamped(config: AttentionConfig, name: str, first: float, second: float) -> None:
    module = randomised(config, layer_index=1).double()
    weight = module.get_submodule(name)
    assert isinstance(weight, LambdaWeight)
    set_lambda(weight, first, second)
    expected = math.exp(first) - math.exp(second) + 0.8 - 0.6 * math.exp(-0.3)
    assert expected < 0 or expected > 1
    assert weight().item() == pytest.approx(expected, rel=1e-12)
    x = random_tokens().double()
    params = {key: value.detach() for key, value in module.state_dict().items()}
    assert relative_error(module(x).detach(), reference_output(config, x, params, 2, (3, 4), 1)) < 1e-10


def captured_lambdas(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """Every lambda that a forward pass computes."""
    found: list[Tensor] = []
    handles = [
        each.register_forward_hook(lambda _module, _args, out: found.append(out))
        for each in module.modules()
        if isinstance(each, LambdaWeight)
    ]
    module(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(
    "config",
    [
        MHSAConfig(value_conv=True),
        DifferentialConfig(value_conv=True),
        VCAConfig(),
        VCAConfig(stage2_softmax="separate"),
        VCAConfig(stage1_differential=False),
        VCAConfig(stage2_differential=False),
        VCAConfig(positive_stream="embedding", negative_stream="pool"),
    ],
    ids=lambda config: repr(config).replace(" ", "")[:40],
)
def test_bfloat16_autocast(config: AttentionConfig) -> None:
    module, x = randomised(config), random_tokens().requires_grad_()
    wide, wide_lambdas = module(x), captured_lambdas(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, narrow_lambdas = module(x), captured_lambdas(module, x)
    assert len(wide_lambdas) == len(narrow_lambdas)
    for before, after in zip(wide_lambdas, narrow_lambdas, strict=True):
        assert after.dtype == torch.float32
        assert torch.equal(after, before)
    assert narrow.isfinite().all()
    assert relative_error(narrow.detach(), wide.detach().double()) < 3e-2
    narrow.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


def test_lambda_of_a_bfloat16_model_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    weight = LambdaWeight(8, 0)
    exact = weight()
    narrow = weight.to(torch.bfloat16)()
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(exact.item(), abs=5e-3)
