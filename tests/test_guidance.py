import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from tests.reference.repa import sample_repa
from vcagen.guidance import GuidanceConfig, drop_labels, guided_model
from vcagen.models.transformer import DiffusionTransformer
from vcagen.samplers import sde
from vcagen.samplers.sde import EulerMaruyamaConfig, sample_sde
from vcagen.seeds import sample_generator


def constant_model(latents: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Channel k is k for the null label 10 and k + label + 1 for others; the output has variance channels too."""
    channels = torch.arange(2.0 * latents.shape[1]).reshape(1, -1, 1, 1)
    shift = torch.where(labels == 10, 0, labels + 1).reshape(-1, 1, 1, 1)
    return (channels + shift).expand(-1, -1, *latents.shape[2:])


@pytest.mark.parametrize("channels", [4, 16, 32])
def test_every_latent_channel_is_guided_and_variance_stays_conditional(channels: int) -> None:
    labels = torch.arange(5)
    model_fn = guided_model(constant_model, labels, 10, GuidanceConfig(scale=3.0))
    output = model_fn(torch.zeros(5, channels, 2, 2), torch.zeros(5))
    assert output.shape == (5, 2 * channels, 2, 2)
    base = torch.arange(2.0 * channels)
    for row, label in enumerate(labels):
        assert torch.allclose(output[row, :channels, 0, 0], base[:channels] + 3 * (label + 1))
        assert torch.allclose(output[row, channels:, 0, 0], base[channels:] + (label + 1))


def test_three_channels_only_by_name() -> None:
    labels = torch.arange(2)
    output = guided_model(constant_model, labels, 10, GuidanceConfig(scale=3.0, channels=3))(
        torch.zeros(2, 4, 1, 1), torch.zeros(2)
    )
    assert torch.allclose(output[:, :3, 0, 0] - torch.arange(3.0), 3.0 * (labels + 1)[:, None])
    assert torch.allclose(output[:, 3, 0, 0] - 3, 1.0 * (labels + 1))


@pytest.mark.parametrize("family", ["dit", "sit"])
def test_guided_outputs_equal_the_official_ones(family: str, request: pytest.FixtureRequest) -> None:
    model: DiffusionTransformer = request.getfixturevalue(f"{family}_oracle_model")
    oracle = load_file(DATA / f"{family}_forward.safetensors")
    expected = oracle["forward_with_cfg_4.0"][:3]  # the conditional half
    output = guided_model(model, oracle["y"], 10, GuidanceConfig(scale=4.0, channels=3))(oracle["x"], oracle["t"])
    assert relative_error(output[:, : expected.shape[1]], expected) < 1e-5


def test_scale_one_calls_the_model_for_the_labels_alone() -> None:
    sizes = []

    def model(latents: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(latents))
        return latents

    guided_model(model, torch.arange(5), None, GuidanceConfig())(torch.zeros(5, 1, 1, 1), torch.zeros(5))
    assert sizes == [5]


def test_a_model_without_null_label_cannot_be_guided() -> None:
    with pytest.raises(ValueError, match=r"guidance.scale=1.5 needs a null label.*use guidance.scale=1"):
        guided_model(constant_model, torch.arange(5), None, GuidanceConfig(scale=1.5))


def test_label_dropout_rate_and_independence_of_the_batch() -> None:
    labels = torch.arange(10).repeat(2000)
    dropped = drop_labels(labels, 0.1, 10, [sample_generator(0, i) for i in range(20_000)])
    assert (dropped == 10).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(dropped[dropped != 10], labels[dropped != 10])
    part = drop_labels(labels[500:600], 0.1, 10, [sample_generator(0, i) for i in range(500, 600)])
    assert torch.equal(part, dropped[500:600])


@pytest.mark.parametrize(("time", "rows"), [(0.0, 2), (0.299, 2), (0.3, 4), (0.5, 4), (0.7, 4), (0.701, 2), (1.0, 2)])
def test_outside_the_interval_no_unconditional_half_is_computed(time: float, rows: int) -> None:
    sizes = []

    def model(latents: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(latents))
        return constant_model(latents, timesteps, labels)

    config = GuidanceConfig(scale=3.0, interval=(0.3, 0.7))
    output = guided_model(model, torch.arange(2), 10, config)(torch.zeros(2, 4, 1, 1), torch.full((2,), time))
    assert sizes == [rows]
    weight = 3.0 if rows == 4 else 1.0
    assert torch.allclose(output[:, 0, 0, 0], weight * torch.tensor([1.0, 2.0]))


def test_interval_works_on_diffusion_timesteps() -> None:
    model_fn = guided_model(constant_model, torch.arange(1), 10, GuidanceConfig(scale=3.0, interval=(0, 600)))
    latents = torch.zeros(1, 4, 1, 1)
    assert model_fn(latents, torch.tensor([600]))[0, 0].item() == 3
    assert model_fn(latents, torch.tensor([601]))[0, 0].item() == 1


def test_interval_must_not_be_reversed() -> None:
    with pytest.raises(ValueError, match=r"interval=\[0.7, 0.3\]: expected \[low, high\] with low <= high"):
        GuidanceConfig(scale=2.0, interval=(0.7, 0.3))


def test_interval_and_sampler_equal_repas_under_the_map_of_time(
    sit_oracle_model: DiffusionTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps, labels = 50, torch.tensor([1, 5])
    generator = torch.Generator().manual_seed(0)
    noises = torch.randn(num_steps, 2, 4, 8, 8, generator=generator)
    start = torch.randn(2, 4, 8, 8, generator=generator)

    def velocity(x: torch.Tensor, t: float, label: torch.Tensor) -> torch.Tensor:  # as REPA would have trained it
        return -sit_oracle_model(x.float(), torch.full((2,), 1 - t), label)[:, :4].double()

    expected = sample_repa(velocity, start, labels, 10, 1.8, (0.0, 0.7), num_steps, list(noises))
    stream = iter(noises)
    monkeypatch.setattr(sde, "normal", lambda x, generators: next(stream))
    model_fn = guided_model(sit_oracle_model, labels, 10, GuidanceConfig(scale=1.8, interval=(1 - 0.7, 1.0)))
    config = EulerMaruyamaConfig(num_steps=num_steps)
    final = sample_sde(lambda x, t: model_fn(x, t)[:, :4], start, [], "Linear", (0.0, 1.0), config)
    assert relative_error(final.double(), expected) < 1e-5
