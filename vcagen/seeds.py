"""All randomness: one CPU generator per sample, keyed by what the sample is, never by who draws it.

Noise, timesteps, label drops and mirrors then do not depend on batch size, process count or worker count, and a
resumed run has no generator state to restore.
"""

import hashlib
from collections.abc import Sequence

import torch
from diffusers.utils.torch_utils import randn_tensor

from vcagen.devices import to_device


def seed_from(*key: int | str) -> int:
    """A 63-bit seed from a key such as `(run_seed, "train", step, position)`."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_generator(*key: int | str) -> torch.Generator:
    """A CPU generator of its own for the sample that `key` names."""
    return torch.Generator().manual_seed(seed_from(*key))


def normal(like: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Standard normal noise, float32, of the shape (B, ...) and on the device of `like`; row i from `generators[i]`."""
    assert len(generators) == len(like)
    drawn_on = generators[0].device
    noise = randn_tensor(like.shape, generator=list(generators), device=drawn_on, dtype=torch.float32)
    return to_device(noise, like.device)


def standard_normal(generators: Sequence[torch.Generator], device: torch.device) -> torch.Tensor:
    """One standard normal number per generator: (B,) float32."""
    return to_device(torch.cat([torch.randn(1, generator=generator) for generator in generators]), device)


def uniform(generators: Sequence[torch.Generator], device: torch.device) -> torch.Tensor:
    """One uniform number in [0, 1) per generator: (B,) float32."""
    return to_device(torch.cat([torch.rand(1, generator=generator) for generator in generators]), device)
