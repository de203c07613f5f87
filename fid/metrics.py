"""Which numbers compare two sets of images, what each needs, and what it is called."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fid.collection import Collected, Part, Wanted
from fid.features import CLIP, DIGITS, DINO, INCEPTION, NUM_LOGITS, SPATIAL_DIMENSION, Extractor
from fid.frechet import frechet_distance
from fid.inception_score import SPLIT_SIZE
from fid.kernel_distance import SUBSET_SIZE, SUBSETS, kernel_distance, require_subset_size
from fid.moments import FeatureMoments
from fid.precision_recall import NEIGHBOURS, precision_recall
from fid.reference import Gaussian, Reference

Metric = Literal["fid", "sfid", "is", "pr", "kid"]
METRICS: tuple[Metric, ...] = get_args(Metric)
FRECHET_NAMES = {INCEPTION: "FID", DIGITS: "FD-digits", DINO: "FD-DINOv2", CLIP: "FD-CLIP"}
OTHER_SUFFIXES = {INCEPTION: "", DIGITS: "-digits", DINO: "-DINOv2", CLIP: "-CLIP"}


@dataclass(frozen=True)
class Score:
    """One number.

    Attributes:
        metric: what was asked for.
        name: with the number of images in it: FID-1000 is another metric than FID-50K.
        value: the number.
        note: how to read it.
    """

    metric: Metric
    name: str
    value: float
    note: str


def chosen_metrics(text: str | None, extractor: str, reference: Reference) -> tuple[Metric, ...]:
    """The metrics of a comma-separated list, or by default those that cost nothing more than sampling.

    Raises:
        ValueError: an unknown metric, or one that this extractor or this reference has not.
    """
    if text is None:
        if extractor != INCEPTION:
            return ("fid",)
        computed = reference.pooled is None
        return ("fid", "sfid", "is") if computed or reference.spatial is not None else ("fid", "is")
    metrics = [part.strip() for part in text.split(",")]
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"--metrics {text}: {metric!r} is not known; choose of {','.join(METRICS)}")
    chosen = tuple(metric for metric in METRICS if metric in metrics)
    if "sfid" in chosen and extractor != INCEPTION:
        raise ValueError(f"--metrics {text}: sfid is a metric of {INCEPTION}, not of {extractor}")
    if "sfid" in chosen and reference.pooled is not None and reference.spatial is None:
        raise ValueError(f"--metrics {text}: {reference.name} has no mu_s and sigma_s, which sfid needs")
    if "is" in chosen and extractor not in NUM_LOGITS:
        raise ValueError(f"--metrics {text}: {extractor} has no classes, which the Inception Score needs")
    for metric in ("pr", "kid"):
        if metric in chosen and reference.images is None and reference.features is None:
            raise ValueError(
                f"--metrics {text}: {reference.name} holds statistics alone, and {metric} needs real images; "
                "give a reference with images"
            )
    return chosen


def require_enough(metrics: tuple[Metric, ...], num_generated: int, reference: Reference, subset_size: int) -> None:
    """A `ValueError` for too few images, before any work is done."""
    num_real = reference.num_images if reference.features is not None else None
    if reference.images is not None:
        num_real = reference.images.about.num_images
    for n, what in ((num_generated, "generated"), (num_real, "reference")):
        if n is not None and n < 2:
            raise ValueError(f"{n} {what} image: a covariance needs at least 2 images")
        if "pr" in metrics and n is not None and n <= NEIGHBOURS:
            raise ValueError(f"{n} {what} images: precision and recall need more than {NEIGHBOURS}")
    if "kid" in metrics:
        assert num_real is not None
        require_subset_size(num_generated, num_real, subset_size)


def wanted_of_generated(metrics: tuple[Metric, ...]) -> Wanted:
    """What to gather of generated images."""
    return Wanted("sfid" in metrics, "is" in metrics, "pr" in metrics or "kid" in metrics)


def wanted_of_reference(metrics: tuple[Metric, ...], reference: Reference) -> Wanted | None:
    """What to gather of the reference's images; None if the file has it all."""
    features = ("pr" in metrics or "kid" in metrics) and reference.features is None
    if reference.pooled is not None and not features:
        return None
    return Wanted("sfid" in metrics and reference.pooled is None, False, features)


def distance(first: Gaussian, second: Gaussian) -> float:
    """Frechet distance of two statistics."""
    return frechet_distance(first.mean, first.covariance, second.mean, second.covariance, first.n, second.n)


def gaussian(moments: FeatureMoments) -> Gaussian:
    """Statistics of what has been seen."""
    return Gaussian(moments.mean(), moments.covariance(), moments.n)


def halves_distance(part: Part) -> float | None:
    """Frechet distance between the even and the odd images, the floor for a score; None for fewer than 4."""
    return distance(*map(gaussian, part.halves)) if min(half.n for half in part.halves) >= 2 else None


def compute(
    metrics: tuple[Metric, ...],
    generated: Collected,
    reference: Reference,
    real: Collected | None,
    extractor: Extractor,
    subset_size: int,
) -> list[Score]:
    """The scores, in the order of `METRICS`.

    Args:
        metrics: from `chosen_metrics`.
        generated: all of the generated images.
        reference: what to compare with.
        real: all of the reference's images, if they were wanted.
        extractor: that made the features.
        subset_size: of KID.
    """
    n, suffix = count(generated.num_images), OTHER_SUFFIXES[extractor.name]
    scores = []
    if "fid" in metrics:
        second = reference.pooled or gaussian(_part(real).pooled())
        value = distance(gaussian(generated.part.pooled()), second)
        scores.append(Score("fid", f"{FRECHET_NAMES[extractor.name]}-{n}", value, "lower is better, 0 is equal"))
    if "sfid" in metrics:
        mine, theirs = generated.part.spatial, reference.spatial
        assert mine is not None
        if theirs is None:
            moments = _part(real).spatial
            assert moments is not None
            theirs = gaussian(moments)
        scores.append(Score("sfid", f"sFID-{n}", distance(gaussian(mine), theirs), "lower is better, 0 is equal"))
    if "is" in metrics:
        assert generated.part.scores is not None
        value = generated.part.scores.score()
        scores.append(Score("is", f"IS{suffix}-{n}", value, "higher is better"))
    if "pr" not in metrics and "kid" not in metrics:
        return scores
    features = reference.features if reference.features is not None else _features(real)
    own = _features(generated)
    if "pr" in metrics:
        both = precision_recall(torch.from_numpy(own), torch.from_numpy(features), device=extractor.device)
        against = f"of {count(len(features))} real images"
        scores.append(Score("pr", f"precision{suffix}-{n}", both.precision, f"higher is better, {against}"))
        scores.append(Score("pr", f"recall{suffix}-{n}", both.recall, f"higher is better, {against}"))
    if "kid" in metrics:
        kid = kernel_distance(own, features, subset_size)
        note = f"lower is better, 0 is equal; +- {kid.std:.2g} over {SUBSETS} subsets of {subset_size}"
        scores.append(Score("kid", kid_name(extractor.name, generated.num_images, subset_size), kid.mean, note))
    return scores


def kid_name(extractor: str, num_images: int, subset_size: int) -> str:
    """KID's name; subsets of another size than the usual 1,000 make it another metric."""
    subsets = "" if subset_size == SUBSET_SIZE else f" (subsets of {subset_size})"
    return f"KID{OTHER_SUFFIXES[extractor]}-{count(num_images)}{subsets}"


def reliability_warnings(metrics: tuple[Metric, ...], n: int, what: str, extractor: Extractor) -> list[str]:
    """What too few images do to the numbers."""
    found = []
    for metric, dimension in (("fid", extractor.dimension), ("sfid", SPATIAL_DIMENSION)):
        if metric in metrics and n <= dimension:
            found.append(
                f"{metric} is unreliable: {n} {what} images for {dimension} features give a rank-deficient covariance, "
                "and the bias of so few images dominates the value"
            )
    if "is" in metrics and what == "generated" and n % SPLIT_SIZE:
        found.append(
            f"is: {n} images are no whole splits of {SPLIT_SIZE}, so the value does not compare with that of 50,000"
        )
    return found


def count(n: int) -> str:
    """A number of images in a metric's name: 50K for 50,000 exactly, as the field writes it."""
    return f"{n // 1000}K" if n >= 5000 and n % 1000 == 0 else str(n)


def _part(collected: Collected | None) -> Part:
    assert collected is not None
    return collected.part


def _features(collected: Collected | None) -> NDArray[np.floating]:
    assert collected is not None
    assert collected.features is not None
    return collected.features
