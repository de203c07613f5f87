"""What images with labels are, whatever they come from."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MOST_CLASSES = 100_000  # without names; more is a column of something else


class Record(NamedTuple):
    """An image of a source; records are ordered by label, then key, whatever they come from.

    Attributes:
        label: index into the class names.
        key: its name.
        size: bytes of its file, so that most replaced images are noticed; 0 where there is none to be read.
    """

    label: int
    key: str
    size: int


class ImageSource(Protocol):
    """Images with labels.

    Attributes:
        records: in order; keys are unique.
        class_names: in label order.
        ignored: things that lie there and are not images, for the report.
    """

    records: list[Record]
    class_names: tuple[str, ...]
    ignored: int

    def read(self, position: int) -> bytes:
        """The image file's bytes at a position of `records`; a `ValueError` or `OSError` where it cannot be read."""


def file_size(path: Path) -> int:
    """Bytes of a file, 0 where it cannot be read; that is found when it is."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def visible_files(folder: Path, *suffixes: str) -> list[Path]:
    """Files of a folder with one of some suffixes, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if path.suffix.lower() in suffixes and not path.name.startswith("."))


def names_for(records: Sequence[Record], names: tuple[str, ...] | None, source: str) -> tuple[str, ...]:
    """The given names or, without, the labels as text.

    Raises:
        ValueError: there are no records, a label has no name, or a name comes twice.
    """
    if not records:
        raise ValueError(f"{source}: no images in it")
    highest = max(record.label for record in records)
    if names is not None and highest >= len(names):
        raise ValueError(f"{source}: labels up to {highest}, but {len(names)} class names; labels count from 0")
    twice = next((name for name, count in Counter(names or ()).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{source}: class name {twice!r} comes twice; every class needs its own")
    if names is None and highest >= MOST_CLASSES:
        raise ValueError(f"{source}: labels up to {highest} are no class numbers; number the classes from 0")
    return names or tuple(str(label) for label in range(highest + 1))


def whole_label(value: Any, where: str) -> int:
    """A label as a whole number from 0; a `ValueError` that says where for all else."""
    try:
        if value is None or isinstance(value, str) or float(value) != int(value) or value < 0:
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {value!r} is not a class number (classes count from 0)") from error
