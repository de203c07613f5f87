"""The moving average of the weights."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class ExponentialMovingAverage(AveragedModel):
    """torch's average with a constant decay; the initial weights count, as in DiT.

    torch's own update looks at its counter, which would have the host wait for the GPU every time, and copies where it
    is 0.
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.requires_grad_(False)

    def update_parameters(self, model: torch.nn.Module) -> None:
        """Takes in the weights of the model; one pass over all tensors."""
        averaged, current = ([p.detach() for p in each.parameters()] for each in (self.module, model))
        assert self.multi_avg_fn is not None
        self.multi_avg_fn(averaged, current, self.n_averaged)
        self.n_averaged += 1
