"""Differences of scores with 95% intervals over seeds."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """How far one model's score lies from another's.

    Attributes:
        value: difference of the means.
        half_width: of its 95% interval over seeds; None for one seed.
        paired: whether the interval is of differences seed by seed, which share noise and labels.
    """

    value: float
    half_width: float | None
    paired: bool

    @property
    def is_shown(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.half_width is not None and abs(self.value) > self.half_width

    def describe(self) -> str:
        """In words."""
        if self.half_width is None:
            return f"{self.value:+.4g}"
        how = "paired by seed" if self.paired else "unpaired"
        verdict = "" if self.is_shown else ": no difference shown"
        return f"{self.value:+.4g} +- {self.half_width:.2g} (95%, {how}){verdict}"


def paired_difference(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> Difference:
    """The mean of mine - theirs, each (seeds,) in the same order, with Student's interval of that mean."""
    from scipy import stats

    pairs = mine - theirs
    if len(pairs) < 2:
        return Difference(float(pairs.mean()), None, paired=True)
    error = pairs.std(ddof=1) / math.sqrt(len(pairs))
    return Difference(
        float(pairs.mean()), float(stats.t.ppf((1 + CONFIDENCE) / 2, len(pairs) - 1) * error), paired=True
    )


def welch_difference(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> Difference:
    """The difference of two means over unrelated seeds, (n,) and (m,), with Welch's interval."""
    from scipy import stats

    value = float(mine.mean() - theirs.mean())
    if min(len(mine), len(theirs)) < 2:
        return Difference(value, None, paired=False)
    variances = mine.var(ddof=1) / len(mine), theirs.var(ddof=1) / len(theirs)
    total = sum(variances)
    if total == 0:
        return Difference(value, 0.0, paired=False)
    freedom = total**2 / (variances[0] ** 2 / (len(mine) - 1) + variances[1] ** 2 / (len(theirs) - 1))
    return Difference(value, float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)), paired=False)
