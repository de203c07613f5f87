"""Outputs and all gradients against the loop-by-loop equations."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.attention.helpers import (
    HIDDEN_SIZE,
    Grid,
    output_and_gradients,
    random_tokens,
    randomised,
    reference_output,
    relative_error,
)
from vcagen.attention import AttentionConfig, DifferentialConfig, MHSAConfig, VCAConfig


class Case(NamedTuple):
    config: AttentionConfig
    grid_size: Grid
    num_heads: int = 2
    layer_index: int = 0
    small_values: bool = False


CASES: dict[str, Case] = {
    "mhsa": Case(MHSAConfig(), (4, 4)),
    "mhsa-4-heads": Case(MHSAConfig(), (3, 5), 4, 3),
    "mhsa-conv": Case(MHSAConfig(value_conv=True), (3, 5)),
    "differential": Case(DifferentialConfig(), (4, 4)),
    "differential-4-heads": Case(DifferentialConfig(), (5, 4), 4, 3),
    "differential-conv": Case(DifferentialConfig(value_conv=True), (3, 5), 4, 1),
    "differential-small-values": Case(DifferentialConfig(), (3, 4), 4, 1, True),
}


def vca_case(
    grid_size: Grid = (3, 4),
    num_heads: int = 2,
    layer_index: int = 1,
    small_values: bool = False,
    **settings: object,
) -> Case:
    return Case(VCAConfig.model_validate(settings), grid_size, num_heads, layer_index, small_values)


for kind in ("joint", "separate"):
    CASES |= {
        f"vca-{kind}-default": vca_case((4, 4), 2, 0, stage2_softmax=kind),
        f"vca-{kind}-4-heads": vca_case((5, 4), 4, 3, stage2_softmax=kind),
        f"vca-{kind}-small-values": vca_case((4, 4), small_values=True, stage2_softmax=kind),
        f"vca-{kind}-wide": vca_case((3, 5), stage2_softmax=kind),
        f"vca-{kind}-wide-not-dividing": vca_case((3, 5), contrast_grid=(2, 3), stage2_softmax=kind),
        f"vca-{kind}-tall-not-dividing": vca_case((5, 4), contrast_grid=(2, 3), stage2_softmax=kind),
        f"vca-{kind}-same-grid": vca_case((3, 4), contrast_grid=(3, 4), stage2_softmax=kind),
        f"vca-{kind}-one-row": vca_case((1, 4), stage2_softmax=kind),
        # One contrast value only: lambda2 scales it, so it acts through the norm's epsilon alone.
        f"vca-{kind}-one-contrast-token": vca_case(contrast_grid=(1, 1), small_values=True, stage2_softmax=kind),
        f"vca-{kind}-no-conv": vca_case(value_conv=False, stage2_softmax=kind),
        f"vca-{kind}-stage1-off": vca_case(stage1_differential=False, stage2_softmax=kind),
        f"vca-{kind}-stage2-off": vca_case(stage2_differential=False, stage2_softmax=kind),
        f"vca-{kind}-both-off": vca_case(stage1_differential=False, stage2_differential=False, stage2_softmax=kind),
    }
    for positive in ("pool", "embedding", "pool+embedding"):
        for negative in ("pool", "embedding", "pool+embedding"):
            # Equal streams: the lambdas act through the norms' epsilon alone.
            CASES[f"vca-{kind}-{positive}-against-{negative}"] = vca_case(
                small_values=positive == negative == "pool",
                positive_stream=positive,
                negative_stream=negative,
                stage2_softmax=kind,
            )


def scale_down_values(module: torch.nn.Module) -> None:
    """Brings what the norms see to the size of sqrt(eps), where a wrong or missing epsilon shows."""
    for name, parameter in module.named_parameters():
        if name.startswith("qkv"):
            parameter.data[2 * HIDDEN_SIZE :] *= 0.01
        if name == "norm1.weight":
            parameter.data *= 0.01


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> dict[str, float]:
    assert actual.keys() == expected.keys()
    found = {name: relative_error(actual[name], expected[name]) for name in expected}
    return {name: error for name, error in found.items() if not error <= tolerance}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_every_gradient_equal_the_equations(case: Case) -> None:
    config, grid, num_heads, layer_index, small_values = case
    module = randomised(config, num_heads=num_heads, grid_size=grid, layer_index=layer_index)
    if small_values:
        scale_down_values(module)
    x, upstream = random_tokens(grid), random_tokens(grid, seed=2)
    single = output_and_gradients(module, x, upstream)
    double = output_and_gradients(module.double(), x.double(), upstream.double())
    assert {value.dtype for value in single.values()} == {torch.float32}
    assert {value.dtype for value in double.values()} == {torch.float64}

    names = [name for name, _ in module.named_parameters()]
    params = {name: value.detach().requires_grad_() for name, value in module.state_dict().items()}
    x = x.double().requires_grad_()
    out = reference_output(config, x, params, num_heads, grid, layer_index)
    gradients = torch.autograd.grad(out, [x, *(params[name] for name in names)], upstream.double())
    expected = {"output": out.detach(), **dict(zip(["input", *names], gradients, strict=True))}

    assert errors(double, expected, 1e-10) == {}
    # The gradient of the scalar lambda is a sum over all tokens that cancels, so its float32 rounding error
    # is relative to the terms and not to the sum; float64 has digits to spare and is held to the sum.
    largest = max(value.abs().max() for name, value in expected.items() if name != "output")
    for name in names:
        if name.startswith("lambda"):
            assert (single[name].double() - expected[name]).abs().max() <= 1e-5 * largest
            del single[name], expected[name]
    assert errors(single, expected, 1e-5) == {}


@pytest.mark.parametrize("kind", ["mhsa", "differential", "vca"])
def test_a_swapped_grid_would_be_noticed(kind: str) -> None:
    configs = {
        "mhsa": MHSAConfig(value_conv=True),
        "differential": DifferentialConfig(value_conv=True),
        "vca": VCAConfig(value_conv=False),
    }
    config = configs[kind]
    x = random_tokens((3, 5)).double()
    right = randomised(config, grid_size=(3, 5)).double()
    swapped = randomised(config, grid_size=(5, 3)).double()
    swapped.load_state_dict(right.state_dict())
    expected = reference_output(config, x, right.state_dict(), 2, (3, 5), 0)
    assert relative_error(right(x), expected) < 1e-12
    assert relative_error(swapped(x), expected) > 1e-2
