"""DDPM and DDIM through diffusers' schedulers, in the settings that equal DiT's own sampling loops."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from diffusers import DDIMScheduler, DDPMScheduler
from pydantic import BaseModel, Field, field_validator

from vcagen.callables import ModelFn
from vcagen.noise_schedule import BETA_END, BETA_START, NUM_TRAIN_TIMESTEPS
from vcagen.samplers.checks import require_finite

Steps = Annotated[int, Field(ge=2, le=NUM_TRAIN_TIMESTEPS)]


class DDPMConfig(BaseModel, extra="forbid", frozen=True):
    """Ancestral sampling (arXiv 2006.11239), learned variance, respaced as DiT does: 0 and 999 are included."""

    name: Literal["ddpm"] = "ddpm"
    num_steps: Steps = 250


class DDIMConfig(BaseModel, extra="forbid", frozen=True):
    """DDIM (arXiv 2010.02502) with eta 0, on the leading spacing of DiT's `ddimN`."""

    name: Literal["ddim"] = "ddim"
    num_steps: Steps = 50

    @field_validator("num_steps")
    @classmethod
    def _divides_the_timesteps(cls, num_steps: int) -> int:
        # Otherwise the last, noisiest timesteps would be left out, and sampling would start too late.
        if NUM_TRAIN_TIMESTEPS % num_steps:
            raise ValueError("DDIM's steps must divide 1000, such as 20, 25, 40, 50, 100 or 250")
        return num_steps


def sample_diffusion(
    model_fn: ModelFn,
    noise: torch.Tensor,
    generators: Sequence[torch.Generator],
    config: DDPMConfig | DDIMConfig,
    clip_range: float | None = None,
) -> torch.Tensor:
    """Denoises `noise` (B, C, H, W); float32 throughout. DDPM draws once a step from each generator.

    Args:
        model_fn: epsilon and variance channels (B, 2C, H, W) from latents and int64 timesteps (B,).
        noise: the state at the noisiest timestep.
        generators: one per sample.
        config: which scheduler and how many steps.
        clip_range: bound on the predicted latents at each step, for data whose range is known (pixels); None
            does not clip, as in DiT.

    Raises:
        ValueError: the state stops being finite.
    """
    common = {
        "num_train_timesteps": NUM_TRAIN_TIMESTEPS,
        "beta_start": BETA_START,
        "beta_end": BETA_END,
        "beta_schedule": "linear",
        "clip_sample": clip_range is not None,
        "clip_sample_range": clip_range or 1.0,
    }
    if config.name == "ddpm":
        scheduler = DDPMScheduler(variance_type="learned_range", timestep_spacing="linspace", **common)
    else:
        scheduler = DDIMScheduler(timestep_spacing="leading", set_alpha_to_one=True, steps_offset=0, **common)
    scheduler.set_timesteps(config.num_steps)
    x = noise
    for timestep in scheduler.timesteps.tolist():
        output = model_fn(x, torch.full((len(x),), timestep, dtype=torch.int64, device=x.device))
        if config.name == "ddpm":
            x = scheduler.step(output, timestep, x, generator=list(generators)).prev_sample
        else:
            # Clipped data needs the epsilon that goes with it: left as it was, the two contradict each other.
            epsilon, clips = output[:, : x.shape[1]], clip_range is not None
            x = scheduler.step(epsilon, timestep, x, eta=0.0, use_clipped_model_output=clips).prev_sample
        require_finite(x, timestep)
    return x
