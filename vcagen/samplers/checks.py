from collections.abc import Callable

import torch

from vcagen.devices import read_later


def require_finite(latents: torch.Tensor, time: float) -> None:
    """A `ValueError` naming the time at which a trajectory left the finite numbers."""
    _refuse(not torch.isfinite(latents).all(), time)


class Trajectory:
    """Watches that a state stays finite, from step to step, one step behind a GPU so that it never waits for us."""

    def __init__(self) -> None:
        self._asked: Callable[[], torch.Tensor] | None = None
        self._time = 0.0

    def reaches(self, latents: torch.Tensor, time: float) -> None:
        """The state at a time; a `ValueError` if it was not finite at the one before."""
        asked = read_later(torch.isfinite(latents).all())
        self.ends()
        self._asked, self._time = asked, time

    def ends(self) -> None:
        """A `ValueError` if the state was not finite at the last time."""
        if self._asked is not None:
            _refuse(not self._asked(), self._time)


def _refuse(is_broken: bool, time: float) -> None:
    if is_broken:
        raise ValueError(
            f"sampling produced NaN or infinity at t={time:g}; the checkpoint may be broken, or the guidance "
            "scale too high for this number of steps"
        )
