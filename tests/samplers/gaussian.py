"""The exact model for one-dimensional data N(2, 0.5^2), in closed form."""

import torch

from vcagen.callables import ModelFn
from vcagen.interpolants import Path, Prediction, coefficients

MEAN, STD = 2.0, 0.5
NUM = 20_000


def exact_model(path: Path, prediction: Prediction) -> ModelFn:
    """What a perfectly trained model on a Gaussian returns."""

    def model_fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        c = coefficients(path, t.double(), x.double())
        centred = x - c.alpha * MEAN
        variance = (c.alpha * STD) ** 2 + c.sigma**2
        noise = c.sigma * centred / variance  # E[x_0 | x_t]
        data = MEAN + c.alpha * STD**2 * centred / variance  # E[x_1 | x_t]
        if prediction == "velocity":
            return (c.d_alpha * data + c.d_sigma * noise).float()
        return (noise if prediction == "noise" else -centred / variance).float()

    return model_fn


def start_noise() -> torch.Tensor:
    return torch.randn(1, NUM, 1, 1, generator=torch.Generator().manual_seed(0))
