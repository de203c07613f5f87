from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn

from vcagen.attention.maps import AttentionMaps, softmax_map
from vcagen.attention.value_conv import ValueConv


class MHSAConfig(BaseModel, extra="forbid", frozen=True):
    """Multi-head softmax attention, as in DiT and SiT."""

    name: Literal["mhsa"] = "mhsa"
    value_conv: bool = False


class MHSA(nn.Module):
    """Multi-head softmax attention with the official parameter names `qkv` and `proj`.

    The grid matters only to the optional convolution of v.
    """

    def __init__(
        self,
        config: MHSAConfig,
        hidden_size: int,
        num_heads: int,
        grid_size: tuple[int, int],
        layer_index: int,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.value_conv = ValueConv(hidden_size, grid_size) if config.value_conv else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens (B, N, C) to (B, N, C)."""
        tokens = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)  # 3 x (B, N, C)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in tokens)  # (B, heads, N, d)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, N, C)
        if self.value_conv is not None:
            out = out + self.value_conv(tokens[2])
        return self.proj(out)

    def maps(self, x: torch.Tensor) -> dict[str, AttentionMaps]:
        """The map that `forward` uses on tokens (B, N, C), `attention`: (B, heads, N, N)."""
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, N, d)
        return {"attention": AttentionMaps(softmax_map(q, k))}
