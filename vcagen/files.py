"""Files are written aside and renamed, so that a reader never meets half of one."""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, with its suffix, that replaces it when the block ends well."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with written_aside(path) as aside:
        aside.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_writable(folder: Path, num_bytes: int = 0) -> None:
    """Makes the folder and proves that files can be written there and that the disk has room.

    Raises:
        ValueError: it cannot be made or written, or has less than `num_bytes` free; the line names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
        status = os.statvfs(folder)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    free = status.f_bavail * status.f_frsize
    if free < num_bytes:
        raise ValueError(
            f"{folder}: {free / 1e9:.2f} GB free on this disk, but {num_bytes / 1e9:.2f} GB are needed; "
            "free space or choose another folder"
        )


def require_file_name(path: Path) -> None:
    """Proves that a file of this name can be written; a `ValueError` that says why not."""
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the name of a file")
    require_writable(path.parent)


@contextlib.contextmanager
def locked(folder: Path, busy: str = "another process is training here; choose another run_dir") -> Iterator[None]:
    """Holds the folder for this process alone; the lock ends with the process, however it ends.

    Raises:
        ValueError: another process holds it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder}: {busy}") from error
        yield


def write_image(path: Path, image: np.ndarray) -> None:
    """Writes uint8 (H, W, 1 or 3) as PNG, whole or not at all."""
    with written_aside(path) as aside:
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(aside, format="PNG")


def write_grid(path: Path, images: np.ndarray, columns: int) -> None:
    """Writes uint8 images (N, H, W, 1 or 3) as one PNG, row by row, in their own grey levels.

    Small images are enlarged by a whole factor without smoothing, to tiles of at least 48 pixels; tiles are
    2 pixels apart, on white.
    """
    num, height, width, channels = images.shape
    factor = max(1, 48 // min(height, width))
    tiles = images.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width, gap = height * factor, width * factor, 2
    columns = min(columns, num)
    rows = -(-num // columns)
    canvas = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 255, dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top, left = (index // columns) * (height + gap) + gap, (index % columns) * (width + gap) + gap
        canvas[top : top + height, left : left + width] = tile
    write_image(path, canvas)
