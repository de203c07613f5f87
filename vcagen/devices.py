import torch


def usable_device(name: str | None) -> torch.device:
    """The device called `name`, or the GPU if there is one; a `ValueError` if tensors cannot be kept there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device
