import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import DiffusionConfig, DiffusionObjective
from vcagen.seeds import sample_generator


def test_losses_equal_the_official_ones(dit_oracle_model: DiffusionTransformer) -> None:
    oracle = load_file(DATA / "diffusion_losses.safetensors")
    objective = DiffusionObjective(DiffusionConfig())
    assert relative_error(objective.add_noise(oracle["x_start"], oracle["noise"], oracle["t"]), oracle["x_t"]) < 1e-6
    output = objective.loss_at(dit_oracle_model, oracle["x_start"], oracle["y"], oracle["t"], oracle["noise"])
    for name, values in {"loss": output.loss, **output.parts}.items():
        assert torch.allclose(values, oracle[name], rtol=1e-5, atol=0), name
    assert oracle["t"].tolist() == [0, 1, 500]  # the decoder likelihood, the clipped variance and the usual case


def test_schedule_is_that_of_the_library() -> None:
    ours = DiffusionObjective(DiffusionConfig()).alphas_cumprod
    library = DDPMScheduler(beta_start=1e-4, beta_end=0.02, beta_schedule="linear").alphas_cumprod
    assert relative_error(ours.float(), library) < 1e-6
    assert relative_error(ours, load_file(DATA / "diffusion_losses.safetensors")["alphas_cumprod"]) < 1e-12


def test_bound_does_not_train_epsilon() -> None:
    output = torch.zeros(2, 8, 4, 4, requires_grad=True)
    objective = DiffusionObjective(DiffusionConfig())
    latents, timesteps = torch.randn(2, 4, 4, 4), torch.tensor([0, 700])
    parts = objective.loss_at(lambda *_: output, latents, timesteps, timesteps, torch.randn(2, 4, 4, 4)).parts
    parts["vb"].sum().backward()
    assert output.grad is not None
    assert output.grad[:, :4].abs().max() == 0
    assert output.grad[:, 4:].abs().max() > 0


def test_each_sample_draws_from_its_own_generator() -> None:
    objective = DiffusionObjective(DiffusionConfig())
    latents, labels = torch.randn(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64)
    seen = []

    def model(x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.extend(t.tolist())
        return torch.cat([x, x], dim=1)

    together = objective.loss(model, latents, labels, [sample_generator(5, i) for i in range(3)]).loss
    alone = [
        objective.loss(model, latents[i : i + 1], labels[i : i + 1], [sample_generator(5, i)]).loss for i in range(3)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]


def test_timesteps_are_uniform_over_all_thousand() -> None:
    seen: list[int] = []

    def model(x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.extend(t.tolist())
        return torch.cat([x, x], dim=1)

    latents = torch.zeros(20_000, 1, 1, 1)
    generators = [torch.Generator().manual_seed(i) for i in range(len(latents))]
    DiffusionObjective(DiffusionConfig()).loss(model, latents, torch.zeros(len(latents)), generators)
    assert min(seen) == 0
    assert max(seen) == 999
    assert abs(sum(seen) / len(seen) - 499.5) < 10
