"""Visual-contrast attention: the contrast grid, its switches, and properties that need no loops."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tests.attention.helpers import (
    HIDDEN_SIZE,
    Grid,
    random_tokens,
    randomised,
    relative_error,
)
from vcagen.attention import VCAConfig, build_attention

HEADS = 2


@pytest.mark.parametrize(
    ("grid", "contrast_grid"),
    [
        ((16, 16), (8, 8)),
        ((8, 8), (4, 4)),
        ((4, 4), (2, 2)),
        ((32, 32), (8, 8)),
        ((64, 4), (8, 2)),
        ((3, 5), (1, 2)),
        ((1, 4), (1, 2)),
        ((1, 1), (1, 1)),
    ],
)
def test_default_contrast_grid_is_half_a_side_and_at_most_eight(grid: Grid, contrast_grid: Grid) -> None:
    module = build_attention(VCAConfig(), HIDDEN_SIZE, HEADS, grid, 0)
    assert module.contrast_grid == contrast_grid
    assert module.get_parameter("positive_embedding").shape == (
        contrast_grid[0] * contrast_grid[1],
        HIDDEN_SIZE,
    )
    assert module.get_parameter("negative_embedding").shape == (
        contrast_grid[0] * contrast_grid[1],
        HIDDEN_SIZE,
    )


@pytest.mark.parametrize("contrast_grid", [(4, 4), (3, 5), (4, 1), (1, 5), (7, 7)])
def test_contrast_grid_larger_than_the_token_grid_is_refused(contrast_grid: Grid) -> None:
    with pytest.raises(ValueError, match="contrast_grid") as refused:
        build_attention(VCAConfig(contrast_grid=contrast_grid), HIDDEN_SIZE, HEADS, (3, 4), 0)
    assert str(list(contrast_grid)) in str(refused.value)
    assert "[3, 4]" in str(refused.value)


@pytest.mark.parametrize("std", [None, 0.02, 0.5, 0.0])
def test_embeddings_start_with_the_configured_std(std: float | None) -> None:
    torch.manual_seed(0)
    config = VCAConfig() if std is None else VCAConfig(embedding_init_std=std)
    module = build_attention(config, 256, HEADS, (16, 16), 0)
    tables = [module.get_parameter(f"{sign}_embedding").detach() for sign in ("positive", "negative")]
    for table in tables:
        assert table.std().item() == pytest.approx(1.0 if std is None else std, rel=0.05)
        assert abs(table.mean().item()) <= 0.03 * (1.0 if std is None else std)
    assert torch.equal(*tables) == (std == 0)


@pytest.mark.parametrize(("stage1", "stage2"), itertools.product((True, False), repeat=2))
def test_only_used_weights_exist(stage1: bool, stage2: bool) -> None:
    config = VCAConfig(stage1_differential=stage1, stage2_differential=stage2)
    names = {name.split(".")[0] for name, _ in randomised(config).named_parameters()}
    assert ("lambda1" in names) == stage1
    assert ("lambda2" in names) == stage2
    assert ("negative_embedding" in names) == (stage1 or stage2)
    assert {"positive_embedding", "norm1", "norm2", "value_conv", "qkv", "proj"} <= names


def captured(module: nn.Module, x: Tensor, path: str) -> tuple[Tensor, Tensor]:
    """What goes into and out of a submodule."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = module.get_submodule(path).register_forward_hook(lambda _m, args, out: seen.append((args[0], out)))
    module(x)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["joint", "separate"])
def test_stage_two_is_the_explicit_difference_of_maps(kind: str, dtype: torch.dtype) -> None:
    grid = (6, 8)
    config = VCAConfig.model_validate({"stage2_softmax": kind})
    module = randomised(config, num_heads=HEADS, grid_size=grid).to(dtype)
    x = random_tokens(grid).to(dtype)

    def split(tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    queries = module.get_submodule("qkv")(x)[..., :HIDDEN_SIZE]
    windows = queries.reshape(2, 3, 2, 4, 2, HIDDEN_SIZE).mean(dim=(2, 4)).flatten(1, 2)
    positive = split(windows + module.get_parameter("positive_embedding"))
    negative = split(windows + module.get_parameter("negative_embedding"))
    scores = [split(queries) @ keys.mT / (HIDDEN_SIZE // HEADS) ** 0.5 for keys in (positive, negative)]
    if kind == "joint":
        first, second = torch.cat(scores, dim=-1).softmax(-1).chunk(2, dim=-1)
    else:
        first, second = (score.softmax(-1) for score in scores)
    _, contrast_values = captured(module, x, "norm1")
    weight = module.get_submodule("lambda2")()
    actual, _ = captured(module, x, "norm2")
    expected = (first - weight * second) @ contrast_values
    assert relative_error(actual.detach(), expected.detach()) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_the_two_forms_of_stage_two_differ_only_where_both_maps_are_used() -> None:
    x = random_tokens()

    def difference(**settings: bool) -> float:
        joint = randomised(VCAConfig(stage2_softmax="joint", **settings))
        separate = randomised(VCAConfig(stage2_softmax="separate", **settings))
        return relative_error(joint(x).detach(), separate(x).detach())

    assert difference() > 1e-3
    assert difference(stage1_differential=False) > 1e-3
    assert difference(stage2_differential=False) == 0


class CountedAttention(TorchFunctionMode):
    """Counts the fused attention calls inside the context."""

    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += func is torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_the_joint_form_is_two_fused_attention_calls() -> None:
    module, x = randomised(VCAConfig()), random_tokens()
    with CountedAttention() as counted:
        module(x)
    assert counted.calls == 2


def swapped_outputs(module: nn.Module, x: Tensor, i: int, j: int) -> float:
    """How far the module is from commuting with the exchange of tokens i and j."""
    order = list(range(x.shape[1]))
    order[i], order[j] = j, i
    return relative_error(module(x[:, order]).detach(), module(x)[:, order].detach())


def test_pooling_windows_follow_the_rows_of_the_grid() -> None:
    # Tokens of one window may change places; with the 2x2 windows of a (2, 6) grid these are 0, 1, 6 and 7.
    grid = (2, 6)
    config = VCAConfig(contrast_grid=(1, 3), value_conv=False)
    module, x = randomised(config, grid_size=grid).double(), random_tokens(grid).double()
    for i, j in itertools.combinations((0, 1, 6, 7), 2):
        assert swapped_outputs(module, x, i, j) < 1e-12
    for i, j in ((1, 2), (7, 8), (0, 3), (6, 11)):
        assert swapped_outputs(module, x, i, j) > 1e-6


def test_without_windows_the_layout_does_not_matter() -> None:
    # Streams of embeddings alone ignore the layout, and so does a single window.
    for config in (
        VCAConfig(positive_stream="embedding", negative_stream="embedding", value_conv=False),
        VCAConfig(contrast_grid=(1, 1), value_conv=False),
    ):
        module, x = randomised(config).double(), random_tokens().double()
        assert swapped_outputs(module, x, 0, 11) < 1e-12


@pytest.mark.parametrize("kind", ["joint", "separate"])
def test_cancelling_streams_stay_finite(kind: str) -> None:
    config = VCAConfig.model_validate({"stage2_softmax": kind, "positive_stream": "pool", "negative_stream": "pool"})
    module, x = randomised(config), random_tokens().requires_grad_()
    with torch.no_grad():
        for name in ("lambda1", "lambda2"):
            module.get_parameter(f"{name}.q1").zero_()
            module.get_parameter(f"{name}.q1")[0] = torch.tensor(0.8).log()
            module.get_parameter(f"{name}.k1").fill_(1.0)
            module.get_parameter(f"{name}.q2").fill_(-100.0)
            module.get_parameter(f"{name}.k2").fill_(1.0)
            assert module.get_submodule(name)().item() == pytest.approx(1.0)
    assert captured(module, x, "norm1")[0].abs().max() < 1e-6
    out = module(x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    assert all(value.isfinite().all() for value in (out, *gradients))
