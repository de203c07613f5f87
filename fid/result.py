"""The result of scoring: numbers with the whole protocol that made them, as JSON and as a few lines for people."""

from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fid.collection import Collected
from fid.features import DIGITS, RESIZE_RULES, Extractor
from fid.images import LOSSY_SUFFIXES, About, Images
from fid.metrics import Metric, reliability_warnings
from fid.reference import Reference
from vcagen.data.digits import Digits

MOST_DUPLICATES = 0.001


def describe_images(images: Images, collected: Collected) -> dict[str, Any]:
    """The scored images, for the result."""
    about = images.about
    return {
        "images": about.name,
        "num_images": about.num_images,
        "image_size": list(about.size),
        "pixels_sha256": collected.pixels_sha256,
        "sampling": about.sampling,
    }


def describe_reference(reference: Reference, real: Collected | None) -> dict[str, Any]:
    """What they were compared with, for the result."""
    return {
        "reference": reference.name,
        "statistics": "of the file" if reference.pooled is not None else "computed from the images",
        "num_images": reference.num_images,
        "image_size": list(reference.size) if reference.size else None,
        "file_sha256": reference.sha256,
        # A file's hash says which images are in it; whether a metric looked at them should not matter.
        "pixels_sha256": real.pixels_sha256 if real and reference.sha256 is None else None,
        "notes": list(reference.notes),
    }


def describe_extractor(extractor: Extractor) -> dict[str, Any]:
    """The network, for the result."""
    return {
        "name": extractor.name,
        "num_features": extractor.dimension,
        "weights_sha256": extractor.weights_sha256,
        "resize": RESIZE_RULES[extractor.name],
    }


def describe_run(extractor: Extractor, batch_size: int, num_processes: int) -> dict[str, Any]:
    """What should not matter, for the result."""
    return {
        "device": str(extractor.device),
        "batch_size": batch_size,
        "num_processes": num_processes,
        "versions": {package: version(package) for package in ("torch", "torch-fidelity", "numpy")},
    }


def warnings(
    metrics: tuple[Metric, ...], images: Images, generated: Collected, reference: Reference, extractor: Extractor
) -> list[str]:
    """What a reader of the numbers must know before comparing them."""
    about, n = images.about, images.about.num_images
    found = reliability_warnings(metrics, n, "generated", extractor)
    if reference.num_images is not None:
        found += reliability_warnings(metrics, reference.num_images, "reference", extractor)
    sides = [("generated", about), *([("reference", reference.images.about)] if reference.images else [])]
    for what, side in sides:
        if lossy := side.suffixes & LOSSY_SUFFIXES:
            found.append(
                f"the {what} images are stored lossily ({', '.join(sorted(lossy))}), which moves every number here"
            )
    constant = int(generated.part.constant.sum())
    if constant:
        found.append(f"{constant} of the {n} generated images are of one colour alone")
    if generated.duplicates > MOST_DUPLICATES * n:
        found.append(f"{generated.duplicates} of the {n} generated images are exact copies of others")
    return found + _label_warnings(about)


def own_label_accuracy(images: Images, generated: Collected, extractor: Extractor) -> float | None:
    """The fraction of digits that are read as what they were asked to be; None for other images or networks."""
    about = images.about
    names = about.class_names
    if extractor.name != DIGITS or names is None or about.labels is None or not set(names) <= set(Digits.class_names):
        return None
    asked = np.array([int(name) for name in names])[about.labels]
    return float((generated.part.predictions == asked).mean())


def describe(result: dict[str, Any], out: Path) -> str:
    """The result as a short table."""
    scores = result["scores"]
    width = max(len(score["name"]) for score in scores)
    lines = [f"{score['name']:{width}}  {score['value']:<8.5g}  {score['note']}" for score in scores]
    if result["reference_halves_distance"] is not None:
        lines.append(f"  two halves of the reference are {result['reference_halves_distance']:.2f} apart")
    if result["own_label_accuracy"] is not None:
        lines.append(f"  {result['own_label_accuracy']:.1%} of the images are read as the digit they were asked to be")
    reference, extractor = result["reference"], result["extractor"]
    images = "" if reference["num_images"] is None else f" of {reference['num_images']} images"
    lines.append(f"  against {reference['reference']}: statistics{images}, {reference['statistics']}")
    lines.append(f"  by {extractor['name']}, weights {extractor['weights_sha256'][:8]}, resize: {extractor['resize']}")
    lines += [f"  note: {note}" for note in reference["notes"]]
    lines += [f"  warning: {warning}" for warning in result["warnings"]]
    kept = f"; images in {result['saved']}" if result["saved"] else ""
    lines.append(f"  {out}: the numbers with their whole protocol{kept}")
    return "\n".join(lines)


def _label_warnings(about: About) -> list[str]:
    if about.labels is None or about.by_class:
        return []
    found = []
    labels = about.labels.tolist()
    if len(labels) > 2 and labels == sorted(labels) and labels[0] != labels[-1]:
        found.append(
            "the labels are sorted, so splits of the Inception Score hold few classes each and it comes out low"
        )
    if about.sampling and about.sampling.get("label_mode") == "balanced" and about.class_names:
        counts = Counter(labels)
        if max(counts.values()) > min(counts.get(label, 0) for label in range(len(about.class_names))):
            found.append(f"{len(labels)} images are no whole number for each of {len(about.class_names)} classes")
    return found
