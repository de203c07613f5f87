"""Images with labels in WebDataset's tar shards."""

import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vcagen.cache.records import Record, names_for
from vcagen.data.images import IMAGE_SUFFIXES


@dataclass(frozen=True)
class _Member:
    path: Path
    offset: int
    size: int


class TarSource:
    """WebDataset shards: `NAME.jpg` (or another image suffix) with `NAME.cls`, a number; the key is the image's name.

    NAME ends at the first dot behind the last slash, as WebDataset has it.

    Args:
        paths: uncompressed tar files.
        class_names: in label order; None numbers the classes.

    Raises:
        ValueError: no images, an image without label or a label without image, an image with more than one dot in its
            name, a key twice, or a label beyond the class names.
    """

    def __init__(self, paths: Sequence[Path], class_names: tuple[str, ...] | None) -> None:
        members: dict[str, _Member] = {}
        image_names: dict[str, str] = {}
        labels: dict[str, int] = {}
        self.ignored = 0
        for path in paths:
            for name, member, content in _scan_tar(path):
                folder, _, base = name.rpartition("/")
                stem, _, suffix = base.partition(".")
                sample = f"{folder}/{stem}"
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    if sample in image_names:
                        raise ValueError(f"{path}: two images for {sample.removeprefix('/')}; keys must be unique")
                    image_names[sample], members[name] = name, member
                elif suffix == "cls":
                    labels[sample] = _label(content, f"{path}: {name}")
                elif PurePath(base).suffix.lower() in IMAGE_SUFFIXES:
                    raise ValueError(
                        f"{path}: {name}: WebDataset's names end at the first dot, which makes this .{suffix} of "
                        f"sample {stem}, no image of its own; pack it as NAME.jpg or the like, without other dots"
                    )
                else:
                    self.ignored += 1
        _require_pairs(image_names.keys(), labels.keys(), str(paths[0].parent))
        self.records = sorted(Record(labels[sample], name, members[name].size) for sample, name in image_names.items())
        self.members = members
        self.class_names = names_for(self.records, class_names, str(paths[0].parent))

    def read(self, position: int) -> bytes:
        """See `ImageSource`."""
        member = self.members[self.records[position].key]
        with member.path.open("rb") as file:
            file.seek(member.offset)
            return file.read(member.size)


def _scan_tar(path: Path) -> Any:
    """(name, place, content of .cls files) of every visible file in a tar."""
    try:
        end = 0
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                end = info.offset_data + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                name = re.sub(r"^(\./)+", "", info.name)
                if not info.isfile() or any(part.startswith(".") for part in name.split("/")):
                    continue
                if not _is_utf8(name):
                    raise ValueError(f"{path}: {name!a}: the name is not UTF-8; pack it again with names in UTF-8")
                member = archive.extractfile(info) if name.endswith(".cls") else None
                yield name, _Member(path, info.offset_data, info.size), member.read() if member else b""
        # A damaged header looks like the end to tarfile; a whole archive has zeros there.
        with path.open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.TarError(f"it breaks off or is damaged at byte {end}")
    except (tarfile.TarError, OSError) as error:
        raise ValueError(f"{path}: not a whole, uncompressed tar file ({error})") from error


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # Python stands in for bytes that are no UTF-8
        return False
    return True


def _label(content: bytes, name: str) -> int:
    text = content.decode("ascii", "replace").strip()
    if not text.isdecimal():
        raise ValueError(f"{name}: expected a class number, found {text[:20]!r}")
    return int(text)


def _require_pairs(images: Any, labels: Any, source: str) -> None:
    for one, other, what in [(images, labels, "no .cls for"), (labels, images, "no image for")]:
        lone = sorted(set(one) - set(other))
        if lone:
            more = f" and {len(lone) - 1} more" if len(lone) > 1 else ""
            raise ValueError(f"{source}: {what} {lone[0].removeprefix('/')}{more}")
    if not images:
        raise ValueError(f"{source}: no images in it")
