import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from tests.samplers.gaussian import exact_model, start_noise
from vcagen import interpolants
from vcagen.callables import ModelFn
from vcagen.guidance import GuidanceConfig, guided_model
from vcagen.interpolants import Path, Prediction
from vcagen.models.transformer import DiffusionTransformer
from vcagen.samplers.ode import EulerConfig, HeunConfig, sample_ode

ORACLE = load_file(DATA / "interpolant_sampling.safetensors")
FIXED_STEP = [n for n in ORACLE if n.startswith("ode.") and n.endswith((".euler", ".heun2"))]


def velocity_of(model_fn: ModelFn, path: Path, prediction: Prediction, channels: int) -> ModelFn:
    def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = interpolants.coefficients(path, t, x)
        return interpolants.velocity_from(prediction, c, model_fn(x, t)[:, :channels], x)

    return velocity_fn


@pytest.mark.parametrize("name", FIXED_STEP)
def test_final_states_equal_the_official_ones(sit_oracle_model: DiffusionTransformer, name: str) -> None:
    _, path, prediction, method = name.split(".")
    config = EulerConfig(num_steps=10) if method == "euler" else HeunConfig(num_steps=10)
    model_fn = guided_model(sit_oracle_model, ORACLE["y"], 10, GuidanceConfig())
    interval = interpolants.time_interval(path, prediction, training=False)  # type: ignore[arg-type]
    velocity_fn = velocity_of(model_fn, path, prediction, 4)  # type: ignore[arg-type]
    assert relative_error(sample_ode(velocity_fn, ORACLE["x_init"], interval, config), ORACLE[name]) < 1e-4


def test_guided_final_state_equals_the_official_one(sit_oracle_model: DiffusionTransformer) -> None:
    guidance = GuidanceConfig(scale=1.5, channels=3)
    model_fn = guided_model(sit_oracle_model, ORACLE["y"], 10, guidance)
    velocity_fn = velocity_of(model_fn, "Linear", "velocity", 4)
    final = sample_ode(velocity_fn, ORACLE["x_init"], (0.0, 1.0), EulerConfig(num_steps=10))
    assert relative_error(final, ORACLE["ode.Linear.velocity.euler.cfg_1.5"]) < 1e-4


@pytest.mark.parametrize("prediction", ["velocity", "noise", "score"])
@pytest.mark.parametrize("path", ["Linear", "GVP", "VP"])
def test_exact_models_reach_the_gaussian(path: Path, prediction: Prediction) -> None:
    interval = interpolants.time_interval(path, prediction, training=False)
    velocity_fn = velocity_of(exact_model(path, prediction), path, prediction, 20_000)
    final = sample_ode(velocity_fn, start_noise(), interval, HeunConfig(num_steps=100))
    assert final.mean().item() == pytest.approx(2.0, abs=0.03)
    assert final.std().item() == pytest.approx(0.5, abs=0.02)


def test_heun_is_of_second_order_and_euler_of_first() -> None:
    # dx/dt = x from 1: e at t = 1.
    def error(config: EulerConfig | HeunConfig) -> float:
        return abs(sample_ode(lambda x, t: x, torch.ones(1, 1, 1, 1), (0.0, 1.0), config).item() - 2.718281828)

    assert error(EulerConfig(num_steps=10)) / error(EulerConfig(num_steps=20)) == pytest.approx(2, rel=0.1)
    assert error(HeunConfig(num_steps=10)) / error(HeunConfig(num_steps=20)) == pytest.approx(4, rel=0.1)


def test_nan_stops_with_the_time() -> None:
    def model_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if t[0] > 0.45 else x

    with pytest.raises(ValueError, match=r"t=0\.6"):
        sample_ode(model_fn, torch.ones(1, 1, 1, 1), (0.0, 1.0), EulerConfig(num_steps=10))
