import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from accelerate import Accelerator

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal asked the run to stop; the checkpoint is written. `exit_code` is 128 + the signal's number."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}")
        self.exit_code = 128 + signal_number


@contextlib.contextmanager
def stop_signal(accelerator: Accelerator) -> Iterator[Callable[[], int]]:
    """Within the block SIGINT and SIGTERM only leave their number; a second SIGINT ends the process at once.

    Yields:
        A function that every process calls at the same step: the number that any of them received, or 0.
    """
    received = 0

    def remember(number: int, _: FrameType | None) -> None:
        nonlocal received
        if received and number == signal.SIGINT:
            os._exit(128 + number)
        received = number

    def agreed() -> int:
        if accelerator.num_processes == 1:
            return received
        return int(accelerator.gather(torch.tensor([received], device=accelerator.device)).max())

    before = {number: signal.signal(number, remember) for number in HANDLED}
    try:
        yield agreed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
