"""What every backend of the registry promises to the models."""

import pytest
import torch
from torch import Tensor, nn

from tests.attention.helpers import (
    HIDDEN_SIZE,
    Grid,
    count_parameters,
    output_and_gradients,
    random_tokens,
    randomised,
    relative_error,
)
from vcagen.attention import (
    BACKENDS,
    AttentionConfig,
    DifferentialConfig,
    MHSAConfig,
    VCAConfig,
    build_attention,
    parse_attention,
)

EVERY_BACKEND = pytest.mark.parametrize("config", [kind() for kind in BACKENDS], ids=lambda config: config.name)

SETTINGS: list[dict[str, object]] = [
    *({"name": kind().name, "value_conv": on} for kind in BACKENDS for on in (False, True)),
    {"name": "vca", "stage2_softmax": "separate"},
    {"name": "vca", "stage1_differential": False},
    {"name": "vca", "stage2_differential": False},
    {"name": "vca", "stage1_differential": False, "stage2_differential": False},
    {"name": "vca", "stage1_differential": False, "stage2_softmax": "separate"},
    {"name": "vca", "contrast_grid": [3, 4]},
    {"name": "vca", "contrast_grid": [2, 3]},
    *(
        {"name": "vca", "positive_stream": positive, "negative_stream": negative}
        for positive in ("pool", "embedding", "pool+embedding")
        for negative in ("pool", "embedding", "pool+embedding")
    ),
]


def label(settings: dict[str, object]) -> str:
    return "-".join(f"{value}".replace(" ", "") for value in settings.values())


EVERY_SETTING = pytest.mark.parametrize("config", [parse_attention(s) for s in SETTINGS], ids=map(label, SETTINGS))


def test_every_backend_is_covered() -> None:
    assert {type(parse_attention(settings)) for settings in SETTINGS} == set(BACKENDS)


@EVERY_SETTING
@pytest.mark.parametrize("grid", [(3, 4), (5, 4), (4, 4)])
def test_shape_and_dtype_are_kept(config: AttentionConfig, grid: Grid) -> None:
    module, x = randomised(config, grid_size=grid), random_tokens(grid, batch=3)
    assert module(x).shape == x.shape
    assert module(x).dtype == torch.float32
    assert module.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("grid", [(1, 4), (4, 1), (1, 1)])
@EVERY_BACKEND
def test_thin_grids_work(config: AttentionConfig, grid: Grid) -> None:
    out = randomised(config, grid_size=grid)(random_tokens(grid))
    assert out.shape == (2, grid[0] * grid[1], HIDDEN_SIZE)
    assert out.isfinite().all()


@EVERY_SETTING
def test_images_of_a_batch_do_not_see_each_other(config: AttentionConfig) -> None:
    module, x = randomised(config).double(), random_tokens(batch=3).double().requires_grad_()
    together = module(x)
    alone = torch.cat([module(image[None]) for image in x])
    assert relative_error(together.detach(), alone.detach()) < 1e-12
    (gradient,) = torch.autograd.grad(together[1].square().sum(), x)
    assert gradient[1].abs().max() > 0
    assert gradient[[0, 2]].abs().max() == 0


@EVERY_SETTING
def test_every_parameter_and_the_input_get_a_gradient(config: AttentionConfig) -> None:
    module = randomised(config).double()
    results = output_and_gradients(module, random_tokens().double(), random_tokens(seed=2).double())
    assert [name for name, value in results.items() if not (value.isfinite().all() and value.any())] == []


@EVERY_SETTING
def test_state_dict_round_trip(config: AttentionConfig) -> None:
    source, target = randomised(config, seed=0), randomised(config, seed=1)
    x = random_tokens()
    assert not torch.equal(source(x), target(x))
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(source(x), target(x))


@EVERY_BACKEND
def test_state_holds_parameters_only_under_the_official_names(config: AttentionConfig) -> None:
    module = build_attention(config, HIDDEN_SIZE, 2, (3, 4), 0)
    state = module.state_dict()
    assert state.keys() == {name for name, _ in module.named_parameters()}
    assert state["qkv.weight"].shape == (3 * HIDDEN_SIZE, HIDDEN_SIZE)
    assert state["proj.weight"].shape == (HIDDEN_SIZE, HIDDEN_SIZE)
    assert {"qkv.bias", "proj.bias"} <= state.keys()


@EVERY_SETTING
def test_train_and_eval_mode_agree(config: AttentionConfig) -> None:
    module, x = randomised(config), random_tokens()
    assert torch.equal(module.train()(x), module.eval()(x))


@EVERY_SETTING
def test_a_config_survives_a_dict(config: AttentionConfig) -> None:
    assert parse_attention(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", [kind().name for kind in BACKENDS])
def test_unknown_key_is_refused(name: str) -> None:
    assert type(parse_attention({"name": name})) in BACKENDS
    with pytest.raises(ValueError, match="stage3_softmax"):
        parse_attention({"name": name, "stage3_softmax": "joint"})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "linear"}, "linear"),
        ({"name": "vca", "stage2_softmax": "both"}, "stage2_softmax"),
        ({"name": "vca", "positive_stream": "query"}, "positive_stream"),
        ({"name": "vca", "negative_stream": "embedding+pool"}, "negative_stream"),
        ({"name": "vca", "contrast_grid": [0, 2]}, "contrast_grid"),
        ({"name": "vca", "contrast_grid": [2]}, "contrast_grid"),
        ({"name": "vca", "embedding_init_std": -0.1}, "embedding_init_std"),
    ],
)
def test_wrong_value_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_attention(settings)


@EVERY_BACKEND
def test_head_count_must_divide_the_width(config: AttentionConfig) -> None:
    with pytest.raises(ValueError, match=r"hidden_size=18 .*num_heads=4"):
        build_attention(config, 18, 4, (3, 4), 0)


@EVERY_BACKEND
def test_value_conv_adds_ten_parameters_a_channel(config: AttentionConfig) -> None:
    on, off = (
        build_attention(config.model_copy(update={"value_conv": each}), 24, 4, (3, 4), 0) for each in (True, False)
    )
    assert count_parameters(on) - count_parameters(off) == 10 * 24


@pytest.mark.parametrize(("width", "heads", "grid"), [(24, 4, (3, 5)), (48, 6, (8, 8)), (16, 2, (4, 6))])
def test_added_parameters(width: int, heads: int, grid: Grid) -> None:
    d, n = width // heads, (grid[0] // 2) * (grid[1] // 2)

    def added(config: AttentionConfig) -> int:
        baseline = build_attention(MHSAConfig(), width, heads, grid, 0)
        return count_parameters(build_attention(config, width, heads, grid, 0)) - count_parameters(baseline)

    assert added(VCAConfig()) == 2 * n * width + 10 * width + 10 * d
    assert added(VCAConfig(value_conv=False)) == 2 * n * width + 10 * d
    assert added(VCAConfig(positive_stream="pool", negative_stream="pool")) == 10 * width + 10 * d
    assert added(DifferentialConfig()) == 4 * d + 2 * d
    assert added(MHSAConfig()) == 0


def influenced(module: nn.Module, x: Tensor, grid: Grid, row: int, column: int) -> set[tuple[int, int]]:
    """Token positions whose value convolution changes with the token at (row, column)."""
    assert isinstance(module.value_conv, nn.Module)
    changed = x.clone()
    changed[:, row * grid[1] + column] += 1
    difference = (module.value_conv(changed) - module.value_conv(x)).abs().amax(dim=(0, 2))
    return {(int(i) // grid[1], int(i) % grid[1]) for i in difference.nonzero()}


@EVERY_BACKEND
def test_tokens_are_laid_out_row_by_row(config: AttentionConfig) -> None:
    grid = (3, 5)
    module = randomised(config.model_copy(update={"value_conv": True}), grid_size=grid).double()
    x = random_tokens(grid).double()
    assert influenced(module, x, grid, 0, 4) == {(0, 3), (0, 4), (1, 3), (1, 4)}
    assert influenced(module, x, grid, 1, 2) == {(r, c) for r in (0, 1, 2) for c in (1, 2, 3)}
