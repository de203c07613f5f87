import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error
from vcagen.interpolants import PATHS, Path, coefficients, score_from_velocity, velocity_from
from vcagen.models.transformer import DiffusionTransformer

ORACLE = load_file(DATA / "interpolant_losses.safetensors")


@pytest.mark.parametrize("path", PATHS)
def test_path_equals_the_official_one(sit_oracle_model: DiffusionTransformer, path: Path) -> None:
    x1, x0, t = ORACLE["x1"], ORACLE["x0"], ORACLE["t"]
    c = coefficients(path, t, x1)
    assert relative_error(c.alpha.flatten(), ORACLE[f"{path}.alpha"]) < 1e-6
    assert relative_error(c.sigma.flatten(), ORACLE[f"{path}.sigma"]) < 1e-6
    assert relative_error(c.alpha * x1 + c.sigma * x0, ORACLE[f"{path}.xt"]) < 1e-6
    assert relative_error(c.d_alpha * x1 + c.d_sigma * x0, ORACLE[f"{path}.ut"]) < 1e-6
    velocity = sit_oracle_model(x1, t, ORACLE["y"])[:, :4]
    assert relative_error(score_from_velocity(c, velocity, x1), ORACLE[f"{path}.score_from_velocity"]) < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_derivatives_and_ratios_follow_from_alpha_and_sigma(path: Path) -> None:
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64, requires_grad=True)
    c = PATHS[path](t)
    (d_alpha,) = torch.autograd.grad(c.alpha.sum(), t, retain_graph=True)
    (d_sigma,) = torch.autograd.grad(c.sigma.sum(), t, retain_graph=True)
    assert torch.allclose(c.d_alpha, d_alpha, rtol=1e-10)
    assert torch.allclose(c.d_sigma, d_sigma, rtol=1e-10)
    assert torch.allclose(c.alpha_ratio, d_alpha / c.alpha, rtol=1e-10)
    assert torch.allclose(c.drift_variance, c.sigma**2 * d_alpha / c.alpha - c.sigma * d_sigma, rtol=1e-9)


@pytest.mark.parametrize("path", PATHS)
def test_velocity_noise_and_score_convert_round(path: Path) -> None:
    x = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    velocity = torch.randn_like(x)
    c = coefficients(path, torch.linspace(0.1, 0.9, 6, dtype=torch.float64), x)
    score = score_from_velocity(c, velocity, x)
    noise = -c.sigma * score
    assert torch.allclose(velocity_from("score", c, score, x), velocity, rtol=1e-8, atol=1e-10)
    assert torch.allclose(velocity_from("noise", c, noise, x), velocity, rtol=1e-8, atol=1e-10)
    assert velocity_from("velocity", c, velocity, x) is velocity


@pytest.mark.parametrize("path", ["Linear", "GVP"])
def test_score_is_minus_x_at_the_noise_end(path: Path) -> None:
    x = torch.randn(3, 2, 2, 2)
    score = score_from_velocity(coefficients(path, torch.zeros(3), x), torch.randn_like(x), x)
    assert torch.allclose(score, -x, atol=1e-6)
