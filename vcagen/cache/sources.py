"""Where images with labels come from: class folders, tar shards, Hugging Face datasets. One interface, one order."""

from pathlib import Path
from typing import Literal

from vcagen.cache.hugging_face import DatasetsSource, has_dataset
from vcagen.cache.records import ImageSource, Record, file_size, visible_files
from vcagen.cache.tars import TarSource
from vcagen.data.images import walk_class_folders

SourceKind = Literal["folder", "tar", "datasets"]


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
    tars = visible_files(path, ".tar") if path.is_dir() else [path] if path.suffix.lower() == ".tar" else []
    if kind is None:
        is_dataset = not path.exists() or path.suffix == ".parquet" or (path.is_dir() and has_dataset(path))
        kind = "tar" if tars else "datasets" if is_dataset else "folder"
    if kind == "tar":
        if path.is_dir() and (compressed := [*visible_files(path, ".gz", ".tgz", ".bz2", ".xz", ".zst")]):
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
