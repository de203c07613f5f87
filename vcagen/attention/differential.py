from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import nn

from vcagen.attention.lambda_weight import LambdaWeight, ScaledRMSNorm
from vcagen.attention.maps import AttentionMaps, softmax_map
from vcagen.attention.value_conv import ValueConv


class DifferentialConfig(BaseModel, extra="forbid", frozen=True):
    """Differential attention (arXiv 2410.05258)."""

    name: Literal["differential"] = "differential"
    value_conv: bool = False


class DifferentialAttention(nn.Module):
    """Differential attention: o = (1 - lambda_init) * RMSNorm((A1 - lambda A2) v), arXiv 2410.05258, equations 1-3.

    As in the paper the number of heads is half the plain transformer's: head i owns query and key maps 2i and
    2i + 1 of width d = C / num_heads and values of width 2d, so `qkv` and `proj` keep their shapes. The
    difference is taken after the two softmaxes; the norm follows over 2d channels of each head.

    Raises:
        ValueError: at construction, when `num_heads` is odd.
    """

    def __init__(
        self,
        config: DifferentialConfig,
        hidden_size: int,
        num_heads: int,
        grid_size: tuple[int, int],
        layer_index: int,
    ) -> None:
        super().__init__()
        if num_heads % 2:
            raise ValueError(
                f"model.attention.name=differential pairs heads, but model.num_heads={num_heads} is odd; "
                "choose an even number of heads"
            )
        head_dim = hidden_size // num_heads
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.lambda_weight = LambdaWeight(head_dim, layer_index)
        self.norm = ScaledRMSNorm(2 * head_dim, layer_index)
        self.value_conv = ValueConv(hidden_size, grid_size) if config.value_conv else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens (B, N, C) to (B, N, C)."""
        q, k, values = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)  # (B, N, C) each
        q1, q2 = self._split_pairs(q)  # (B, heads/2, N, d)
        k1, k2 = self._split_pairs(k)
        v = values.unflatten(-1, (self.num_heads // 2, -1)).transpose(1, 2)  # (B, heads/2, N, 2d)
        positive, negative = _wide_attention(q1, k1, v), _wide_attention(q2, k2, v)
        out = self.norm(torch.addcmul(positive, negative, -self.lambda_weight().to(v.dtype)))
        out = out.transpose(1, 2).flatten(2)  # (B, N, C)
        if self.value_conv is not None:
            out = out + self.value_conv(values)
        return self.proj(out)

    def maps(self, x: torch.Tensor) -> dict[str, AttentionMaps]:
        """The two maps that `forward` uses on tokens (B, N, C), `attention`: (B, heads/2, N, N)."""
        q, k, _ = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)  # (B, N, C) each
        positive, negative = map(softmax_map, self._split_pairs(q), self._split_pairs(k))
        return {"attention": AttentionMaps(positive, negative, self.lambda_weight())}

    def _split_pairs(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, N, C) to (2, B, heads/2, N, d), a view: what belongs to the first and to the second map."""
        return tokens.unflatten(-1, (self.num_heads // 2, 2, -1)).permute(3, 0, 2, 1, 4)


def _wide_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt d) v for values twice as wide as q and k.

    Fused kernels want one width. Zeros add nothing to a score, and spare the N x N map that would be stored.
    """
    width = q.shape[-1]
    q, k = F.pad(q, (0, width)), F.pad(k, (0, width))
    return F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)
