"""Which sample is trained on when: a pure function of (seed, position), so that nothing needs restoring."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from vcagen.seeds import sample_generator


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """A permutation of 0..num_samples-1 that depends on seed and epoch alone."""
    return torch.randperm(num_samples, generator=sample_generator(seed, "order", epoch)).tolist()


class TrainingOrder(Sampler[list[tuple[int, int, int]]]):
    """Endless batches of (sample index, step, position in the global batch), every sample once an epoch.

    Position p of step s is the (s * global_batch_size + p)-th sample of the run, so batches run on over the end
    of an epoch and no sample is left out. A process takes the positions from `rank * B` on, B = global batch size
    over processes and accumulation, then the next micro-batch's.

    Args:
        num_samples: size of the data set.
        seed: the run's seed.
        global_batch_size: samples per optimiser step, over all processes and micro-batches.
        micro_batch_size: samples per forward pass of one process; must divide the share of a process.
        rank, num_processes: this process among all.
        first_step: where to start, counted from 0.
        max_steps: where to stop.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        num_processes: int,
        first_step: int,
        max_steps: int,
    ) -> None:
        self.num_samples, self.seed = num_samples, seed
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.share = global_batch_size // num_processes
        self.first_position = rank * self.share
        self.first_step, self.max_steps = first_step, max_steps

    def __len__(self) -> int:
        return (self.max_steps - self.first_step) * (self.share // self.micro_batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        order, order_epoch = [], -1
        for step in range(self.first_step, self.max_steps):
            batch = []
            for position in range(self.first_position, self.first_position + self.share):
                epoch, offset = divmod(step * self.global_batch_size + position, self.num_samples)
                if epoch != order_epoch:
                    order, order_epoch = epoch_order(self.num_samples, self.seed, epoch), epoch
                batch.append((order[offset], step, position))
                if len(batch) == self.micro_batch_size:
                    yield batch
                    batch = []
