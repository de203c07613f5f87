"""A Frechet distance with the protocol that produced it."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from fid.features import DIGITS, INCEPTION, Extractor, build_extractor
from fid.frechet import frechet_distance
from fid.moments import FeatureMoments
from vcagen.data.digits import Digits
from vcagen.data.images import decode_image, walk_images
from vcagen.files import require_writable, write_json
from vcagen.generation import load_run, plan_samples, samples_folder, write_samples

DIGITS_REFERENCE = "digits"


class FolderImages:
    """The images below a folder, in the order of their paths, uint8 (3, H, W), all of one size.

    Raises:
        ValueError: no images, one that cannot be decoded, or one of another size; before any feature is computed.
    """

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.paths = walk_images(folder)
        self.size = decode_image(self.paths[0]).shape[:2]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (3, H, W)."""
        image = decode_image(self.paths[index])
        if image.shape[:2] != self.size:
            raise ValueError(
                f"{self.paths[index]}: {image.shape[1]}x{image.shape[0]} pixels, but {self.paths[0]} has "
                f"{self.size[1]}x{self.size[0]}; bring all images to one size first"
            )
        return image.transpose(2, 0, 1)


class DigitsImages:
    """The real digits as a reference, uint8 (3, 8, 8)."""

    name = "digits (scikit-learn, 1797 real images)"
    size = (8, 8)

    def __init__(self) -> None:
        self.data = Digits()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (3, 8, 8)."""
        return self.data.image(index).repeat(3, axis=0)


Images = FolderImages | DigitsImages


@dataclass(frozen=True)
class ExtractedImages:
    """Statistics of a set of images.

    Attributes:
        moments: of all images.
        halves: of every other image, starting from the first and from the second.
        predictions: (N,) int64, the class with the largest logit.
    """

    moments: FeatureMoments
    halves: tuple[FeatureMoments, FeatureMoments]
    predictions: torch.Tensor


def score_command(arguments: argparse.Namespace) -> None:
    """Scores a run or a folder, prints the number and writes the result JSON. See `python -m fid score --help`."""
    if arguments.num_images < 2 or arguments.batch_size < 1:
        raise ValueError("--num-images must be at least 2 and --batch-size at least 1")
    is_digits = arguments.reference == DIGITS_REFERENCE
    reference: Images = DigitsImages() if is_digits else FolderImages(Path(arguments.reference))
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = arguments.extractor or (DIGITS if is_digits else INCEPTION)
    extractor = build_extractor(name, arguments.extractor_weights, device)
    folder = _images_folder(arguments)
    images = FolderImages(folder)
    _require_comparable(images, reference, extractor)
    out = arguments.out or folder / "score.json"
    require_writable(out.parent)

    generated = extract(images, extractor, arguments.batch_size, "generated images")
    real = extract(reference, extractor, arguments.batch_size, "reference images")
    record = _samples_record(folder)
    result: dict[str, Any] = {
        "metric": f"FD-{len(images)} ({extractor.name}, {extractor.dimension} features)",
        "frechet_distance": distance(generated.moments, real.moments),
        "reference_halves_distance": distance(*real.halves) if len(reference) >= 4 else None,
        "num_images": len(images),
        "num_reference_images": len(reference),
        "warnings": warnings(len(images), extractor.dimension),
        "protocol": {
            "images": str(folder),
            "reference": reference.name,
            "image_size": list(images.size),
            "extractor": extractor.name,
            "extractor_weights_sha256": extractor.weights_sha256,
            "sampling": record["protocol"] if record else None,
            "seed": arguments.seed if record else None,
            "versions": {package: version(package) for package in ("torch", "torch-fidelity", "numpy")},
        },
    }
    if record and extractor.name == DIGITS:
        names = record["class_names"]
        labels = torch.tensor([int(names[sample["label"]]) for sample in record["samples"]])
        result["own_label_accuracy"] = (generated.predictions == labels).double().mean().item()
    write_json(out, result)
    print(describe(result, out))


def extract(images: Images, extractor: Extractor, batch_size: int, what: str) -> ExtractedImages:
    """Features of all images, in order, kept as moments alone."""
    halves = (FeatureMoments(extractor.dimension), FeatureMoments(extractor.dimension))
    predictions = []
    for batch in _batches(images, batch_size, what):
        features = extractor(batch.images)
        for parity, half in enumerate(halves):
            half.update(features.pooled[(parity - batch.start) % 2 :: 2])
        assert features.logits is not None
        predictions.append(features.logits.argmax(dim=1).cpu())
    moments = FeatureMoments(extractor.dimension)
    for half in halves:
        moments.merge(half)
    return ExtractedImages(moments, halves, torch.cat(predictions))


@dataclass(frozen=True)
class _Batch:
    start: int
    images: torch.Tensor  # uint8 (B, 3, H, W)


def _batches(images: Images, batch_size: int, what: str) -> Iterator[_Batch]:
    with tqdm(total=len(images), desc=f"features of {what}", unit="image", delay=2) as bar:
        for start in range(0, len(images), batch_size):
            rows = [images[index] for index in range(start, min(start + batch_size, len(images)))]
            yield _Batch(start, torch.from_numpy(np.stack(rows)))
            bar.update(len(rows))


def distance(first: FeatureMoments, second: FeatureMoments) -> float:
    """Frechet distance between two sets of features."""
    return frechet_distance(first.mean(), first.covariance(), second.mean(), second.covariance(), first.n, second.n)


def warnings(num_images: int, dimension: int) -> list[str]:
    """What a reader of the number must know before comparing it."""
    if num_images > dimension:
        return []
    return [
        f"unreliable: {num_images} images for {dimension} features give a rank-deficient covariance, and the "
        "bias of so few images dominates the value"
    ]


def describe(result: dict[str, Any], out: Path) -> str:
    """The result in a few lines for people."""
    lines = [
        f"{result['metric']}: {result['frechet_distance']:.2f}   (lower is better; 0 = the same statistics)",
    ]
    if result["reference_halves_distance"] is not None:
        lines.append(f"  two halves of the reference images are {result['reference_halves_distance']:.2f} apart")
    if "own_label_accuracy" in result:
        lines.append(f"  {result['own_label_accuracy']:.1%} of the images are read as the digit they were asked to be")
    lines += [f"  warning: {warning}" for warning in result["warnings"]]
    lines.append(f"  {out}: the number with its whole protocol; images in {result['protocol']['images']}")
    return "\n".join(lines)


def _images_folder(arguments: argparse.Namespace) -> Path:
    """The folder to score; for a run, sampled first, balanced over the classes."""
    source: Path = arguments.source
    is_run = (source / "checkpoints").is_dir() or (source / "state.json").is_file()
    if not is_run:
        if arguments.overrides:
            raise ValueError(f"{source}: not a run, so {arguments.overrides[0]!r} has nothing to change")
        return source
    run = load_run(source, "ema", arguments.overrides, arguments.device)
    num_classes = len(run.class_names)
    labels = [index % num_classes for index in range(arguments.num_images)]
    samples = plan_samples(labels, arguments.seed, num_classes)
    folder = samples_folder(run, samples, run.checkpoint.parents[1])
    print(run.describe())
    write_samples(run, samples, folder, arguments.batch_size, rank=0, num_processes=1)
    return folder


def _samples_record(folder: Path) -> dict[str, Any] | None:
    path = folder / "samples.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _require_comparable(images: Images, reference: Images, extractor: Extractor) -> None:
    if images.size != reference.size:
        raise ValueError(
            f"{images.name}: images of {images.size[1]}x{images.size[0]} pixels, but the reference {reference.name} "
            f"has {reference.size[1]}x{reference.size[0]}; sizes must agree, since the extractor resizes silently"
        )
    if extractor.name == DIGITS and images.size != DigitsImages.size:
        raise ValueError(
            f"{images.name}: {DIGITS} reads 8x8 digits, not images of {images.size[1]}x{images.size[0]} pixels; "
            f"use --extractor {INCEPTION}"
        )
    if len(images) < 2 or len(reference) < 2:
        raise ValueError("a covariance needs at least 2 images on each side")
