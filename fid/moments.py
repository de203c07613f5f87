"""Mean and covariance of a stream of features, without keeping the features."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class FeatureMoments:
    """Running count, sum and sum of outer products, all float64.

    Raw moments in float64 lose nothing measurable (1e-15 in the covariance; float32 would lose 1e-6) and
    simply add up, so any batch size and any split over processes gives the same statistics.

    Attributes:
        dimension: d, the length of a feature.
        n: features seen so far.
        sum: (d,) float64.
        outer: (d, d) float64, the sum of f f^T.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self.n = 0
        self.sum: NDArray[np.float64] = np.zeros(dimension)
        self.outer: NDArray[np.float64] = np.zeros((dimension, dimension))

    def update(self, features: Tensor) -> None:
        """Adds a batch.

        Args:
            features: (B, d), any floating type and device.

        Raises:
            ValueError: another shape, or a value that is not finite; the statistics then stay as they were.
        """
        if features.ndim != 2 or features.shape[1] != self.dimension:
            raise ValueError(f"features have shape {tuple(features.shape)}; expected (B, {self.dimension})")
        rows = features.detach().cpu().double().numpy()  # (B, d)
        bad_rows = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if bad_rows.size:
            raise ValueError(
                f"features of row {bad_rows[0]} of this batch (image {self.n + bad_rows[0]} so far) have NaN "
                "or inf; check the images and the weights of the feature extractor"
            )
        self.n += len(rows)
        self.sum += rows.sum(axis=0)
        self.outer += rows.T @ rows

    def merge(self, other: "FeatureMoments") -> None:
        """Adds what `other` has seen, as if its batches had come here.

        Raises:
            ValueError: `other` has features of another length.
        """
        if other.dimension != self.dimension:
            raise ValueError(
                f"cannot merge moments of {other.dimension} features into moments of {self.dimension}; "
                "use the same feature extractor for both"
            )
        self.n += other.n
        self.sum += other.sum
        self.outer += other.outer

    def mean(self) -> NDArray[np.float64]:
        """The mean, (d,) float64.

        Raises:
            ValueError: nothing has been seen.
        """
        if self.n < 1:
            raise ValueError("a mean needs at least 1 image, got 0")
        return self.sum / self.n

    def covariance(self) -> NDArray[np.float64]:
        """The unbiased covariance (divisor n - 1, as `np.cov`), (d, d) float64.

        Raises:
            ValueError: fewer than two features have been seen.
        """
        if self.n < 2:
            raise ValueError(f"a covariance needs at least 2 images, got {self.n}")
        return (self.outer - np.outer(self.sum, self.sum / self.n)) / (self.n - 1)
