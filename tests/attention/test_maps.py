"""The maps are those that the forward pass uses: values multiplied by them give its output."""

import pytest
import torch
from torch import Tensor, nn

from tests.attention.helpers import random_tokens, randomised, relative_error
from tests.attention.test_contract import EVERY_SETTING
from vcagen.attention import AttentionConfig, VCAConfig
from vcagen.attention.differential import DifferentialAttention
from vcagen.attention.vca import VCA


def output_from_maps(module: nn.Module, x: Tensor) -> Tensor:
    """The module's output by way of its maps."""
    maps = {name: stage.difference() for name, stage in module.maps(x).items()}
    values = module.qkv(x).chunk(3, dim=-1)[2]
    heads = next(iter(maps.values())).shape[1]
    out = values.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, heads, N, d)
    if isinstance(module, VCA):
        out = module.norm2(maps["stage2"] @ module.norm1(maps["stage1"] @ out))
    else:
        out = maps["attention"] @ out
        out = module.norm(out) if isinstance(module, DifferentialAttention) else out
    out = out.transpose(1, 2).flatten(2)
    return module.proj(out if module.value_conv is None else out + module.value_conv(values))


@EVERY_SETTING
@pytest.mark.parametrize("grid", [(3, 4), (5, 4)])
def test_values_times_maps_are_the_output(config: AttentionConfig, grid: tuple[int, int]) -> None:
    module, x = randomised(config, grid_size=grid, layer_index=3), random_tokens(grid, batch=3)
    assert relative_error(output_from_maps(module, x).detach(), module(x).detach().double()) < 1e-5


@EVERY_SETTING
def test_maps_are_weights_over_keys(config: AttentionConfig) -> None:
    for name, stage in randomised(config).maps(random_tokens()).items():
        maps = [stage.positive] if stage.negative is None else [stage.positive, stage.negative]
        assert all(((each >= 0) & (each <= 1)).all() for each in maps)
        joint = name == "stage2" and len(maps) == 2 and isinstance(config, VCAConfig)
        if joint and config.stage2_softmax == "joint":  # type: ignore[union-attr]
            maps = [maps[0] + maps[1]]
        assert all(torch.allclose(each.sum(dim=-1), torch.ones(())) for each in maps)


def test_a_map_belongs_to_the_stage_and_tokens_it_is_named_after() -> None:
    maps = randomised(VCAConfig(contrast_grid=(2, 3))).maps(random_tokens())
    assert maps["stage1"].positive.shape == (2, 2, 6, 12)
    assert maps["stage2"].positive.shape == (2, 2, 12, 6)
    off = randomised(VCAConfig(stage1_differential=False)).maps(random_tokens())
    assert (off["stage1"].negative, off["stage1"].weight) == (None, None)
    assert off["stage1"].difference() is off["stage1"].positive
    assert off["stage2"].negative is not None
