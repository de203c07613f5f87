"""Stochastic interpolants x_t = alpha_t x_1 + sigma_t x_0 (SiT, arXiv 2401.08740).

Time runs from noise (t = 0) to data (t = 1). x_1 is data, x_0 is standard normal noise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Path = Literal["Linear", "GVP", "VP"]
Prediction = Literal["velocity", "noise", "score"]

VP_BETA_MIN, VP_BETA_MAX = 0.1, 20.0


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of a path at times t, each of t's shape.

    Attributes:
        alpha: weight of data. sigma: weight of noise.
        d_alpha, d_sigma: their derivatives in t.
        alpha_ratio: d_alpha / alpha (infinite where alpha is 0).
        drift_variance: sigma^2 d_alpha / alpha - sigma d_sigma, the weight of the score in the velocity:
            v = alpha_ratio x + drift_variance score.
    """

    alpha: torch.Tensor
    sigma: torch.Tensor
    d_alpha: torch.Tensor
    d_sigma: torch.Tensor
    alpha_ratio: torch.Tensor
    drift_variance: torch.Tensor


def _linear(t: torch.Tensor) -> Coefficients:
    return Coefficients(t, 1 - t, torch.ones_like(t), -torch.ones_like(t), 1 / t, (1 - t) / t)


def _gvp(t: torch.Tensor) -> Coefficients:
    angle = t * (math.pi / 2)
    sin, cos = angle.sin(), angle.cos()
    half_pi_cot = (math.pi / 2) * cos / sin
    return Coefficients(
        sin, cos, (math.pi / 2) * cos, -(math.pi / 2) * sin, half_pi_cot, half_pi_cot * (sin**2 + cos**2)
    )


def _vp(t: torch.Tensor) -> Coefficients:
    beta = VP_BETA_MIN + (1 - t) * (VP_BETA_MAX - VP_BETA_MIN)  # in reversed time 1 - t
    log_alpha = -0.25 * (1 - t) ** 2 * (VP_BETA_MAX - VP_BETA_MIN) - 0.5 * (1 - t) * VP_BETA_MIN
    alpha = log_alpha.exp()
    sigma = (-torch.expm1(2 * log_alpha)).sqrt()
    return Coefficients(alpha, sigma, alpha * beta / 2, -(alpha**2) * beta / (2 * sigma), beta / 2, beta / 2)


PATHS: dict[Path, Callable[[torch.Tensor], Coefficients]] = {"Linear": _linear, "GVP": _gvp, "VP": _vp}


def coefficients(path: Path, t: torch.Tensor, like: torch.Tensor) -> Coefficients:
    """Coefficients at times t (B,), shaped (B, 1, ..., 1) to broadcast against `like` (B, ...)."""
    return PATHS[path](t.reshape(-1, *[1] * (like.dim() - 1)))


def time_interval(path: Path, prediction: Prediction, training: bool) -> tuple[float, float]:
    """(first, last) time at which the model is used; the ends where a formula divides by zero are left out.

    As in SiT: the whole of [0, 1] for velocity on Linear and GVP, 1e-3 off both ends for noise and score there,
    and for VP 1e-5 (training) or 1e-3 (sampling) off the data end.
    """
    if path == "VP":
        return 0.0, 1.0 - (1e-5 if training else 1e-3)
    if prediction == "velocity":
        return 0.0, 1.0
    return 1e-3, 1.0 - 1e-3


def score_from_velocity(c: Coefficients, velocity: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Score at x; finite at t = 0, where it is -x, and not at t = 1, where sigma is 0."""
    ratio = c.alpha / c.d_alpha
    return (ratio * velocity - x) / (c.sigma**2 - ratio * c.d_sigma * c.sigma)


def velocity_from(prediction: Prediction, c: Coefficients, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Velocity (noise to data) from what a model trained on `prediction` returns at x."""
    if prediction == "velocity":
        return output
    if prediction == "noise":
        return c.alpha_ratio * x + (c.d_sigma - c.alpha_ratio * c.sigma) * output
    return c.alpha_ratio * x + c.drift_variance * output
