"""Images <-> moments <-> latents: the only place that knows pixel range, scale and shift."""

from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel


class IdentityConfig(BaseModel, extra="forbid", frozen=True):
    """Pixel space: latents are images scaled to [-1, 1]."""

    name: Literal["identity"] = "identity"


class IdentityAutoencoder:
    """Latents are pixels in [-1, 1]; the moments have no spread.

    Attributes:
        latent_range: bound on a latent's absolute value, None where it is not known.
    """

    latent_range: float | None = 1.0

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of the latents of images (C, H, W)."""
        return image_shape

    def image_size(self, latent_size: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of the images that latents of (H, W) decode to."""
        height, width = latent_size
        return height, width

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (B, C, H, W) to moments (B, 2C, H, W), float32: mean, then standard deviation (here 0)."""
        mean = images.float() / 127.5 - 1
        return torch.cat([mean, torch.zeros_like(mean)], dim=1)

    def sample_latents(self, moments: torch.Tensor) -> torch.Tensor:
        """Moments (B, 2C, H, W) to latents (B, C, H, W); without spread there is nothing to draw."""
        return moments.chunk(2, dim=1)[0]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, H, W) to images uint8: clamped to the range and rounded to the nearest grey level.

        Raises:
            ValueError: a latent is not finite, which uint8 would turn black without a word.
        """
        if not torch.isfinite(latents).all():
            bad = [i for i, latent in enumerate(latents) if not torch.isfinite(latent).all()]
            raise ValueError(f"latents {bad} of the batch are not finite, so there is no picture to decode")
        return ((latents.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def to_numpy(images: torch.Tensor) -> np.ndarray:
    """Images uint8 (B, C, H, W) on any device to (B, H, W, C) arrays."""
    return images.permute(0, 2, 3, 1).cpu().numpy()
