"""Visual-Contrast Attention (arXiv 2511.00833).

Where the paper and the authors' released classification module differ or are silent, the README's lists
"released" and "decided" say which choice stands here.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import nn

from vcagen.attention.lambda_weight import LambdaWeight, ScaledRMSNorm
from vcagen.attention.maps import AttentionMaps, softmax_map
from vcagen.attention.value_conv import ValueConv

Stream = Literal["pool", "embedding", "pool+embedding"]
PositiveInt = Annotated[int, Field(ge=1)]


class VCAConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Settings of VCA; the defaults are the released form.

    Attributes:
        contrast_grid: (h, w) of the n = h*w contrast tokens; None is half the token grid a side, at most 8.
        stage2_softmax: `joint`, one softmax over the 2n tokens [t+; t-]; `separate`, one over each n.
        value_conv: add the depth-wise 3x3 convolution of v to the output.
        embedding_init_std: standard deviation of e+ and e- at init.
        stage1_differential: off, stage I uses the positive stream alone (norm and scale stay).
        stage2_differential: the same for stage II.
        positive_stream: content of t+: pooled queries, learned embedding, or their sum.
        negative_stream: content of t-.
    """

    name: Literal["vca"] = "vca"
    contrast_grid: tuple[PositiveInt, PositiveInt] | None = None
    stage2_softmax: Literal["joint", "separate"] = "joint"
    value_conv: bool = True
    embedding_init_std: Annotated[float, Field(ge=0)] = 1.0
    stage1_differential: bool = True
    stage2_differential: bool = True
    positive_stream: Stream = "pool+embedding"
    negative_stream: Stream = "pool+embedding"


def resolve_contrast_grid(contrast_grid: tuple[int, int] | None, grid_size: tuple[int, int]) -> tuple[int, int]:
    """The contrast grid in use: as given, or half the token grid on each side, at least 1 and at most 8.

    Raises:
        ValueError: a side is larger than the token grid's, where pooling would silently upsample.
    """
    if contrast_grid is None:
        height, width = (min(8, max(1, side // 2)) for side in grid_size)
        return height, width
    if contrast_grid[0] > grid_size[0] or contrast_grid[1] > grid_size[1]:
        raise ValueError(
            f"model.attention.contrast_grid={list(contrast_grid)} is larger than the token grid "
            f"{list(grid_size)}; each side must be at most the token grid's"
        )
    return contrast_grid


class VCA(nn.Module):
    """Visual-Contrast Attention: O(N n C) for n contrast tokens, instead of O(N^2 C).

    Adds 2nC (embeddings) + 10C (convolution) + 10d (lambdas and norms) parameters to softmax attention. Weights
    that a switch leaves unused are not created. Construction draws from torch's global generator.

    Raises:
        ValueError: at construction, when the contrast grid is larger than the token grid.
    """

    def __init__(
        self,
        config: VCAConfig,
        hidden_size: int,
        num_heads: int,
        grid_size: tuple[int, int],
        layer_index: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        self.grid_size = grid_size
        self.contrast_grid = resolve_contrast_grid(config.contrast_grid, grid_size)
        head_dim = hidden_size // num_heads
        num_contrast = self.contrast_grid[0] * self.contrast_grid[1]
        self.has_negative_stream = config.stage1_differential or config.stage2_differential

        def embedding(stream: Stream) -> nn.Parameter | None:
            if stream == "pool":
                return None
            return nn.Parameter(torch.empty(num_contrast, hidden_size).normal_(std=config.embedding_init_std))

        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.positive_embedding = embedding(config.positive_stream)
        self.negative_embedding = embedding(config.negative_stream) if self.has_negative_stream else None
        self.lambda1 = LambdaWeight(head_dim, layer_index) if config.stage1_differential else None
        self.lambda2 = LambdaWeight(head_dim, layer_index) if config.stage2_differential else None
        self.norm1 = ScaledRMSNorm(head_dim, layer_index)
        self.norm2 = ScaledRMSNorm(head_dim, layer_index)
        self.value_conv = ValueConv(hidden_size, grid_size) if config.value_conv else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps tokens (B, N, C) to (B, N, C)."""
        tokens = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)  # 3 x (B, N, C)
        q, k, v = (self._split_heads(t) for t in tokens)  # (B, heads, N, d)
        contrast_tokens = self._contrast_tokens(tokens[0])  # [t+; t-], (B, heads, 2n, d)
        contrast_values = self._global_contrast(contrast_tokens, k, v)  # (B, heads, n, d)
        out = self._patch_contrast(q, contrast_tokens, contrast_values)  # (B, heads, N, d)
        out = out.transpose(1, 2).flatten(2)  # (B, N, C)
        if self.value_conv is not None:
            out = out + self.value_conv(tokens[2])
        return self.proj(out)

    def maps(self, x: torch.Tensor) -> dict[str, AttentionMaps]:
        """The maps that `forward` uses on tokens (B, N, C).

        Returns:
            `stage1`, of contrast tokens over patches (B, heads, n, N), and `stage2`, of patches over contrast tokens
            (B, heads, N, n). Rows of a joint stage II sum to 1 over both maps together, all others over each map.
        """
        tokens = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)  # 3 x (B, N, C)
        q, k = self._split_heads(tokens[0]), self._split_heads(tokens[1])  # (B, heads, N, d)
        contrast_tokens = self._contrast_tokens(tokens[0])
        streams = self._streams(contrast_tokens)
        stage1 = AttentionMaps(softmax_map(streams[0], k))
        if self.lambda1 is not None:
            stage1 = AttentionMaps(stage1.positive, softmax_map(streams[1], k), self.lambda1())
        stage2 = AttentionMaps(softmax_map(q, streams[0]))
        if self.lambda2 is not None:
            if self.config.stage2_softmax == "joint":
                positive, negative = softmax_map(q, contrast_tokens).chunk(2, dim=-1)
            else:
                positive, negative = stage2.positive, softmax_map(q, streams[1])
            stage2 = AttentionMaps(positive, negative, self.lambda2())
        return {"stage1": stage1, "stage2": stage2}

    def _split_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, n, C) to (B, heads, n, d), a view."""
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _pool(self, queries: torch.Tensor) -> torch.Tensor:
        """Average-pools queries (B, N, C) on their grid to (B, n, C), by the window rule of adaptive pooling."""
        (height, width), (rows, columns) = self.grid_size, self.contrast_grid
        if height % rows == 0 and width % columns == 0:
            # Windows of one size: a mean along each side, whose backward pass is an expansion.
            pooled = queries.unflatten(1, (height, columns, -1)).mean(3)  # (B, H, w, C)
            return pooled.unflatten(1, (rows, -1)).mean(2).flatten(1, 2)
        image = queries.unflatten(1, self.grid_size).permute(0, 3, 1, 2)  # (B, C, H, W), a channels-last view
        return F.adaptive_avg_pool2d(image, self.contrast_grid).flatten(2).transpose(1, 2)

    def _contrast_tokens(self, queries: torch.Tensor) -> torch.Tensor:
        """t+ = pool + e+ and t- = pool + e-, one after the other; t+ alone when no stage is differential.

        Both stages share the one tensor (B, heads, 2n or n, d), a view of (B, 2n or n, C).
        """
        contents: list[tuple[Stream, torch.Tensor | None]]
        contents = [(self.config.positive_stream, self.positive_embedding)]
        if self.has_negative_stream:
            contents.append((self.config.negative_stream, self.negative_embedding))
        needs_pool = any(stream != "embedding" for stream, _ in contents)
        pooled = self._pool(queries) if needs_pool else None  # (B, n, C)

        def content(stream: Stream, embedding: torch.Tensor | None) -> torch.Tensor:
            learned = None if embedding is None else embedding.to(queries.dtype)
            if stream == "embedding":
                assert learned is not None
                return learned.expand(len(queries), -1, -1)
            assert pooled is not None
            return pooled if learned is None else pooled + learned

        return self._split_heads(torch.cat([content(*each) for each in contents], dim=1))

    def _streams(self, contrast_tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[t+; t-] taken apart, (B, heads, n, d) each, views."""
        return contrast_tokens.chunk(2 if self.has_negative_stream else 1, dim=2)

    def _global_contrast(self, contrast_tokens: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stage I: v^ = (1 - lambda_init) RMSNorm(v+ - lambda1 v-), with v+- = softmax(t+- k^T / sqrt d) v."""
        if self.lambda1 is None:
            return self.norm1(F.scaled_dot_product_attention(self._streams(contrast_tokens)[0], k, v))
        both = F.scaled_dot_product_attention(contrast_tokens, k, v)  # (B, heads, 2n, d)
        positive, negative = both.unflatten(2, (2, -1)).unbind(2)
        return self.norm1(torch.addcmul(positive, negative, -self.lambda1().to(v.dtype)))

    def _patch_contrast(
        self, q: torch.Tensor, contrast_tokens: torch.Tensor, contrast_values: torch.Tensor
    ) -> torch.Tensor:
        """Stage II: o = (1 - lambda_init) RMSNorm((A+ - lambda2 A-) v^), each query against t+ and t-."""
        if self.lambda2 is None:
            return self.norm2(F.scaled_dot_product_attention(q, self._streams(contrast_tokens)[0], contrast_values))
        weight = -self.lambda2().to(q.dtype)
        if self.config.stage2_softmax == "joint":
            # [A+, A-] is one softmax over 2n keys, so (A+ - lambda2 A-) v^ = [A+, A-] [v^; -lambda2 v^].
            values = torch.cat([contrast_values, weight * contrast_values], dim=2)
            return self.norm2(F.scaled_dot_product_attention(q, contrast_tokens, values))
        positive, negative = (
            F.scaled_dot_product_attention(q, stream, contrast_values) for stream in self._streams(contrast_tokens)
        )
        return self.norm2(torch.addcmul(positive, negative, weight))
