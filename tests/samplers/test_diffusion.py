from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from vcagen.guidance import GuidanceConfig, guided_model
from vcagen.models.transformer import DiffusionTransformer
from vcagen.noise_schedule import BETA_END, BETA_START
from vcagen.objectives import DiffusionConfig, DiffusionObjective
from vcagen.samplers.diffusion import (
    DDIMConfig,
    DDPMConfig,
    DiffusionSamplerConfig,
    DPMSolverConfig,
    UniPCConfig,
    build_scheduler,
    sample_diffusion,
)

ORACLE = load_file(DATA / "diffusion_sampling.safetensors")


class ReplayedNoise:
    """Stands in for the generators: the official loop's noises, one per step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noises = iter(ORACLE["ddpm_noises"])
        module = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
        monkeypatch.setattr(module, lambda *_, **__: next(noises))


@pytest.mark.parametrize(("scale", "name"), [(1.0, "ddpm_final"), (4.0, "ddpm_cfg_4.0_final")])
def test_ddpm_equals_the_official_loop(
    dit_oracle_model: DiffusionTransformer, monkeypatch: pytest.MonkeyPatch, scale: float, name: str
) -> None:
    ReplayedNoise(monkeypatch)
    seen: list[int] = []
    model_fn = guided_model(dit_oracle_model, ORACLE["y"], 10, GuidanceConfig(scale=scale, channels=3))

    def watched(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append(int(t[0]))
        return model_fn(x, t)

    final = sample_diffusion(watched, ORACLE["x_T"], [], DDPMConfig(num_steps=10))
    assert relative_error(final, ORACLE[name]) < 1e-4
    assert sorted(seen) == sorted(ORACLE["timesteps_used"].tolist())


@pytest.mark.parametrize("which", ["p_mean", "p_variance", "p_log_variance", "p_pred_xstart"])
def test_one_ddpm_step_equals_the_official_one(
    dit_oracle_model: DiffusionTransformer, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    scheduler, model_timesteps = build_scheduler(DDPMConfig(num_steps=10))
    index = int(ORACLE["p_index"][0])
    noisiest_first = 10 - 1 - index
    timestep = model_timesteps[noisiest_first]
    output = dit_oracle_model(ORACLE["x_T"], torch.full((3,), timestep), ORACLE["y"])

    def step(noise: float) -> Any:
        module = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
        monkeypatch.setattr(module, lambda shape, **_: torch.full(shape, noise))
        return scheduler.step(output, scheduler.timesteps[noisiest_first], ORACLE["x_T"])

    mean = step(0.0).prev_sample
    variance = (step(1.0).prev_sample.double() - mean.double()) ** 2
    found = {
        "p_mean": mean,
        "p_variance": variance.float(),
        "p_log_variance": variance.log().float(),
        "p_pred_xstart": step(0.0).pred_original_sample,
    }[which]
    assert relative_error(found, ORACLE[which]) < 1e-4


def test_ddim_equals_the_official_loop(dit_oracle_model: DiffusionTransformer) -> None:
    model_fn = guided_model(dit_oracle_model, ORACLE["y"], 10, GuidanceConfig())
    final = sample_diffusion(model_fn, ORACLE["x_T"], [], DDIMConfig(num_steps=10, spacing="linspace"))
    assert relative_error(final, ORACLE["ddim_eta0_final"]) < 1e-4


@pytest.mark.parametrize("num_steps", [10, 20, 50, 250])
def test_leading_ddim_equals_the_scheduler_given_all_betas(num_steps: int) -> None:
    scheduler = DDIMScheduler(
        beta_start=BETA_START, beta_end=BETA_END, clip_sample=False, timestep_spacing="leading", steps_offset=0
    )
    scheduler.set_timesteps(num_steps)
    x = noise = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for timestep in scheduler.timesteps:
        epsilon = exact_model(x, timestep.expand(2))[:, :1]
        x = scheduler.step(epsilon, timestep, x).prev_sample
    assert relative_error(sample_diffusion(exact_model, noise, [], DDIMConfig(num_steps=num_steps)), x) < 1e-4


def exact_model(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The optimal epsilon, and the largest variance, for data N(2, 0.5^2)."""
    alphas_cumprod = DiffusionObjective(DiffusionConfig()).alphas_cumprod[t].reshape(-1, 1, 1, 1)
    variance = alphas_cumprod * 0.25 + 1 - alphas_cumprod
    epsilon = (1 - alphas_cumprod).sqrt() * (x - alphas_cumprod.sqrt() * 2.0) / variance
    return torch.cat([epsilon, torch.zeros_like(epsilon)], dim=1).float()


EXACT_CONFIGS = [
    DDPMConfig(num_steps=250),
    DDIMConfig(num_steps=250),
    DDIMConfig(num_steps=250, spacing="linspace"),
    DPMSolverConfig(num_steps=40),
    UniPCConfig(num_steps=40),
]


@pytest.mark.parametrize("config", EXACT_CONFIGS, ids=str)
def test_exact_model_reaches_the_gaussian(config: DiffusionSamplerConfig) -> None:
    noise = torch.randn(1, 20_000, 1, 1, generator=torch.Generator().manual_seed(0))
    final = sample_diffusion(exact_model, noise, [torch.Generator().manual_seed(1)], config)
    assert final.mean().item() == pytest.approx(2.0, abs=0.03)
    assert final.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("num_steps", [143, 300, 600, 1])
def test_ddim_refuses_steps_that_would_leave_out_the_noisiest_timesteps(num_steps: int) -> None:
    with pytest.raises(ValueError, match=r"does not divide 1000|greater than or equal to 2"):
        DDIMConfig(num_steps=num_steps)


def test_each_sample_has_its_own_noise_at_every_step() -> None:
    def run(rows: list[int]) -> torch.Tensor:
        noise = torch.zeros(len(rows), 1, 2, 2)
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return sample_diffusion(exact_model, noise, generators, DDPMConfig(num_steps=5))

    together = run([0, 1, 2])
    assert torch.equal(together[1:2], run([1]))
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("config", [c(num_steps=10) for c in (DDPMConfig, DDIMConfig, DPMSolverConfig, UniPCConfig)])
def test_clipping_bounds_what_the_model_predicts_and_is_off_by_default(config: DiffusionSamplerConfig) -> None:
    def wild(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.cat([-50 * torch.ones_like(x), torch.zeros_like(x)], dim=1)

    noise = torch.zeros(1, 1, 2, 2)
    clipped = sample_diffusion(wild, noise, [torch.Generator()], config, clip_range=1.0)
    assert clipped.abs().max() <= 1 + 1e-5
    assert sample_diffusion(wild, noise, [torch.Generator()], config).abs().max() > 1.1
