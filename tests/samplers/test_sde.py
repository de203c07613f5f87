from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from tests.samplers.gaussian import exact_model, start_noise
from tests.samplers.test_ode import velocity_of
from vcagen import interpolants
from vcagen.guidance import GuidanceConfig, guided_model
from vcagen.interpolants import Prediction
from vcagen.models.transformer import DiffusionTransformer
from vcagen.samplers import sde
from vcagen.samplers.sde import (
    EulerMaruyamaConfig,
    SDEConfig,
    StochasticHeunConfig,
    diffusion_strength,
    sample_sde,
)

ORACLE = load_file(DATA / "interpolant_sampling.safetensors")
LOSSES_ORACLE = load_file(DATA / "interpolant_losses.safetensors")
NAMES = [name for name in ORACLE if name.startswith("sde.")]
SOLVERS: dict[str, type[EulerMaruyamaConfig] | type[StochasticHeunConfig]] = {
    "Euler": EulerMaruyamaConfig,
    "Heun": StochasticHeunConfig,
}


@pytest.mark.parametrize("name", NAMES)
def test_final_states_equal_the_official_ones(
    sit_oracle_model: DiffusionTransformer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, _, solver, form, last = name.split(".")
    noises = iter(ORACLE["sde_noises"])
    monkeypatch.setattr(sde, "normal", lambda x, generators: next(noises))
    calls = 0
    model_fn = guided_model(sit_oracle_model, ORACLE["y"], 10, GuidanceConfig())

    def counted(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return model_fn(x, t)[:, :4]

    config = SOLVERS[solver].model_validate({"num_steps": 10, "form": form, "last_step": last.lower()})
    final = sample_sde(counted, ORACLE["x_init"], [], "Linear", (0.0, 1.0), config)
    assert relative_error(final, ORACLE[name]) < 1e-4
    # Drift and score come from one call, where the official code makes two.
    assert calls == (10 if solver == "Euler" else 20) + (last != "none")


def test_oracles_are_there() -> None:
    assert len(NAMES) == 14


def test_stochastic_heun_refuses_to_end_where_the_score_is_not_finite() -> None:
    with pytest.raises(ValueError, match=r"last_step=none.*the score at t=1, where it is 0/0; use last_step=mean"):
        StochasticHeunConfig(last_step="none")


def test_stochastic_heun_has_a_smaller_error_in_the_spread_than_euler_maruyama() -> None:
    def error(config: SDEConfig) -> float:
        generators = [torch.Generator().manual_seed(1)]
        final = sample_sde(exact_model("Linear", "velocity"), start_noise(), generators, "Linear", (0.0, 1.0), config)
        return abs(final.std().item() - 0.5)

    # The same number of model calls.
    assert error(StochasticHeunConfig(num_steps=10)) < error(EulerMaruyamaConfig(num_steps=20)) / 2


@pytest.mark.parametrize("path", ["Linear", "GVP", "VP"])
def test_strengths_equal_the_official_ones(path: Any) -> None:
    t = LOSSES_ORACLE["t"]
    for name, expected in LOSSES_ORACLE.items():
        if name.startswith(f"{path}.diffusion."):
            form = name.split(".")[-1]
            strength = diffusion_strength(form, interpolants.PATHS[path](t), t, 1.0)  # type: ignore[arg-type]
            assert relative_error(strength, expected) < 1e-5, name


@pytest.mark.parametrize("solver", SOLVERS.values())
@pytest.mark.parametrize("form", ["sigma", "linear", "constant", "decreasing", "increasing-decreasing", "SBDM"])
def test_any_strength_reaches_the_gaussian(form: Any, solver: type[EulerMaruyamaConfig]) -> None:
    config = solver(num_steps=500, form=form, last_step_size=0.002)
    generators = [torch.Generator().manual_seed(1)]
    final = sample_sde(exact_model("Linear", "velocity"), start_noise(), generators, "Linear", (0.0, 1.0), config)
    assert final.mean().item() == pytest.approx(2.0, abs=0.03)
    # A factor of 2 between drift and noise would give 0.645 or 0.369, a flipped score 1.16.
    assert final.std().item() == pytest.approx(0.5, abs=0.015)


@pytest.mark.parametrize("prediction", ["velocity", "noise", "score"])
@pytest.mark.parametrize("path", ["Linear", "GVP", "VP"])
@pytest.mark.parametrize("num_steps", [2, 10, 250])
@pytest.mark.parametrize("solver", SOLVERS.values())
def test_every_prediction_stays_finite_and_reaches_the_gaussian(
    path: Any, prediction: Prediction, num_steps: int, solver: type[EulerMaruyamaConfig]
) -> None:
    interval = interpolants.time_interval(path, prediction, training=False)
    velocity_fn = velocity_of(exact_model(path, prediction), path, prediction, 20_000)
    config = solver(num_steps=num_steps)
    generators = [torch.Generator().manual_seed(1)]
    final = sample_sde(velocity_fn, start_noise(), generators, path, interval, config)
    if num_steps == 250:
        assert final.mean().item() == pytest.approx(2.0, abs=0.03)
        assert final.std().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("last_step", ["mean", "euler", "tweedie", "none"])
def test_every_last_step_reaches_the_mean(last_step: Any) -> None:
    config = EulerMaruyamaConfig(num_steps=250, last_step=last_step)
    generators = [torch.Generator().manual_seed(1)]
    final = sample_sde(exact_model("Linear", "velocity"), start_noise(), generators, "Linear", (0.0, 1.0), config)
    assert final.mean().item() == pytest.approx(2.0, abs=0.03)


def test_each_sample_has_its_own_noise() -> None:
    config = EulerMaruyamaConfig(num_steps=5)

    def run(rows: list[int]) -> torch.Tensor:
        noise = torch.zeros(len(rows), 1, 2, 2)
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return sample_sde(exact_model("Linear", "velocity"), noise, generators, "Linear", (0.0, 1.0), config)

    together = run([0, 1, 2])
    assert torch.equal(together[1:2], run([1]))
    assert not torch.equal(together[0], together[1])
