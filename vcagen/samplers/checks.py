import torch


def require_finite(latents: torch.Tensor, time: float) -> None:
    """A `ValueError` naming the time at which a trajectory left the finite numbers."""
    if not torch.isfinite(latents).all():
        raise ValueError(
            f"sampling produced NaN or infinity at t={time:g}; the checkpoint may be broken, or the guidance "
            "scale too high for this number of steps"
        )
