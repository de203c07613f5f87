import math

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
from vcagen.samplers.ode import Dopri5Config, EulerConfig, HeunConfig, ODEConfig, sample_ode

ORACLE = load_file(DATA / "interpolant_sampling.safetensors")
NAMES = [name for name in ORACLE if name.startswith("ode.") and "cfg" not in name]
CONFIGS: dict[str, ODEConfig] = {
    "euler": EulerConfig(num_steps=10),
    "heun2": HeunConfig(num_steps=10),
    "dopri5": Dopri5Config(),
}


def velocity_of(model_fn: ModelFn, path: Path, prediction: Prediction, channels: int) -> ModelFn:
    def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = interpolants.coefficients(path, t, x)
        return interpolants.velocity_from(prediction, c, model_fn(x, t)[:, :channels], x)

    return velocity_fn


@pytest.mark.parametrize("name", NAMES)
def test_final_states_equal_the_official_ones(sit_oracle_model: DiffusionTransformer, name: str) -> None:
    _, path, prediction, method = name.split(".")
    model_fn = guided_model(sit_oracle_model, ORACLE["y"], 10, GuidanceConfig())
    interval = interpolants.time_interval(path, prediction, training=False)  # type: ignore[arg-type]
    velocity_fn = velocity_of(model_fn, path, prediction, 4)  # type: ignore[arg-type]
    assert relative_error(sample_ode(velocity_fn, ORACLE["x_init"], interval, CONFIGS[method]), ORACLE[name]) < 1e-4


def test_oracles_are_there() -> None:
    assert len(NAMES) == 11


def test_guided_final_state_equals_the_official_one(sit_oracle_model: DiffusionTransformer) -> None:
    guidance = GuidanceConfig(scale=1.5, channels=3)
    model_fn = guided_model(sit_oracle_model, ORACLE["y"], 10, guidance)
    velocity_fn = velocity_of(model_fn, "Linear", "velocity", 4)
    final = sample_ode(velocity_fn, ORACLE["x_init"], (0.0, 1.0), EulerConfig(num_steps=10))
    assert relative_error(final, ORACLE["ode.Linear.velocity.euler.cfg_1.5"]) < 1e-4


@pytest.mark.parametrize("config", [HeunConfig(num_steps=100), Dopri5Config()], ids=lambda config: config.name)
@pytest.mark.parametrize("prediction", ["velocity", "noise", "score"])
@pytest.mark.parametrize("path", ["Linear", "GVP", "VP"])
def test_exact_models_reach_the_gaussian(path: Path, prediction: Prediction, config: ODEConfig) -> None:
    interval = interpolants.time_interval(path, prediction, training=False)
    velocity_fn = velocity_of(exact_model(path, prediction), path, prediction, 20_000)
    final = sample_ode(velocity_fn, start_noise(), interval, config)
    assert final.mean().item() == pytest.approx(2.0, abs=0.03)
    assert final.std().item() == pytest.approx(0.5, abs=0.02)


def test_heun_is_of_second_order_and_euler_of_first() -> None:
    # dx/dt = x from 1: e at t = 1.
    def error(config: EulerConfig | HeunConfig) -> float:
        return abs(sample_ode(lambda x, t: x, torch.ones(1, 1, 1, 1), (0.0, 1.0), config).item() - 2.718281828)

    assert error(EulerConfig(num_steps=10)) / error(EulerConfig(num_steps=20)) == pytest.approx(2, rel=0.1)
    assert error(HeunConfig(num_steps=10)) / error(HeunConfig(num_steps=20)) == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize(("broken_from", "noticed_at"), [(0.45, "0.6"), (0.85, "1;")])
def test_nan_stops_with_the_time(broken_from: float, noticed_at: str) -> None:
    def model_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if t[0] > broken_from else x

    with pytest.raises(ValueError, match=f"t={noticed_at}"):
        sample_ode(model_fn, torch.ones(1, 1, 1, 1), (0.0, 1.0), EulerConfig(num_steps=10))


def test_dopri5_asks_nothing_beyond_an_interval_that_ends_before_one() -> None:
    times: list[float] = []

    def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        times.append(t[0].item())
        return x * (1 - t.view(-1, 1, 1, 1)).sqrt()

    sample_ode(velocity_fn, torch.ones(2, 1, 1, 1), (0.0, 1 - 1e-3), Dopri5Config())
    assert max(times) == pytest.approx(1 - 1e-3)


def test_dopri5_error_follows_its_tolerance_and_costs_calls() -> None:
    calls = 0

    def velocity_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * torch.cos(20 * t).view(-1, 1, 1, 1)

    exact = torch.tensor(math.exp(math.sin(20) / 20))
    found = []
    for rtol in (1e-2, 1e-6):
        calls = 0
        final = sample_ode(velocity_fn, torch.ones(1, 1, 1, 1), (0.0, 1.0), Dopri5Config(rtol=rtol, atol=rtol))
        found.append((abs(final.item() - exact.item()), calls))
    assert found[1][0] < 1e-5 < found[0][0] / 100
    assert found[1][1] > found[0][1]


def test_dopri5_says_where_it_found_nan_and_that_no_step_is_small_enough() -> None:
    def nan_later(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x * float("nan") if t[0] > 0.5 else x

    with pytest.raises(ValueError, match=r"NaN or infinity at t=0\.\d"):
        sample_ode(nan_later, torch.ones(1, 1, 1, 1), (0.0, 1.0), Dopri5Config())

    def explodes(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x**2  # infinite at t = 0.5, from 2

    with pytest.raises(ValueError, match=r"dopri5 found no step small enough|NaN or infinity"):
        sample_ode(explodes, 2 * torch.ones(1, 1, 1, 1), (0.0, 1.0), Dopri5Config())
