"""Images with labels in data sets of Hugging Face."""

from pathlib import Path
from typing import Any

from vcagen.cache.records import Record, file_size, names_for, visible_files, whole_label

KEY_COLUMNS = ("key", "__key__", "file_name", "filename")
LABEL_COLUMNS = ("label", "labels", "cls", "class")
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp")

SPLITS = ("train", "test", "validation")  # how the hub names parquet files
SAVED = ("dataset_info.json", "dataset_dict.json")  # what save_to_disk writes


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


def has_dataset(folder: Path) -> bool:
    """Whether a folder holds what `DatasetsSource` reads."""
    saved = any((folder / name).is_file() for name in SAVED)
    return saved or bool(_parquet_files(folder) or visible_files(folder, ".arrow"))


def _parquet_files(folder: Path) -> list[Path]:
    """Those of a folder, or of the folder `data` that a clone from the hub has them in."""
    return visible_files(folder, ".parquet") or visible_files(folder / "data", ".parquet")


def _load_dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{name}: reading it needs the package datasets; pip install 'vcagen[datasets]'") from error
    path = Path(name)
    try:
        if any((path / file).is_file() for file in SAVED):
            return _split_of(datasets.load_from_disk(name), split)
        files = (
            [path] if path.is_file() else visible_files(path, ".parquet") or visible_files(path / "data", ".parquet")
        )
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
