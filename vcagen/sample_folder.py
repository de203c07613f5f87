"""A folder of sampled images, `000000.png` and on, with `samples.json`, which says how they were made."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vcagen.data.images import IMAGE_SUFFIXES
from vcagen.files import require_writable, write_image, write_json
from vcagen.generation import LoadedModel, PlannedSample
from vcagen.sampling_config import LabelMode

RECORD_NAME = "samples.json"


def image_path(folder: Path, index: int) -> Path:
    """Where image `index` of a set lies."""
    return folder / f"{index:06d}.png"


def read_record(folder: Path) -> dict[str, Any] | None:
    """Protocol, class names and plan of a sample folder; None for other folders.

    Raises:
        ValueError: the record cannot be read.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); delete the folder and sample again") from error


def prepare_samples(
    model: LoadedModel, samples: Sequence[PlannedSample], folder: Path, label_mode: LabelMode | None = None
) -> None:
    """Makes the folder ready for `write_samples`: a new one, or one that holds a part of the same samples.

    Args:
        model: to sample.
        samples: all of them.
        folder: for the images and their record.
        label_mode: how the labels were drawn, for the record; None where somebody chose them.

    Raises:
        ValueError: it cannot be written, or holds samples of another plan or protocol.
    """
    require_writable(folder)
    record = {
        "protocol": model.protocol,
        "class_names": list(model.class_names),
        "label_mode": label_mode,
        "samples": [sample.model_dump() for sample in samples],
    }
    before = read_record(folder)
    if before is None and any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.rglob("*")):
        raise ValueError(f"{folder}: holds images that were not sampled here; choose an empty folder")
    if before is not None and _identity(before) != _identity(record):
        raise ValueError(f"{folder}: holds other samples already; choose another folder or delete it")
    if before is None:
        write_json(folder / RECORD_NAME, record)


def write_samples(
    model: LoadedModel, samples: Sequence[PlannedSample], folder: Path, batch_size: int, rank: int, num_processes: int
) -> None:
    """Samples what is missing of a prepared folder; a process takes every `num_processes`-th sample."""
    missing = [sample for sample in samples[rank::num_processes] if not image_path(folder, sample.index).exists()]
    for sample, image in model.maker.images(missing, batch_size, progress=rank == 0):
        write_image(image_path(folder, sample.index), image)


def read_samples(samples: Sequence[PlannedSample], folder: Path) -> np.ndarray:
    """Images that `write_samples` wrote, uint8 (N, H, W, 1 or 3)."""
    images = np.stack([np.asarray(Image.open(image_path(folder, sample.index))) for sample in samples])
    return images if images.ndim == 4 else images[..., None]


def _identity(record: dict[str, Any]) -> dict[str, Any]:
    """What makes samples the same: all but the place of the checkpoint, whose weights are there by their hash."""
    protocol = {key: value for key, value in record["protocol"].items() if key != "checkpoint"}
    return {"protocol": protocol, "samples": record["samples"]}
