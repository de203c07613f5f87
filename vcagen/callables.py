"""How a model looks to those who call it without knowing what it is."""

from collections.abc import Callable

import torch

# (latents (B, C, H, W), timesteps (B,), labels (B,)) -> output (B, C or 2C, H, W)
Model = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# The same with labels and guidance bound: (latents (B, C, H, W), timesteps (B,)) -> output
ModelFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
