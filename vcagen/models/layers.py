"""The parts of DiT and SiT (arXiv 2212.09748) around attention, with the official parameter names."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vcagen.attention import AttentionConfig, build_attention


def position_table(hidden_size: int, grid_size: tuple[int, int]) -> torch.Tensor:
    """Sine-cosine position codes (1, N, C), float32, for a (height, width) grid, row by row.

    The first half of the width codes the column, the second half the row; in each, all sines, then all cosines
    (MAE's table, as in DiT). Integer positions: a larger grid continues the codes of a smaller one.
    """
    height, width = grid_size
    frequencies = 10000.0 ** (-torch.arange(hidden_size // 4, dtype=torch.float64) / (hidden_size / 4))

    def code(positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * frequencies  # (N, C / 4)
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    rows = torch.arange(height, dtype=torch.float64).repeat_interleave(width)
    columns = torch.arange(width, dtype=torch.float64).repeat(height)
    return torch.cat([code(columns), code(rows)], dim=1).float()[None]


def timestep_embedding(timesteps: torch.Tensor, dim: int, frequency_shift: int = 0) -> torch.Tensor:
    """[cos, sin] of timesteps (B,) at dim / 2 frequencies from 1 down to nearly 1 / 10000: (B, dim), float32.

    Frequency i is 10000^(-i / (dim / 2 - frequency_shift)).
    """
    half = dim // 2
    # The order of these operations is the official one: another moves the output by 1e-5 at timestep 999.
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device)
    frequencies = torch.exp(exponents / (half - frequency_shift))
    angles = timesteps[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """X (B, N, C) times 1 + scale plus shift, (B, C) each."""
    return torch.addcmul(shift[:, None], x, 1 + scale[:, None])


class PatchEmbed(nn.Module):
    """Latents (B, C_in, H, W) to tokens (B, N, C), row by row."""

    def __init__(self, in_channels: int, hidden_size: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        # The convolution as a linear layer of patches: the tokens come out contiguous, where the convolution's would
        # be a transposed view whose layout every layer after it would inherit, and pay for.
        size = self.proj.kernel_size[0]
        patches = latents.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C_in, h, p, w, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, N, C_in * p * p)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class TimestepEmbedder(nn.Module):
    """Timesteps (B,) to (B, C); whole numbers 0..999 for diffusion, unscaled times in [0, 1] for flow."""

    frequency_dim = 256

    def __init__(self, hidden_size: int, frequency_shift: int) -> None:
        super().__init__()
        self.frequency_shift = frequency_shift
        self.mlp = nn.Sequential(
            nn.Linear(self.frequency_dim, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """See the class."""
        frequencies = timestep_embedding(timesteps, self.frequency_dim, self.frequency_shift)
        return self.mlp(frequencies.to(next(self.mlp.parameters()).dtype))


class LabelEmbedder(nn.Module):
    """Labels (B,) to (B, C). With a null label the table has one more row, the last."""

    def __init__(self, num_classes: int, has_null_label: bool, hidden_size: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + has_null_label, hidden_size)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.embedding_table(labels)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation, which published weights depend on."""
    # Compilers make fast code of a sigmoid on a CPU, and none of a tanh; torch's own kernel is the better eager one.
    return sigmoid_gelu(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


def sigmoid_gelu(x: torch.Tensor) -> torch.Tensor:
    """The same function: (1 + tanh u) / 2 = sigmoid 2u, with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    factor = 2 * math.sqrt(2 / math.pi)
    return x * torch.sigmoid(x * (factor + factor * 0.044715 * x * x))


class Mlp(nn.Module):
    """Two linear layers with tanh-approximated GELU between: (B, N, C) to (B, N, C)."""

    def __init__(self, hidden_size: int, mlp_ratio: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, int(hidden_size * mlp_ratio))
        self.fc2 = nn.Linear(int(hidden_size * mlp_ratio), hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self.fc2(gelu(self.fc1(x)))


def modulation(hidden_size: int, count: int) -> nn.Sequential:
    """The linear layer that makes `count` vectors (B, C) of a condition (B, C) whose SiLU is taken already.

    It keeps its official name, the second of a sequence; the SiLU is the same for all layers and is taken once.
    """
    return nn.Sequential(nn.Identity(), nn.Linear(hidden_size, count * hidden_size))


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind adaLN-zero: shift, scale and gate come from the condition."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        attention: AttentionConfig,
        grid_size: tuple[int, int],
        layer_index: int,
        mlp_norm_eps: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = build_attention(attention, hidden_size, num_heads, grid_size, layer_index)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=mlp_norm_eps)
        self.mlp = Mlp(hidden_size, mlp_ratio)
        self.adaLN_modulation = modulation(hidden_size, 6)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Maps tokens (B, N, C) under the SiLU of a condition (B, C) to (B, N, C)."""
        vectors = self.adaLN_modulation(condition).chunk(6, dim=1)  # 6 x (B, C)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = vectors
        x = torch.addcmul(x, gate_attn[:, None], self.attn(modulate(self.norm1(x), shift_attn, scale_attn)))
        return torch.addcmul(x, gate_mlp[:, None], self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    """Tokens (B, N, C) under the SiLU of a condition (B, C) to patches (B, N, p * p * C_out)."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = modulation(hidden_size, 2)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """See the class."""
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))
