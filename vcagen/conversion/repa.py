"""REPA's SiT (arXiv 2410.06940): time runs from data to noise, and there are projectors that only training needs."""

import math

import torch

from vcagen.conversion.shapes import FINAL_WEIGHT, TIME_WEIGHT
from vcagen.conversion.source import Tensors

PROJECTORS = "projectors."
FINAL_BIAS = "final_layer.linear.bias"


def is_repa(tensors: Tensors) -> bool:
    """Whether the tensors have REPA's projectors."""
    return any(name.startswith(PROJECTORS) for name in tensors)


def drop_projectors(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """The tensors of the model itself, and the names of those that were dropped."""
    dropped = [name for name in tensors if name.startswith(PROJECTORS)]
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


def reverse_time(tensors: Tensors) -> Tensors:
    """Weights whose model at (x, t) returns minus what the given ones return at (x, 1 - t).

    That is the map between the two directions of time: v_SiT(x, t) = -v_REPA(x, 1 - t). The minus goes into the last
    linear layer. The time goes into the first layer of the timestep MLP, because cos f (1 - t) and sin f (1 - t) are
    linear in cos f t and sin f t:
        cos f(1-t) = cos f cos ft + sin f sin ft,  sin f(1-t) = sin f cos ft - cos f sin ft.
    Applying it twice gives the weights back, to rounding.
    """
    weight = tensors[TIME_WEIGHT]
    half = weight.shape[1] // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float64) / half)
    cos, sin = frequencies.cos(), frequencies.sin()
    of_cos, of_sin = weight.double().split(half, dim=1)  # columns that meet cos f(1-t) and sin f(1-t)
    reversed_weight = torch.cat([of_cos * cos + of_sin * sin, of_cos * sin - of_sin * cos], dim=1)
    return tensors | {
        TIME_WEIGHT: reversed_weight.to(weight.dtype),
        FINAL_WEIGHT: -tensors[FINAL_WEIGHT],
        FINAL_BIAS: -tensors[FINAL_BIAS],
    }
