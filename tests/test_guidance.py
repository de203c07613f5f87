import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from vcagen.guidance import GuidanceConfig, drop_labels, guided_model
from vcagen.models.transformer import DiffusionTransformer
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
    with pytest.raises(ValueError, match=r"guidance.scale=1.5 .*label_dropout=0"):
        guided_model(constant_model, torch.arange(5), None, GuidanceConfig(scale=1.5))


def test_label_dropout_rate_and_independence_of_the_batch() -> None:
    labels = torch.arange(10).repeat(2000)
    dropped = drop_labels(labels, 0.1, 10, [sample_generator(0, i) for i in range(20_000)])
    assert (dropped == 10).float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert torch.equal(dropped[dropped != 10], labels[dropped != 10])
    part = drop_labels(labels[500:600], 0.1, 10, [sample_generator(0, i) for i in range(500, 600)])
    assert torch.equal(part, dropped[500:600])
