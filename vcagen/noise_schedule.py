"""DiT's diffusion schedule (arXiv 2212.09748): what the objective and the samplers must agree on."""

import torch

NUM_TRAIN_TIMESTEPS = 1000
BETA_START, BETA_END = 1e-4, 0.02  # linear in between


def betas() -> torch.Tensor:
    """Noise added at each timestep: (1000,), float64."""
    return torch.linspace(BETA_START, BETA_END, NUM_TRAIN_TIMESTEPS, dtype=torch.float64)
