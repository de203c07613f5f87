"""The Frechet distance between two Gaussians, given by their means and covariances."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Rounding leaves the distance of equal statistics within about 1e-6 of zero.
LARGEST_ROUNDING_ERROR = 1e-3


def frechet_distance(
    mean1: Array, cov1: Array, mean2: Array, cov2: Array, n1: int | None = None, n2: int | None = None
) -> float:
    """|mean1 - mean2|^2 + tr(cov1 + cov2 - 2 (cov1 cov2)^(1/2)), in float64.

    With cov1 = R R^T, the eigenvalues of cov1 cov2 are those of the symmetric R^T cov2 R, so symmetric
    eigenvalue routines do: no matrix square root, no complex numbers, no epsilon on the diagonal.

    Args:
        mean1: (d,), converted to float64 like the rest.
        cov1: (d, d), symmetric, positive semidefinite.
        mean2: (d,).
        cov2: (d, d).
        n1: samples behind `cov1`. A covariance of n samples has rank n - 1 at most; what rounding leaves in
            the other directions is dropped, as the square root would magnify it (1e-16 becomes 1e-8).
        n2: samples behind `cov2`.

    Returns:
        The distance, at least 0.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a covariance that is not symmetric or
            has negative eigenvalues beyond rounding, fewer than two samples.
    """
    mean1, cov1 = _checked(mean1, cov1, n1, "1")
    mean2, cov2 = _checked(mean2, cov2, n2, "2")
    if mean1.shape != mean2.shape:
        raise ValueError(
            f"the statistics have {mean1.size} and {mean2.size} features; "
            "compare statistics of the same feature extractor"
        )
    dimension = mean1.size
    rank1 = dimension if n1 is None else min(n1 - 1, dimension)
    rank2 = dimension if n2 is None else min(n2 - 1, dimension)

    eigenvalues, eigenvectors = np.linalg.eigh(cov1)  # ascending
    root = (eigenvectors * np.sqrt(_without_rounding(eigenvalues)))[:, dimension - rank1 :]  # R: (d, rank1)
    product = root.T @ cov2 @ root  # (rank1, rank1)
    eigenvalues = _without_rounding(np.linalg.eigvalsh((product + product.T) / 2))
    root_trace = np.sqrt(eigenvalues[max(rank1 - rank2, 0) :]).sum()

    difference = mean1 - mean2
    distance = float(difference @ difference + np.trace(cov1) + np.trace(cov2) - 2 * root_trace)
    if distance < -LARGEST_ROUNDING_ERROR:
        raise ValueError(
            f"the Frechet distance came out as {distance:.3g}, expected at least 0; "
            "a covariance is not accurate enough: compute both in float64"
        )
    return max(distance, 0.0)


def _checked(mean: Array, cov: Array, n: int | None, which: str) -> tuple[Array, Array]:
    """Mean and covariance as float64, or a `ValueError` that says what is wrong with them."""
    mean, cov = np.asarray(mean, dtype=np.float64), np.asarray(cov, dtype=np.float64)
    if mean.ndim != 1 or cov.shape != (mean.size, mean.size):
        raise ValueError(f"mean{which} has shape {mean.shape} and cov{which} {cov.shape}; expected (d,) and (d, d)")
    if not (np.isfinite(mean).all() and np.isfinite(cov).all()):
        raise ValueError(f"mean{which} or cov{which} has NaN or inf; compute the statistics again")
    if np.abs(cov - cov.T).max() > 1e-6 * np.abs(cov).max():
        raise ValueError(f"cov{which} is not symmetric; expected a covariance matrix")
    if n is not None and n < 2:
        raise ValueError(f"n{which}={n}, expected at least 2: one sample has no covariance")
    return mean, cov


def _without_rounding(eigenvalues: Array) -> Array:
    """Ascending eigenvalues with the tiny negative ones set to 0; a `ValueError` if they are not tiny."""
    if eigenvalues[0] < -1e-6 * max(eigenvalues[-1], 0.0):
        raise ValueError(
            f"a covariance has the negative eigenvalue {eigenvalues[0]:.3g} (largest {eigenvalues[-1]:.3g}); "
            "expected a positive semidefinite matrix"
        )
    return np.clip(eigenvalues, 0.0, None)
