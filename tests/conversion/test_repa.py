from pathlib import Path

import pytest
import torch

from tests.conftest import relative_error, tiny_model
from tests.conversion.helpers import file_of, read, tiny_weights
from vcagen.conversion.export import write_pipeline
from vcagen.conversion.repa import reverse_time
from vcagen.objectives import FlowConfig
from vcagen.pipeline_folder import load_transformer


def repa_weights() -> dict[str, torch.Tensor]:
    projectors = {f"projectors.0.{i}.{kind}": torch.randn(8, 8) for i in (0, 2, 4) for kind in ("weight", "bias")}
    return tiny_weights(learn_sigma=False) | projectors


@pytest.mark.parametrize("time", [0.0, 0.04, 0.37, 0.5, 0.999, 1.0])
def test_reversed_weights_return_minus_the_model_at_one_minus_t(time: float) -> None:
    model = tiny_model(learn_sigma=False)
    other = tiny_model(learn_sigma=False)
    other.load_state_dict(reverse_time(dict(model.state_dict())))
    x, labels = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 10])
    with torch.no_grad():
        expected = -model(x, torch.full((3,), 1 - time), labels)
        assert relative_error(other(x, torch.full((3,), time), labels), expected) < 1e-5
        assert relative_error(model(x, torch.full((3,), time), labels), -expected) > 1e-3 or time == 0.5


def test_reversing_twice_gives_the_weights_back() -> None:
    weights = tiny_weights(learn_sigma=False)
    twice = reverse_time(reverse_time(weights))
    assert all(torch.allclose(twice[name], weights[name], atol=1e-6) for name in weights)


def test_a_repa_checkpoint_becomes_a_sit(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, repa_weights(), "checkpoint.safetensors"))
    assert model.config.objective == FlowConfig()
    assert any("6 tensors of REPA's projectors dropped" in note for note in model.notes)
    assert any("REPA's direction of time" in note for note in model.notes)
    write_pipeline(model, tmp_path / "model", "checkpoint")
    original = tiny_model(learn_sigma=False)
    x, t, labels = torch.randn(2, 4, 8, 8), torch.tensor([0.1, 0.7]), torch.tensor([1, 2])
    with torch.no_grad():
        converted = load_transformer(tmp_path / "model")(x, t, labels)
        assert relative_error(converted, -original(x, 1 - t, labels)) < 1e-5
