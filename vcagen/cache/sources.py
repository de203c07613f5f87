"""Where images with labels come from: class folders, tar shards, Hugging Face datasets. One interface, one order."""

import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, Protocol

from vcagen.data.images import IMAGE_SUFFIXES, walk_class_folders

SourceKind = Literal["folder", "tar", "datasets"]

KEY_COLUMNS = ("key", "__key__", "file_name", "filename")
LABEL_COLUMNS = ("label", "labels", "cls", "class")
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")


SPLITS = ("train", "test", "validation")  # how the hub names parquet files
SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk writes
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


class FolderSource:
    """One folder per class; the key is the path below the root."""

    def __init__(self, root: Path) -> None:
        tree = walk_class_folders(root)
        self.root = root
        self.class_names = tree.class_names
        self.records = sorted(
            Record(file.label, file.path.relative_to(root).as_posix(), file_size(file.path)) for file in tree.files
        )
        self.ignored = len(tree.ignored)

    def read(self, position: int) -> bytes:
        """See `ImageSource`."""
        return (self.root / self.records[position].key).read_bytes()


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


class DatasetsSource:
    """A Hugging Face data set: saved to disk, parquet files, or a hub id.

    The key is a column named key, __key__, file_name or filename, else the row's number.

    Raises:
        ValueError: `datasets` is not installed, nothing can be loaded, a column is missing, or a key comes twice.
    """

    def __init__(self, name: str, split: str, class_names: tuple[str, ...] | None) -> None:
        self.dataset = _load_dataset(name, split)
        columns = self.dataset.column_names
        image = next((column for column in IMAGE_COLUMNS if column in columns), None)
        label = next((column for column in LABEL_COLUMNS if column in columns), None)
        if image is None or label is None:
            raise ValueError(
                f"{name}: columns are {', '.join(columns)}; expected one of {', '.join(IMAGE_COLUMNS)} and one of "
                f"{', '.join(LABEL_COLUMNS)}"
            )
        import datasets

        if isinstance(self.dataset.features[image], datasets.Image):
            self.dataset = self.dataset.cast_column(image, datasets.Image(decode=False))
        self.image = image
        feature = self.dataset.features[label]
        names = class_names or (tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None)
        labels = [whole_label(value, f"{name}: column {label}") for value in self.dataset[label]]
        keys = self._keys(columns)
        if len(set(keys)) != len(keys):
            raise ValueError(f"{name}: a key comes twice; keys must be unique")
        rows = sorted(range(len(keys)), key=lambda row: (labels[row], keys[row]))
        self.rows = rows
        sizes = self._sizes(name)
        self.records = [Record(labels[row], keys[row], sizes[row]) for row in rows]
        self.class_names = names_for(self.records, names, name)
        self.ignored = 0

    def _keys(self, columns: list[str]) -> list[str]:
        column = next((column for column in KEY_COLUMNS if column in columns), None)
        if column is not None:
            return [str(value) for value in self.dataset[column]]
        return [f"{row:08d}" for row in range(len(self.dataset))]

    def _sizes(self, name: str) -> list[int]:
        """Of the images' files; from Arrow's offsets, so that the images themselves stay on the disk."""
        import pyarrow.compute  # type: ignore[import-untyped]

        sizes: list[int] = []
        for table in self.dataset.select_columns([self.image]).with_format("arrow").iter(batch_size=1000):
            for chunk in table.column(0).chunks:
                is_struct = pyarrow.types.is_struct(chunk.type)
                contents = chunk.field("bytes") if is_struct else chunk
                if not pyarrow.types.is_binary(contents.type) and not pyarrow.types.is_large_binary(contents.type):
                    raise ValueError(f"{name}: column {self.image} holds {chunk.type}; expected image files as bytes")
                paths = chunk.field("path").to_pylist() if is_struct else [None] * len(chunk)
                lengths = pyarrow.compute.binary_length(contents).to_pylist()
                sizes += [
                    length if length is not None else file_size(Path(path)) if path else 0
                    for length, path in zip(lengths, paths, strict=True)
                ]
        return sizes

    def read(self, position: int) -> bytes:
        """See `ImageSource`."""
        value: Any = self.dataset[self.rows[position]][self.image]
        if isinstance(value, bytes):
            return value
        stored = value if isinstance(value, dict) else {}
        if stored.get("bytes") is not None:
            return stored["bytes"]
        if stored.get("path") is None:
            raise ValueError(f"{self.records[position].key}: no image in this row")
        return Path(stored["path"]).read_bytes()


def open_source(
    name: str, kind: SourceKind | None = None, split: str = "train", class_names: tuple[str, ...] | None = None
) -> ImageSource:
    """Opens a source.

    Args:
        name: a folder of class folders, a folder of tar or parquet files, one such file, or a hub id.
        kind: what it is; None looks.
        split: of a Hugging Face data set.
        class_names: in label order, where the source has none of its own.

    Raises:
        ValueError: it is nothing of that kind, or class names were given for class folders, which have their own.
    """
    path = Path(name)
    tars = _visible(path, ".tar") if path.is_dir() else [path] if path.suffix.lower() == ".tar" else []
    if kind is None:
        is_dataset = not path.exists() or path.suffix == ".parquet" or (path.is_dir() and _has_dataset(path))
        kind = "tar" if tars else "datasets" if is_dataset else "folder"
    if kind == "tar":
        if path.is_dir() and (compressed := [*_visible(path, ".gz", ".tgz", ".bz2", ".xz", ".zst")]):
            raise ValueError(
                f"{compressed[0]}: tar files are read at random places, which compressed ones do not allow; decompress "
                "it, or move it elsewhere"
            )
        if not tars or not all(tar.is_file() for tar in tars):
            raise ValueError(f"{name}: no .tar files there")
        return TarSource(tars, class_names)
    if kind == "datasets":
        return DatasetsSource(name, split, class_names)
    if class_names is not None:
        raise ValueError(f"{name}: class folders are named by themselves; leave out --class-names")
    return FolderSource(path)


def _visible(folder: Path, *suffixes: str) -> list[Path]:
    """Files of a folder with one of some suffixes, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if path.suffix.lower() in suffixes and not path.name.startswith("."))


def _has_dataset(folder: Path) -> bool:
    saved = any((folder / name).is_file() for name in SAVED)
    return saved or bool(_visible(folder, ".parquet", ".arrow") or _visible(folder / "data", ".parquet"))


def _load_dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name}: reading it needs the package datasets; pip install 'vcagen[datasets]'") from error
    path = Path(name)
    try:
        if any((path / file).is_file() for file in SAVED):
            return _split_of(datasets.load_from_disk(name), split)
        files = [path] if path.is_file() else _visible(path, ".parquet") or _visible(path / "data", ".parquet")
        if any(file.name.startswith(SPLITS) for file in files) and not path.is_file():
            files = [file for file in files if file.name.startswith(split)]
            if not files:
                raise ValueError(f"no parquet files of split {split}")
        if files and split != "train" and not all(file.name.startswith(split) for file in files):
            raise ValueError(f"names of the parquet files show no split {split}; leave out --split")
        if files:
            return datasets.load_dataset("parquet", data_files=[str(file) for file in files], split="train")
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # its own kinds of error are many
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{name}: neither a folder nor a data set that can be loaded ({reason})") from error


def _split_of(saved: Any, split: str) -> Any:
    """The split of what `save_to_disk` wrote, one split or a `DatasetDict` of several."""
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(f"splits are {', '.join(saved)}; there is no {split}")
        return saved[split]
    # A part of a split is called train[:10], say.
    if saved.split is not None and split not in (str(saved.split), str(saved.split).partition("[")[0]):
        raise ValueError(f"it is split {saved.split}, not {split}; give --split {saved.split}")
    return saved


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


def file_size(path: Path) -> int:
    """Bytes of a file, 0 where it cannot be read; that is found when it is."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


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
