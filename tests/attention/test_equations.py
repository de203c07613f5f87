"""Outputs and all gradients against the loop-by-loop equations."""

import pytest
import torch

from tests.attention.helpers import (
    Grid,
    output_and_gradients,
    random_tokens,
    randomised,
    reference_output,
    relative_error,
)
from vcagen.attention import AttentionConfig, DifferentialConfig, MHSAConfig, VCAConfig

# (config, token grid, number of heads, layer index)
Case = tuple[AttentionConfig, Grid, int, int]

CASES: dict[str, Case] = {
    "mhsa": (MHSAConfig(), (4, 4), 2, 0),
    "mhsa-4-heads": (MHSAConfig(), (3, 5), 4, 3),
    "mhsa-conv": (MHSAConfig(value_conv=True), (3, 5), 2, 0),
    "differential": (DifferentialConfig(), (4, 4), 2, 0),
    "differential-4-heads": (DifferentialConfig(), (5, 4), 4, 3),
    "differential-conv": (DifferentialConfig(value_conv=True), (3, 5), 4, 1),
}


def vca_case(grid: Grid = (3, 4), num_heads: int = 2, layer_index: int = 1, **settings: object) -> Case:
    return VCAConfig.model_validate(settings), grid, num_heads, layer_index


for softmax in ("joint", "separate"):
    CASES |= {
        f"vca-{softmax}-default": vca_case((4, 4), layer_index=0, stage2_softmax=softmax),
        f"vca-{softmax}-4-heads": vca_case((5, 4), 4, 3, stage2_softmax=softmax),
        f"vca-{softmax}-wide-default": vca_case((3, 5), stage2_softmax=softmax),
        f"vca-{softmax}-tall-not-dividing": vca_case((5, 4), contrast_grid=(2, 3), stage2_softmax=softmax),
        f"vca-{softmax}-wide-not-dividing": vca_case((3, 5), contrast_grid=(2, 3), stage2_softmax=softmax),
        f"vca-{softmax}-same-grid": vca_case((3, 4), contrast_grid=(3, 4), stage2_softmax=softmax),
        f"vca-{softmax}-one-row": vca_case((1, 4), stage2_softmax=softmax),
        f"vca-{softmax}-one-contrast-token": vca_case(contrast_grid=(1, 1), stage2_softmax=softmax),
        f"vca-{softmax}-no-conv": vca_case(value_conv=False, stage2_softmax=softmax),
        f"vca-{softmax}-stage1-off": vca_case(stage1_differential=False, stage2_softmax=softmax),
        f"vca-{softmax}-stage2-off": vca_case(stage2_differential=False, stage2_softmax=softmax),
        f"vca-{softmax}-both-off": vca_case(
            stage1_differential=False, stage2_differential=False, stage2_softmax=softmax
        ),
    }
    for positive in ("pool", "embedding", "pool+embedding"):
        for negative in ("pool", "embedding", "pool+embedding"):
            CASES[f"vca-{softmax}-{positive}-against-{negative}"] = vca_case(
                positive_stream=positive, negative_stream=negative, stage2_softmax=softmax
            )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_output_and_every_gradient_equal_the_equations(case: Case) -> None:
    config, grid, num_heads, layer_index = case
    narrow = randomised(config, num_heads=num_heads, grid_size=grid, layer_index=layer_index)
    x = random_tokens(grid)
    upstream = random_tokens(grid, seed=2)
    single = output_and_gradients(narrow, x, upstream)
    double = output_and_gradients(narrow.double(), x.double(), upstream.double())

    names = [name for name, _ in narrow.named_parameters()]
    params = {name: value.detach().requires_grad_() for name, value in narrow.state_dict().items()}
    x = x.double().requires_grad_()
    out = reference_output(config, x, params, num_heads, grid, layer_index)
    gradients = torch.autograd.grad(out, [x, *(params[name] for name in names)], upstream.double())
    expected = {"output": out.detach(), **dict(zip(["input", *names], gradients, strict=True))}

    assert double.keys() == single.keys() == expected.keys()
    assert all(value.dtype == torch.float64 for value in double.values())
    assert all(value.dtype == torch.float32 for value in single.values())
    print({name: f"{relative_error(double[name], expected[name]):.1e} {relative_error(single[name], expected[name]):.1e}" for name in expected})
    assert {n: e for n in expected if (e := relative_error(double[n], expected[n])) > 1e-10} == {}
    assert {n: e for n in expected if (e := relative_error(single[n], expected[n])) > 1e-5} == {}
