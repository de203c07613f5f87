"""Images <-> moments <-> latents: the only place that knows pixel range, rounding, scale and shift."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from diffusers import AutoencoderKL
from pydantic import BaseModel, Field, StringConstraints
from torch import nn

from vcagen.seeds import normal

Rounding = Literal["nearest", "truncate"]
Source = Annotated[str, StringConstraints(min_length=1)]


class IdentityConfig(BaseModel, extra="forbid", frozen=True):
    """Pixel space: latents are images scaled to [-1, 1]."""

    name: Literal["identity"] = "identity"


class KLConfig(BaseModel, extra="forbid", frozen=True):
    """A diffusers `AutoencoderKL`; its own config has scale and shift.

    Attributes:
        source: hub id, or a folder that holds its config.json and weights.
    """

    name: Literal["kl"] = "kl"
    source: Source = "stabilityai/sd-vae-ft-ema"


AutoencoderConfig = Annotated[IdentityConfig | KLConfig, Field(discriminator="name")]


class DecodingConfig(BaseModel, extra="forbid", frozen=True):
    """How latents become images.

    Attributes:
        decoder: another `AutoencoderKL` (hub id or folder) to decode with, of the same latents; sd-vae-ft-ema and
            sd-vae-ft-mse differ in their decoders alone. None is the autoencoder itself.
        rounding: `nearest` grey level, halves up, as DiT and SiT; `truncate`, as ADM and REPA, is half a level darker.
    """

    decoder: Source | None = None
    rounding: Rounding = "nearest"


class IdentityAutoencoder(nn.Module):
    """Latents are pixels in [-1, 1]; the moments have no spread.

    Attributes:
        latent_range: bound on a latent's absolute value, None where it is not known.
    """

    latent_range: float | None = 1.0
    scale, shift = 1.0, 0.0

    def __init__(self, rounding: Rounding = "nearest") -> None:
        super().__init__()
        self.rounding: Rounding = rounding

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of the latents of images (C, H, W)."""
        return image_shape

    def image_size(self, latent_size: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of the images that latents of (H, W) decode to."""
        height, width = latent_size
        return height, width

    def encoder_sha256(self) -> str:
        """What identifies the encoder: there are no weights."""
        return hashlib.sha256(b"identity").hexdigest()

    decoder_sha256 = encoder_sha256

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (B, C, H, W) to moments (B, 2C, H, W), float32: mean, then standard deviation (here 0)."""
        mean = _to_range(images)
        return torch.cat([mean, torch.zeros_like(mean)], dim=1)

    def sample_latents(self, moments: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Moments (B, 2C, H, W) to latents (B, C, H, W); without spread nothing is drawn."""
        return moments.chunk(2, dim=1)[0]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, H, W) to images uint8.

        Raises:
            ValueError: a latent is not finite, which uint8 would turn black without a word.
        """
        _require_finite(latents, "latents")
        return _to_uint8(latents, self.rounding)


class KLAutoencoder(nn.Module):
    """Latents of an `AutoencoderKL`, shifted and scaled as its config says.

    Args:
        vae: encodes; its `scaling_factor` and `shift_factor` count.
        decoder: decodes.
        rounding: of decoded images.
    """

    latent_range: float | None = None

    def __init__(self, vae: AutoencoderKL, decoder: AutoencoderKL, rounding: Rounding = "nearest") -> None:
        super().__init__()
        self.vae = vae.eval().requires_grad_(False)
        self.decoder = decoder.eval().requires_grad_(False)
        self.rounding: Rounding = rounding
        self.scale, self.shift = _scale_and_shift(vae)
        self.stride = 2 ** (len(vae.config.block_out_channels) - 1)

    def latent_shape(self, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(C, H, W) of the latents of images (C, H, W).

        Raises:
            ValueError: images that this autoencoder does not take.
        """
        channels, height, width = image_shape
        if channels != self.vae.config.in_channels:
            raise ValueError(
                f"images of {channels} channels, but the autoencoder encodes {self.vae.config.in_channels}; use "
                "autoencoder.name=identity, or other data"
            )
        if height % self.stride or width % self.stride:
            raise ValueError(f"images of {height}x{width} pixels; the autoencoder needs multiples of {self.stride}")
        return self.vae.config.latent_channels, height // self.stride, width // self.stride

    def image_size(self, latent_size: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of the images that latents of (H, W) decode to."""
        height, width = latent_size
        return height * self.stride, width * self.stride

    def encoder_sha256(self) -> str:
        """Hash of the encoder's weights, which alone decide the latents; sd-vae-ft-ema and -mse share theirs."""
        return _weights_sha256(self.vae, ("encoder.", "quant_conv."))

    def decoder_sha256(self) -> str:
        """Hash of the weights that make images of latents."""
        return _weights_sha256(self.decoder, ("decoder.", "post_quant_conv."))

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Images uint8 (B, 3, H, W) to moments (B, 2C, h, w), float32: mean, then standard deviation; unscaled.

        A moment may be infinite or NaN where the autoencoder overflows; the caller knows which image that is.
        """
        posterior = self.vae.encode(_to_range(images).to(self.vae.dtype)).latent_dist
        return torch.cat([posterior.mean, posterior.std], dim=1).float()

    def sample_latents(self, moments: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Moments (B, 2C, h, w) to latents (B, C, h, w): a draw from the posterior by each generator, scaled."""
        mean, std = moments.chunk(2, dim=1)
        return (mean + std * normal(mean, generators) - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, h, w) to images uint8 (B, 3, H, W).

        Raises:
            ValueError: a latent or a decoded pixel is not finite.
        """
        _require_finite(latents, "latents")
        pixels = self.decoder.decode((latents / self.scale + self.shift).to(self.decoder.dtype)).sample
        _require_finite(pixels, "decoded images")
        return _to_uint8(pixels, self.rounding)


Autoencoder = IdentityAutoencoder | KLAutoencoder


def build_autoencoder(
    config: IdentityConfig | KLConfig, decoding: DecodingConfig, vae: AutoencoderKL | None = None
) -> Autoencoder:
    """The autoencoder of a config, on the CPU, float32.

    Args:
        config: which.
        decoding: which decoder and rounding.
        vae: the config's `AutoencoderKL` where it has been loaded already.

    Raises:
        ValueError: it cannot be loaded, or the decoder is of other latents or makes other images.
    """
    if isinstance(config, IdentityConfig):
        if decoding.decoder is not None:
            raise ValueError(
                f"decoding.decoder={decoding.decoder}: this model works on pixels and has nothing to decode; use "
                "decoding.decoder=null"
            )
        return IdentityAutoencoder(decoding.rounding)
    vae = vae if vae is not None else load_vae(config.source, "autoencoder.source")
    if decoding.decoder is None or decoding.decoder == config.source:
        _require_images_of_one_kind(f"autoencoder.source={config.source}", vae, vae)
        return KLAutoencoder(vae, vae, decoding.rounding)
    decoder = load_vae(decoding.decoder, "decoding.decoder")
    for what, first, second in [
        ("latent channels", vae.config.latent_channels, decoder.config.latent_channels),
        ("scale and shift", _scale_and_shift(vae), _scale_and_shift(decoder)),
    ]:
        if first != second:
            raise ValueError(
                f"decoding.decoder={decoding.decoder}: {what} {second}, but {first} in {config.source}; it decodes "
                "other latents"
            )
    _require_images_of_one_kind(f"decoding.decoder={decoding.decoder}", vae, decoder)
    return KLAutoencoder(vae, decoder, decoding.rounding)


def _require_images_of_one_kind(key: str, vae: AutoencoderKL, decoder: AutoencoderKL) -> None:
    channels = (vae.config.in_channels, decoder.config.out_channels)
    if channels[0] != channels[1]:
        raise ValueError(
            f"{key}: images of {channels[0]} channels are encoded, but decoded ones have {channels[1]}; must be equal"
        )


def load_vae(source: str, key: str) -> AutoencoderKL:
    """An `AutoencoderKL` from a hub id or a folder; `key` is the setting to name in the `ValueError` if it fails."""
    try:
        # The folder of a whole Stable Diffusion pipeline has it one level down.
        subfolder = "vae" if (Path(source) / "vae/config.json").is_file() else None
        stored: Any = AutoencoderKL.load_config(source, subfolder=subfolder)
        if stored.get("_class_name") not in (None, "AutoencoderKL"):
            raise ValueError(f"it holds a {stored['_class_name']}")
        vae: Any
        # Without low_cpu_mem_usage, what is missing is filled with random values, and named.
        vae, info = AutoencoderKL.from_pretrained(
            source, subfolder=subfolder, output_loading_info=True, low_cpu_mem_usage=False
        )
        wrong = [*info["missing_keys"], *info["unexpected_keys"], *info.get("mismatched_keys", [])]
        if wrong:
            raise ValueError(f"tensors missing or unknown: {', '.join(map(str, wrong[:5]))}")
        scale, _ = _scale_and_shift(vae)
        if not (math.isfinite(scale) and scale):
            raise ValueError(f"scaling_factor is {scale}")
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{key}={source}: no AutoencoderKL can be loaded from there ({reason}); give a hub id that this machine "
            "can reach, or a folder with config.json and weights"
        ) from error
    return vae


def _scale_and_shift(vae: AutoencoderKL) -> tuple[float, float]:
    return float(vae.config.scaling_factor), float(vae.config.shift_factor or 0.0)


def _to_range(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


def _to_uint8(pixels: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    levels = (pixels.float() + 1) * 127.5 + (0.5 if rounding == "nearest" else 0.0)
    return levels.clamp(0, 255).to(torch.uint8)  # cuts what is behind the point


def _require_finite(tensors: torch.Tensor, what: str) -> None:
    if not torch.isfinite(tensors).all():
        bad = [i for i, tensor in enumerate(tensors) if not torch.isfinite(tensor).all()]
        raise ValueError(f"{what} {bad} of the batch are not finite, so there is no picture to make")


def to_numpy(images: torch.Tensor) -> np.ndarray:
    """Images uint8 (B, C, H, W) on any device to (B, H, W, C) arrays."""
    return images.permute(0, 2, 3, 1).cpu().numpy()


def _weights_sha256(vae: AutoencoderKL, prefixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(vae.state_dict().items()):
        if name.startswith(prefixes):
            digest.update(f"{name} {list(tensor.shape)}".encode())
            digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
