import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import FlowConfig, FlowObjective

ORACLE = load_file(DATA / "interpolant_losses.safetensors")
LOSSES = [name for name in ORACLE if name.startswith("loss.")]


def test_all_losses_are_there() -> None:
    assert len(LOSSES) == 21


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_the_official_ones(sit_oracle_model: DiffusionTransformer, name: str) -> None:
    _, path, prediction, weight = name.split(".")
    config = FlowConfig.model_validate({"path": path, "prediction": prediction, "loss_weight": weight})
    output = FlowObjective(config).loss_at(sit_oracle_model, ORACLE["x1"], ORACLE["y"], ORACLE["t"], ORACLE["x0"])
    assert torch.allclose(output.loss, ORACLE[name], rtol=1e-5, atol=0)


def test_loss_weight_needs_a_prediction_that_it_weighs() -> None:
    with pytest.raises(ValueError, match="loss_weight=likelihood"):
        FlowConfig(loss_weight="likelihood")


@pytest.mark.parametrize(
    ("path", "prediction", "low", "high"),
    [("Linear", "velocity", 0, 1), ("GVP", "score", 1e-3, 1 - 1e-3), ("VP", "velocity", 0, 1 - 1e-5)],
)
def test_times_stay_where_the_formulas_are_finite(path: str, prediction: str, low: float, high: float) -> None:
    times: list[float] = []

    def model(x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        times.extend(t.tolist())
        return x

    latents = torch.zeros(5000, 1, 1, 1)
    generators = [torch.Generator().manual_seed(i) for i in range(len(latents))]
    config = FlowConfig.model_validate({"path": path, "prediction": prediction})
    loss = FlowObjective(config).loss(model, latents, torch.zeros(len(latents)), generators).loss
    assert torch.isfinite(loss).all()
    assert low <= min(times) < low + 0.01
    assert high - 0.01 < max(times) <= high
