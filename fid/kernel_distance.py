"""Kernel Inception Distance: unbiased MMD^2 with a cubic kernel (Binkowski et al. 2018, arXiv 1801.01401)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SUBSETS = 100
SUBSET_SIZE = 1000
SUBSET_SEED = 2020  # subsets are torch-fidelity's, so the values are too


class KernelDistance(NamedTuple):
    """Mean and standard deviation over subsets; the mean may be a little below 0 for equal distributions."""

    mean: float
    std: float


def kernel_distance(
    generated: NDArray[np.floating], real: NDArray[np.floating], subset_size: int = SUBSET_SIZE
) -> KernelDistance:
    """KID: the mean of `squared_mmd` over 100 random subsets of each set, in float64.

    Args:
        generated: (N, d).
        real: (M, d).
        subset_size: images of each set in a subset, at least 2.

    Raises:
        ValueError: a set is smaller than a subset.
    """
    require_subset_size(len(generated), len(real), subset_size)
    # RandomState's own stream, not a numpy Generator: torch-fidelity draws the same subsets.
    random = np.random.RandomState(SUBSET_SEED)
    values = []
    for _ in range(SUBSETS):
        rows = random.choice(len(generated), subset_size, replace=False)
        columns = random.choice(len(real), subset_size, replace=False)
        values.append(squared_mmd(generated[rows].astype(np.float64), real[columns].astype(np.float64)))
    return KernelDistance(float(np.mean(values)), float(np.std(values)))


def require_subset_size(num_generated: int, num_real: int, subset_size: int) -> None:
    """A `ValueError` if a set is smaller than a subset; known before any feature is."""
    if subset_size < 2:
        raise ValueError(f"--kid-subset-size {subset_size}: must be at least 2")
    for n, what in ((num_generated, "generated"), (num_real, "reference")):
        if n < subset_size:
            raise ValueError(
                f"KID needs at least {subset_size} {what} images for its subsets, got {n}; "
                f"use more images or --kid-subset-size {min(num_generated, num_real)}"
            )


def squared_mmd(x: Array, y: Array) -> float:
    """The unbiased estimate of MMD^2 with k(a, b) = (a.b / d + 1)^3 for x (m, d) and y (n, d)."""

    def kernel(a: Array, b: Array) -> Array:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_of_others(k: Array) -> float:  # without the diagonal
        return float((k.sum() - np.trace(k)) / (len(k) * (len(k) - 1)))

    return mean_of_others(kernel(x, x)) + mean_of_others(kernel(y, y)) - 2 * float(kernel(x, y).mean())
