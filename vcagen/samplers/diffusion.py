"""Diffusion samplers through diffusers' schedulers; DDPM and DDIM equal DiT's own sampling loops.

DDPM and DDIM run on the respaced process: its N betas are those whose products are the alphas_cumprod of the N
timesteps kept, and the model sees the timesteps themselves. This is exact for any spacing, where a scheduler that
is given the 1000 betas and a spacing assumes equal strides.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler
from pydantic import BaseModel, Field, model_validator

from vcagen.callables import ModelFn
from vcagen.noise_schedule import BETA_END, BETA_START, NUM_TRAIN_TIMESTEPS, betas
from vcagen.samplers.checks import Trajectory

Steps = Annotated[int, Field(ge=2, le=NUM_TRAIN_TIMESTEPS)]
SolverSteps = Annotated[int, Field(ge=2, lt=NUM_TRAIN_TIMESTEPS)]  # at 1000 a timestep would come twice


class DDPMConfig(BaseModel, extra="forbid", frozen=True):
    """Ancestral sampling (arXiv 2006.11239), learned variance, respaced as DiT does: 0 and 999 are included."""

    name: Literal["ddpm"] = "ddpm"
    num_steps: Steps = 250


class DDIMConfig(BaseModel, extra="forbid", frozen=True):
    """DDIM (arXiv 2010.02502) with eta 0.

    Attributes:
        num_steps: model calls.
        spacing: `leading`, every (1000 / N)-th timestep from 0, DiT's `ddimN`; `linspace`, evenly with 0 and 999,
            DiT's plain `N`.
    """

    name: Literal["ddim"] = "ddim"
    num_steps: Steps = 50
    spacing: Literal["leading", "linspace"] = "leading"

    @model_validator(mode="after")
    def _divides_the_timesteps(self) -> "DDIMConfig":
        # Otherwise the last, noisiest timesteps would be left out, and sampling would start too late.
        if self.spacing == "leading" and NUM_TRAIN_TIMESTEPS % self.num_steps:
            raise ValueError(
                f"num_steps={self.num_steps} does not divide 1000, as leading spacing needs; use 20, 25, 40, 50, "
                "100, 200 or 250, or spacing=linspace"
            )
        return self


class DPMSolverConfig(BaseModel, extra="forbid", frozen=True):
    """DPM-Solver++ (arXiv 2211.01095), second order, multistep; `num_steps` model calls."""

    name: Literal["dpm_solver"] = "dpm_solver"
    num_steps: SolverSteps = 20


class UniPCConfig(BaseModel, extra="forbid", frozen=True):
    """UniPC (arXiv 2302.04867), second order; `num_steps` model calls."""

    name: Literal["unipc"] = "unipc"
    num_steps: SolverSteps = 20


DiffusionSamplerConfig = DDPMConfig | DDIMConfig | DPMSolverConfig | UniPCConfig


def build_scheduler(config: DiffusionSamplerConfig) -> tuple[Any, list[int]]:
    """A scheduler ready to step, and the timestep (0..999) that the model sees at each of its steps, noisiest first."""
    if isinstance(config, DPMSolverConfig | UniPCConfig):
        solver = DPMSolverMultistepScheduler if config.name == "dpm_solver" else UniPCMultistepScheduler
        scheduler = solver(
            num_train_timesteps=NUM_TRAIN_TIMESTEPS,
            beta_start=BETA_START,
            beta_end=BETA_END,
            beta_schedule="linear",
            timestep_spacing="linspace",
        )
        scheduler.set_timesteps(config.num_steps)
        return scheduler, scheduler.timesteps.tolist()
    kept = _respaced_timesteps(config)
    kept_products = (1 - betas()).cumprod(0)[kept]
    previous = torch.cat([kept_products.new_ones(1), kept_products[:-1]])
    process = {
        "num_train_timesteps": len(kept),
        "trained_betas": (1 - kept_products / previous).tolist(),
        "timestep_spacing": "leading",
        "clip_sample": False,
    }
    if config.name == "ddpm":
        scheduler = DDPMScheduler(variance_type="learned_range", **process)
    else:
        scheduler = DDIMScheduler(set_alpha_to_one=True, **process)
    scheduler.set_timesteps(len(kept))
    return scheduler, kept[::-1]


def _respaced_timesteps(config: DDPMConfig | DDIMConfig) -> list[int]:
    if isinstance(config, DDIMConfig) and config.spacing == "leading":
        return list(range(0, NUM_TRAIN_TIMESTEPS, NUM_TRAIN_TIMESTEPS // config.num_steps))
    return np.linspace(0, NUM_TRAIN_TIMESTEPS - 1, config.num_steps).round().astype(int).tolist()


def sample_diffusion(
    model_fn: ModelFn,
    noise: torch.Tensor,
    generators: Sequence[torch.Generator],
    config: DiffusionSamplerConfig,
    clip_range: float | None = None,
) -> torch.Tensor:
    """Denoises `noise` (B, C, H, W); float32 throughout. DDPM draws once a step from each generator.

    Args:
        model_fn: epsilon and variance channels (B, 2C, H, W) from latents and int64 timesteps (B,).
        noise: the state at the noisiest timestep.
        generators: one per sample.
        config: which scheduler and how many steps.
        clip_range: bound on the predicted latents at each step, for data whose range is known (pixels); epsilon
            becomes the one that goes with the bounded prediction. None does not clip, as in DiT.

    Raises:
        ValueError: the state stops being finite.
    """
    scheduler, model_timesteps = build_scheduler(config)
    products = (1 - betas()).cumprod(0)
    x, trajectory = noise, Trajectory()
    for step_timestep, timestep in zip(scheduler.timesteps, model_timesteps, strict=True):
        output = model_fn(x, torch.full((len(x),), timestep, dtype=torch.int64, device=x.device))
        epsilon, variance = output[:, : x.shape[1]], output[:, x.shape[1] :]
        if clip_range is not None:
            epsilon = _bounded_epsilon(epsilon, x, products[timestep].item(), clip_range)
        if config.name == "ddpm":
            epsilon_and_variance = torch.cat([epsilon, variance], dim=1)
            x = scheduler.step(epsilon_and_variance, step_timestep, x, generator=list(generators)).prev_sample
        else:
            x = scheduler.step(epsilon, step_timestep, x).prev_sample
        trajectory.reaches(x, timestep)
    trajectory.ends()
    return x


def _bounded_epsilon(epsilon: torch.Tensor, x: torch.Tensor, alpha_cumprod: float, bound: float) -> torch.Tensor:
    """The epsilon whose predicted data lies within the bound."""
    signal, noise = alpha_cumprod**0.5, (1 - alpha_cumprod) ** 0.5
    data = ((x - noise * epsilon) / signal).clamp(-bound, bound)
    return (x - signal * data) / noise
