"""A Frechet distance with the protocol that produced it."""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from fid.features import DIGITS, INCEPTION, Extractor, build_extractor
from fid.frechet import frechet_distance
from fid.moments import FeatureMoments
from vcagen.data.digits import Digits
from vcagen.data.images import center_crop, check_images, decode_image, walk_images
from vcagen.devices import usable_device
from vcagen.files import require_file_name, write_json
from vcagen.generation import LoadedModel, load_model, plan_labels, plan_samples
from vcagen.pipeline_folder import is_pipeline_folder
from vcagen.sample_folder import image_path, prepare_samples, read_record, samples_folder, write_samples

DIGITS_REFERENCE = "digits"
LOSSY_SUFFIXES = {".jpg", ".jpeg", ".webp"}


class FolderImages:
    """The images below a folder, in the order of their paths, uint8 (3, H, W), all of one size.

    Args:
        folder: where they are.
        crop: side of the centre crop of training to bring them to, pixels; None takes them as they are.

    Raises:
        ValueError: no images, some that cannot be decoded or are of another size, or a sample folder that is not
            complete; at construction, so before any feature is computed.
    """

    def __init__(self, folder: Path, crop: int | None = None) -> None:
        self.name = str(folder) if crop is None else f"{folder}, centre-cropped to {crop}x{crop}"
        self.folder, self.crop = folder, crop
        self.paths = walk_images(folder)
        self.record = read_record(folder)
        if self.record is not None:
            _require_complete(folder, self.paths, len(self.record["samples"]))
        bad = check_images(self.paths, "skip")
        if bad:
            raise ValueError(f"{folder}: {len(bad)} files cannot be used: {'; '.join(list(bad.values())[:10])}")
        self.size = self[0].shape[1:]
        for path in self.paths if crop is None else ():
            with Image.open(path) as image:
                self._require_size(path, (image.height, image.width))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        """uint8 (3, H, W)."""
        image = decode_image(self.paths[index])
        if self.crop is not None:
            image = center_crop(image, self.crop)
        elif index:
            self._require_size(self.paths[index], image.shape[:2])
        return image.transpose(2, 0, 1)

    def _require_size(self, path: Path, size: tuple[int, ...]) -> None:
        if size != self.size:
            raise ValueError(
                f"{path}: {size[1]}x{size[0]} pixels, but {self.paths[0]} has {self.size[1]}x{self.size[0]}; "
                "bring all images to one size first"
            )


class DigitsImages:
    """The real digits as a reference, uint8 (3, 8, 8)."""

    name = "digits (scikit-learn, 1797 real images)"
    size = (8, 8)
    paths = ()
    record = None

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
        pixels_sha256: hash of all pixels in order.
    """

    moments: FeatureMoments
    halves: tuple[FeatureMoments, FeatureMoments]
    predictions: torch.Tensor
    pixels_sha256: str


def score_command(arguments: argparse.Namespace) -> None:
    """Scores a run or a folder, prints the number and writes the result JSON. See `python -m fid score --help`."""
    if arguments.batch_size < 1:
        raise ValueError(f"--batch-size {arguments.batch_size}: must be at least 1")
    is_digits = arguments.reference == DIGITS_REFERENCE
    model = _load_if_model(arguments)
    height, width = model.maker.autoencoder.image_size(model.maker.model.config.latent_size) if model else (0, 0)
    # A model's reference is cropped as its training images were; folders are compared as they are.
    crop = height if model and height == width else None
    reference: Images = DigitsImages() if is_digits else FolderImages(Path(arguments.reference), crop)
    name = arguments.extractor or (DIGITS if is_digits else INCEPTION)
    given = None if model else FolderImages(arguments.source)
    _require_comparable(str(arguments.source), given.size if given else (height, width), reference, name)
    if arguments.out:
        require_file_name(arguments.out)
    extractor = build_extractor(name, arguments.extractor_weights, usable_device(arguments.device))
    images = FolderImages(_sample(model, arguments)) if model else given
    assert images is not None
    out = arguments.out or images.folder / "score.json"
    require_file_name(out)

    generated = extract(images, extractor, arguments.batch_size, "generated images")
    real = extract(reference, extractor, arguments.batch_size, "reference images")
    record = images.record
    result: dict[str, Any] = {
        "metric": f"FD-{len(images)} ({extractor.name}, {extractor.dimension} features)",
        "frechet_distance": distance(generated.moments, real.moments),
        "reference_halves_distance": distance(*real.halves) if len(reference) >= 4 else None,
        "num_images": len(images),
        "num_reference_images": len(reference),
        "warnings": warnings(images, reference, extractor.dimension),
        "protocol": {
            "images": str(images.folder),
            "images_sha256": generated.pixels_sha256,
            "reference": reference.name,
            "reference_sha256": real.pixels_sha256,
            "image_size": list(images.size),
            "extractor": extractor.name,
            "extractor_weights_sha256": extractor.weights_sha256,
            "sampling": record["protocol"] if record else None,
            "seed": record["samples"][0]["seed"] if record else None,
            "versions": {package: version(package) for package in ("torch", "torch-fidelity", "numpy")},
        },
    }
    if record and extractor.name == DIGITS and set(record["class_names"]) <= set(Digits.class_names):
        names = record["class_names"]
        labels = torch.tensor([int(names[sample["label"]]) for sample in record["samples"]])
        result["own_label_accuracy"] = (generated.predictions == labels).double().mean().item()
    write_json(out, result)
    print(describe(result, out))


def extract(images: Images, extractor: Extractor, batch_size: int, what: str) -> ExtractedImages:
    """Features of all images, in order, kept as moments alone."""
    halves = (FeatureMoments(extractor.dimension), FeatureMoments(extractor.dimension))
    predictions, pixels = [], hashlib.sha256()
    for batch in _batches(images, batch_size, what):
        pixels.update(batch.images.numpy().tobytes())
        features = extractor(batch.images)
        for parity, half in enumerate(halves):
            half.update(features.pooled[(parity - batch.start) % 2 :: 2])
        assert features.logits is not None
        predictions.append(features.logits.argmax(dim=1).cpu())
    moments = FeatureMoments(extractor.dimension)
    for half in halves:
        moments.merge(half)
    return ExtractedImages(moments, halves, torch.cat(predictions), pixels.hexdigest())


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


def warnings(images: Images, reference: Images, dimension: int) -> list[str]:
    """What a reader of the number must know before comparing it."""
    found = [
        f"unreliable: {len(side)} {what} images for {dimension} features give a rank-deficient covariance, and the "
        "bias of so few images dominates the value"
        for what, side in (("generated", images), ("reference", reference))
        if len(side) <= dimension
    ]
    found += [
        f"the {what} images are stored lossily ({', '.join(sorted(lossy))}), which moves the distance"
        for what, side in (("generated", images), ("reference", reference))
        if (lossy := {path.suffix.lower() for path in side.paths} & LOSSY_SUFFIXES)
    ]
    return found


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


def _load_if_model(arguments: argparse.Namespace) -> LoadedModel | None:
    source: Path = arguments.source
    protocol = [f"protocol={arguments.protocol}"] if arguments.protocol else []
    if (source / "checkpoints").is_dir() or is_pipeline_folder(source):
        return load_model(source, "ema", [*protocol, *arguments.overrides], arguments.device)
    if protocol or arguments.overrides or arguments.num_images or arguments.seed is not None:
        raise ValueError(
            f"{source}: not a run or a model, so there is nothing to sample; leave out --protocol, --num-images, "
            "--seed and key=value"
        )
    return None


def _sample(model: LoadedModel, arguments: argparse.Namespace) -> Path:
    """Samples a model, with labels as its label_mode says, into a folder of its own."""
    num_images = 1000 if arguments.num_images is None else arguments.num_images
    if num_images < 2:
        raise ValueError(f"--num-images {num_images}: a covariance needs at least 2 images")
    num_classes, seed = len(model.class_names), arguments.seed or 0
    samples = plan_samples(plan_labels(num_images, seed, num_classes, model.config.label_mode), seed, num_classes)
    folder = samples_folder(model, samples)
    print(model.describe())
    prepare_samples(model, samples, folder)
    write_samples(model, samples, folder, arguments.batch_size, rank=0, num_processes=1)
    return folder


def _require_complete(folder: Path, paths: Sequence[Path], num_samples: int) -> None:
    expected = {image_path(folder, index) for index in range(num_samples)}
    missing, others = sorted(expected - set(paths)), sorted(set(paths) - expected)
    if missing:
        raise ValueError(
            f"{folder}: {len(missing)} of {num_samples} images are missing ({missing[0].name} first); "
            "run the sampling command again, it goes on"
        )
    if others:
        raise ValueError(f"{folder}: {others[0]} was not sampled with the others; move it away")


def _require_comparable(name: str, size: tuple[int, ...], reference: Images, extractor_name: str) -> None:
    if tuple(size) != tuple(reference.size):
        raise ValueError(
            f"{name}: images of {size[1]}x{size[0]} pixels, but the reference {reference.name} "
            f"has {reference.size[1]}x{reference.size[0]}; sizes must agree, since the extractor resizes silently"
        )
    if extractor_name == DIGITS and tuple(size) != DigitsImages.size:
        raise ValueError(
            f"{name}: {DIGITS} reads 8x8 digits, not images of {size[1]}x{size[0]} pixels; use --extractor {INCEPTION}"
        )
    if len(reference) < 2:
        raise ValueError(f"{reference.name}: a covariance needs at least 2 images")
