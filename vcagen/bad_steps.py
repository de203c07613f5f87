"""Updates that were not finite: skipped, named by their samples, and the end of the run where there are too many."""

import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from vcagen.checkpoint import list_checkpoints
from vcagen.data import ImageFolder, LatentCache, TrainingData
from vcagen.run import Run

# In fp16 every bad update halves the loss scale; below 1 gradients would only lose digits, so there a run ends.
LOWEST_LOSS_SCALE = 1.0
SHOWN = 8


class NotFiniteError(ValueError):
    """Too many updates in a row were not finite; the weights since the last checkpoint are not to be trusted."""


class BadSteps:
    """Counts the updates in a row that were not finite."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.in_a_row = 0

    def good(self) -> None:
        """An update was finite."""
        self.in_a_row = 0

    def bad(self, step: int, samples: torch.Tensor) -> None:
        """An update was not, and was skipped: says so, or ends the run when it is enough.

        Args:
            step: counted from 1.
            samples: int64 (B,), those of this process whose loss was not finite, -1 for the others. Every process
                calls this at the same step.

        Raises:
            NotFiniteError: `max_bad_steps` updates in a row, or an fp16 loss scale that fell below its floor.
        """
        accelerator = self.run.accelerator
        found = sorted(index for index in accelerator.gather(samples).tolist() if index >= 0)
        what = f"the loss of {sample_names(self.run.data, found)}" if found else "the gradient, though no loss,"
        self.in_a_row += 1
        enough = f"{self.in_a_row} updates in a row were not finite, at last {what}"
        scaler = accelerator.scaler
        if scaler is not None and scaler.get_scale() < LOWEST_LOSS_SCALE:
            enough = f"{what} is not finite although the fp16 loss scale is at its floor of {LOWEST_LOSS_SCALE:g}"
        elif self.in_a_row < self.run.config.train.max_bad_steps:
            if accelerator.is_main_process:
                tqdm.write(f"step {step}: {what} is not finite; update skipped", file=sys.stderr)
            return
        raise NotFiniteError(
            f"step {step}: {enough}; {_last_checkpoint(self.run.folder)}; start another run_dir with a lower "
            "train.learning_rate, with train.gradient_clip, or with train.precision=fp32"
        )


def sample_names(data: TrainingData, indices: list[int]) -> str:
    """Samples by index, and by what a person finds them: the file of an image folder, the key of a latent cache."""
    shown = ", ".join(f"{index}{_key(data, index)}" for index in indices[:SHOWN])
    return f"samples {shown}" + (f" and {len(indices) - SHOWN} more" if len(indices) > SHOWN else "")


def _key(data: TrainingData, index: int) -> str:
    if isinstance(data, ImageFolder):
        return f" ({data.files[index].path})"
    if isinstance(data, LatentCache):
        number = int(np.searchsorted(data.ends, index, side="right"))
        return f" ({data.shards[number].keys()[index - int(data.ends[number])]})"  # counted from the shard's end
    return ""


def _last_checkpoint(folder: Path) -> str:
    found = list_checkpoints(folder)
    return f"the last good checkpoint is {found[-1][1]}" if found else "no checkpoint was written yet"
