"""The samples of a training step, each with a generator of its own."""

import numpy as np
import torch
from torch.utils.data import Dataset

from vcagen.data import LatentCache, TrainingData
from vcagen.seeds import sample_generator


class TrainingSamples(Dataset[tuple[torch.Tensor, int, int, int, int]]):
    """(image uint8 (C, H, W) or moments float16 (2C, h, w), label, sample index, step, position) by `TrainingOrder`.

    Whether the mirror image is taken is the first draw of the sample's own generator.
    """

    def __init__(self, data: TrainingData, seed: int) -> None:
        self.data, self.seed = data, seed

    def __getitem__(self, key: tuple[int, int, int]) -> tuple[torch.Tensor, int, int, int, int]:
        index, step, position = key
        mirrored = self.data.can_mirror and draw_mirror(training_generator(self.seed, step, position))
        if isinstance(self.data, LatentCache):
            item = self.data.moments(index, mirrored)
        else:
            image = self.data.image(index)
            item = np.ascontiguousarray(image[..., ::-1]) if mirrored else image
        return torch.from_numpy(item), self.data.label(index), index, step, position


def training_generator(seed: int, step: int, position: int) -> torch.Generator:
    """The generator of the sample at a position of a step: mirror, posterior, label drop, time and noise, in turn."""
    return sample_generator(seed, "train", step, position)


def draw_mirror(generator: torch.Generator) -> bool:
    """Whether a sample is mirrored; one draw."""
    return torch.rand(1, generator=generator).item() < 0.5
