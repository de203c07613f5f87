"""The attention contract.

A backend is one file: a pydantic config with a literal `name`, and a module built from
`(config, hidden_size, num_heads, grid_size, layer_index)` that maps tokens (B, N, C) to (B, N, C), where
N = height * width of `grid_size`, row by row. The grid is given at construction; nothing infers it from N. Its
method `maps` gives the attention maps for the same tokens, by stage, so that they can be shown.
"""

from typing import Annotated

from pydantic import Field, TypeAdapter
from torch import nn

from vcagen.attention.differential import DifferentialAttention, DifferentialConfig
from vcagen.attention.mhsa import MHSA, MHSAConfig
from vcagen.attention.vca import VCA, VCAConfig

AttentionConfig = Annotated[MHSAConfig | VCAConfig | DifferentialConfig, Field(discriminator="name")]

BACKENDS: dict[type, type[nn.Module]] = {
    MHSAConfig: MHSA,
    VCAConfig: VCA,
    DifferentialConfig: DifferentialAttention,
}


def parse_attention(settings: dict[str, object]) -> AttentionConfig:
    """The config for plain settings such as `{"name": "vca", "contrast_grid": [4, 4]}`; a `ValueError` if wrong."""
    adapter: TypeAdapter[AttentionConfig] = TypeAdapter(AttentionConfig)
    return adapter.validate_python(settings)


def build_attention(
    config: AttentionConfig, hidden_size: int, num_heads: int, grid_size: tuple[int, int], layer_index: int
) -> nn.Module:
    """Builds the attention of one layer.

    Args:
        config: one of the configs above; its type chooses the backend.
        hidden_size: C.
        num_heads: heads of the plain transformer; must divide C.
        grid_size: (height, width) of the token grid.
        layer_index: depth of the layer, from 0.

    Raises:
        ValueError: the sizes do not fit the backend.
    """
    if hidden_size % num_heads:
        raise ValueError(
            f"model.hidden_size={hidden_size} is not divisible by model.num_heads={num_heads}; "
            "choose a number of heads that divides the width"
        )
    return BACKENDS[type(config)](config, hidden_size, num_heads, grid_size, layer_index)
