from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from vcagen.attention import parse_attention
from vcagen.models.layers import (
    FinalLayer,
    LabelEmbedder,
    PatchEmbed,
    TimestepEmbedder,
    TransformerBlock,
    position_table,
)

# The compiler's own choice of layouts copies the values' channels-last view for the convolution, twice on the way back.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"layout_optimization": False}


class DiffusionTransformer(ModelMixin, ConfigMixin):
    """The one backbone of DiT and SiT, with the official parameter names and init; the attention is a setting.

    Construction draws from torch's global generator.

    Args:
        latent_size: (H, W) of the latents; both must be multiples of the patch size.
        in_channels: channels of the latents.
        patch_size: side of a patch.
        hidden_size: width C; a multiple of 4 (position codes) and of `num_heads`.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: MLP width over C.
        num_classes: K; labels are 0..K-1.
        has_null_label: whether the label table has a row K for "no class", which guidance needs.
        learn_sigma: whether the output has 2 * in_channels; flow models leave the second half unused, as SiT does.
        attention: settings of an attention backend, such as `{"name": "vca"}`.
        timestep_frequency_shift: 0 for DiT's and SiT's timestep frequencies, 1 for those of diffusers' DiT class,
            which weights that it trained depend on.
        mlp_norm_eps: of the norm before the MLP; diffusers' DiT class has 1e-5 by default.

    Raises:
        ValueError: sizes that do not fit each other, with both named.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ("TransformerBlock",)
    _repeated_blocks = ("TransformerBlock",)

    @register_to_config
    def __init__(
        self,
        latent_size: tuple[int, int] = (32, 32),
        in_channels: int = 4,
        patch_size: int = 2,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        has_null_label: bool = True,
        learn_sigma: bool = True,
        attention: dict[str, Any] | None = None,
        timestep_frequency_shift: int = 0,
        mlp_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        height, width = latent_size
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"latents of {height}x{width} do not divide into patches of {patch_size}x{patch_size}; "
                f"both sides must be multiples of {patch_size}"
            )
        if hidden_size % 4:
            raise ValueError(f"model.hidden_size={hidden_size} is not a multiple of 4, as position codes need")
        self.gradient_checkpointing = False
        self.patch_size = patch_size
        self.grid_size = (height // patch_size, width // patch_size)
        self.out_channels = in_channels * 2 if learn_sigma else in_channels
        attention_config = parse_attention(attention or {"name": "mhsa"})

        self.x_embedder = PatchEmbed(in_channels, hidden_size, patch_size)
        self.t_embedder = TimestepEmbedder(hidden_size, timestep_frequency_shift)
        self.y_embedder = LabelEmbedder(num_classes, has_null_label, hidden_size)
        self.pos_embed = nn.Parameter(position_table(hidden_size, self.grid_size), requires_grad=False)
        self.blocks = nn.ModuleList(
            TransformerBlock(hidden_size, num_heads, mlp_ratio, attention_config, self.grid_size, index, mlp_norm_eps)
            for index in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self._initialise()

    def _initialise(self) -> None:
        """DiT's init: Xavier linears, normal embeddings, zero modulation and output, so a fresh model returns 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for weight in (layer.weight for layer in self.t_embedder.mlp if isinstance(layer, nn.Linear)):
            nn.init.normal_(weight, std=0.02)
        patch_weight, patch_bias = self.x_embedder.proj.parameters()
        nn.init.xavier_uniform_(patch_weight.flatten(1))
        nn.init.zeros_(patch_bias)
        zeroed = [m.adaLN_modulation for m in self.modules() if isinstance(m, TransformerBlock | FinalLayer)]
        for parameter in nn.ModuleList([*zeroed, self.final_layer.linear]).parameters():
            nn.init.zeros_(parameter)

    @property
    def null_label(self) -> int:
        """The label that means "no class"; a `ValueError` for a model that has none."""
        if not self.config.has_null_label:
            raise ValueError(
                "this model was trained without label dropout and has no null label, so it cannot be guided; "
                "use guidance.scale=1"
            )
        return self.config.num_classes

    def compile_blocks(self) -> None:
        """Has torch.compile make one graph that all blocks share; in place, so no name of a weight changes."""
        self.compile_repeated_blocks(options=COMPILE_OPTIONS)

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Predicts from noised latents.

        Args:
            latents: (B, C_in, H, W) of the size given at construction.
            timesteps: (B,), int64 0..999 for diffusion, float in [0, 1] for flow.
            labels: (B,) int64, 0..K-1, or K where there is a null label.

        Returns:
            (B, C_out, H, W): the prediction, then variance channels where `learn_sigma`.

        Raises:
            ValueError: latents of another shape than the model was built for.
        """
        expected = (self.config.in_channels, *self.config.latent_size)
        if tuple(latents.shape[1:]) != expected:
            raise ValueError(
                f"latents are {tuple(latents.shape[1:])}, but this model was built for {expected} (C, H, W)"
            )
        x = self.x_embedder(latents) + self.pos_embed  # (B, N, C)
        condition = F.silu(self.t_embedder(timesteps) + self.y_embedder(labels))  # (B, C)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x = self._gradient_checkpointing_func(block, x, condition)
            else:
                x = block(x, condition)
        return self._unpatchify(self.final_layer(x, condition))

    def _unpatchify(self, patches: torch.Tensor) -> torch.Tensor:
        """(B, N, p * p * C_out), channel fastest, to (B, C_out, H, W)."""
        p, (rows, columns) = self.patch_size, self.grid_size
        x = patches.unflatten(-1, (p, p, self.out_channels)).unflatten(1, (rows, columns))
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.out_channels, rows * p, columns * p)
