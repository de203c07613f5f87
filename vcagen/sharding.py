"""Weights that are split over the processes (FSDP2), brought together and split again.

Bringing together is the work of all processes: each calls these functions in the same order. Where nothing is split
they return what they are given.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from vcagen.models.transformer import DiffusionTransformer


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether a process holds only a part of each weight."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: dict[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """The whole of each tensor, on the CPU if it was split; processes that do not keep them get none of those."""
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # one after the other: no process needs room for all
            if keep:
                found[name] = tensor.cpu()
        else:
            found[name] = tensor
    return found


def whole_model(model: DiffusionTransformer, keep: bool) -> DiffusionTransformer:
    """A copy on the CPU of a model that is split, for processes that keep it; the model itself for the others."""
    tensors = whole_tensors(model.state_dict(), keep)
    if not keep or not is_sharded(model):
        return model
    with torch.device("meta"):
        copy = DiffusionTransformer(**{k: v for k, v in model.config.items() if not k.startswith("_")})
    copy.load_state_dict(tensors, assign=True)
    return copy


def split_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this process holds of another."""
    return distribute_tensor(tensor, other.device_mesh, other.placements) if isinstance(other, DTensor) else tensor


def split_model_like(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Splits the weights of a model as those of another of the same names; it can no longer be called."""
    for name, parameter in other.named_parameters():
        module, _, key = name.rpartition(".")
        ours = model.get_parameter(name)
        split = split_like(ours.detach(), parameter)
        setattr(model.get_submodule(module), key, torch.nn.Parameter(split, ours.requires_grad))
