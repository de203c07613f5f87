"""Where tensors lie, and how they get there without the host waiting for a GPU."""

from collections.abc import Callable
from typing import Literal

import torch

Dtype = Literal["fp32", "bf16"]
DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def usable_device(name: str | None) -> torch.device:
    """The device called `name`, or the GPU if there is one; a `ValueError` if tensors cannot be kept there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; from the CPU to a GPU without waiting for what the GPU is doing."""
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read_later(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Asks for a copy on the CPU as the tensor is now; what is returned waits for that copy, and for no later work."""
    if tensor.device.type != "cuda":
        copy = tensor.detach().cpu()
        return lambda: copy
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor.detach(), non_blocking=True)
    copied = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> torch.Tensor:
        copied.synchronize()
        return pinned

    return read
