import torch
from torch import nn


class ValueConv(nn.Conv2d):
    """Depth-wise 3x3 convolution (padding 1, bias) of the values on their token grid.

    The authors' released VCA adds it to the attention output before the output projection. The other backends
    offer it too, because without that control a convolution's gain could be taken for the attention's.
    """

    def __init__(self, hidden_size: int, grid_size: tuple[int, int]) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size=3, padding=1, groups=hidden_size)
        self.grid_size = grid_size

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps values (B, N, C) to (B, N, C)."""
        # A channels-last view: no copy of the tokens into (B, C, H, W) order.
        image = values.unflatten(1, self.grid_size).permute(0, 3, 1, 2)
        return super().forward(image).flatten(2).transpose(1, 2)
