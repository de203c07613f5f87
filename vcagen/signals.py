import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from accelerate import Accelerator

from vcagen.devices import read_later, to_device

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is how schedulers announce a pre-emption


class Interrupted(Exception):
    """A signal asked the run to stop. `exit_code` is 128 + the signal's number."""

    def __init__(self, signal_number: int, step: int, what_is_kept: str) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} after step {step}; {what_is_kept}")
        self.exit_code = 128 + signal_number


def leave_signals_to_the_main_process(_: int) -> None:
    """For data workers: a Ctrl-C reaches the whole process group, and without them there is no last step."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class StopSignal:
    """The number of the signal that came, 0 if none did."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.number = 0
        self._asked: Callable[[], torch.Tensor] | None = None

    def remember(self, number: int, _: FrameType | None) -> None:
        """The signal handler. A SIGINT after either signal ends the process at once."""
        if self.number and number == signal.SIGINT:
            os._exit(128 + number)
        self.number = number

    def agreed(self) -> int:
        """The number that any process received; every process calls this at the same step.

        On GPUs it is what they had received one call before, so that no process waits for its GPU.
        """
        if self.accelerator.num_processes == 1:
            return self.number
        device = self.accelerator.device
        asked = read_later(self.accelerator.gather(to_device(torch.tensor([self.number]), device)).max())
        before, self._asked = self._asked, asked
        if device.type == "cuda":
            return int(before()) if before else 0
        return int(asked())


@contextlib.contextmanager
def stop_signal(accelerator: Accelerator) -> Iterator[StopSignal]:
    """Within the block the handled signals only leave their number."""
    stop = StopSignal(accelerator)
    before = {number: signal.signal(number, stop.remember) for number in HANDLED}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
