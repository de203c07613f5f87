"""Sets of uint8 images to take features of: folders, arrays, data sets. Sampled ones are in `fid.sampled`."""

import functools
import hashlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from vcagen.cache.hugging_face import has_dataset
from vcagen.cache.records import visible_files
from vcagen.cache.sources import open_source
from vcagen.data.digits import Digits
from vcagen.data.images import center_crop, check_images, decode_bytes, decode_image, walk_images
from vcagen.sample_folder import image_path, read_record

DIGITS_REFERENCE = "digits"
LOSSY_SUFFIXES = {".jpg", ".jpeg", ".webp"}
READERS = 8
UNREADABLE = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, OSError)  # what a damaged npz raises


@dataclass(frozen=True)
class About:
    """What a set of images is, beside its pixels.

    Attributes:
        name: of the set, in messages and results.
        num_images: N.
        size: (height, width) of its images, pixels.
        labels: (N,) what each image was asked to be, or None where nobody knows.
        class_names: of the labels, or None.
        sampling: how the images came about, where that is known.
        by_class: whether the order may go by class, so that splits of the set would not be like the whole.
        suffixes: the kinds of files, lower case.
    """

    name: str
    num_images: int
    size: tuple[int, int]
    labels: NDArray[np.integer] | None = None
    class_names: Sequence[str] | None = None
    sampling: dict[str, Any] | None = None
    by_class: bool = False
    suffixes: frozenset[str] = frozenset()


class Images(Protocol):
    """Uint8 images of one size, each found by its index.

    Attributes:
        about: the set.
        from_files: whether `batch` may be called from another thread, ahead of its use.
    """

    about: About
    from_files: bool

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """The images at `indices`, (B, 3, H, W); a `ValueError` for one that cannot be read."""

    def identity(self) -> dict[str, Any]:
        """What makes the set the same, without reading the pixels."""


class FolderImages:
    """The images below a folder, in the order of their paths.

    Args:
        folder: where they are.
        crop: side of the centre crop of training to bring them to, pixels; None takes them as they are.
        check: whether to decode all files now, to find the bad ones before any work; one process of many does.

    Raises:
        ValueError: no images, some that cannot be decoded or are of another size, or a sample folder that is not
            complete; at construction, so before any feature is computed.
    """

    from_files = True

    def __init__(self, folder: Path, crop: int | None = None, check: bool = True) -> None:
        self.folder, self.crop = folder, crop
        self.paths = walk_images(folder)
        self.about = About(
            name=str(folder) if crop is None else f"{folder}, centre-cropped to {crop}x{crop}",
            num_images=len(self.paths),
            size=(crop, crop) if crop else self._size(self.paths[0]),
            by_class=True,
            suffixes=frozenset(path.suffix.lower() for path in self.paths),
        )
        record = read_record(folder)
        if record is not None:
            _require_complete(folder, self.paths, len(record["samples"]))
            self.about = replace(
                self.about,
                labels=np.array([sample["label"] for sample in record["samples"]]),
                class_names=record["class_names"],
                sampling={
                    **record["protocol"],
                    "seed": record["samples"][0]["seed"],
                    "label_mode": record.get("label_mode"),
                },
                by_class=record.get("label_mode") is None,  # labels that were drawn are in no order
            )
        for path in self.paths if crop is None else ():  # by the headers, before anything is decoded
            self._require_size(path, self._size(path))
        bad = check_images(self.paths, "skip") if check else {}
        if bad:
            raise ValueError(f"{folder}: {len(bad)} files cannot be used: {'; '.join(list(bad.values())[:10])}")
        self.pool = ThreadPoolExecutor(READERS)

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `Images`."""
        return np.stack(list(self.pool.map(self._image, indices)))

    def identity(self) -> dict[str, Any]:
        """Names, sizes and times of the files."""
        listing = hashlib.sha256()
        for path in self.paths:
            status = path.stat()
            listing.update(f"{path.relative_to(self.folder)}\n{status.st_size} {status.st_mtime_ns}\n".encode())
        return {"folder": str(self.folder.resolve()), "crop": self.crop, "files_sha256": listing.hexdigest()}

    def _image(self, index: int) -> NDArray[np.uint8]:
        image = decode_image(self.paths[index])
        if self.crop is not None:
            image = center_crop(image, self.crop)
        else:
            self._require_size(self.paths[index], image.shape[:2])
        return image.transpose(2, 0, 1)

    def _size(self, path: Path) -> tuple[int, int]:
        try:
            with Image.open(path) as image:
                if image.width == image.height:
                    return image.size  # however it is turned; asking for that makes Pillow decode a PNG
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(5, 9)
                return image.size if turned else image.size[::-1]
        except Exception:  # as many kinds as there are ways of damage; decoding says what is wrong
            return decode_image(path).shape[:2]

    def _require_size(self, path: Path, size: tuple[int, ...]) -> None:
        height, width = self.about.size
        if tuple(size) != (height, width):
            raise ValueError(
                f"{path}: {size[1]}x{size[0]} pixels, but {self.paths[0]} has {width}x{height}; "
                "bring all images to one size first"
            )


class DatasetImages:
    """The images of tar shards or of a Hugging Face data set, centre-cropped, as a latent cache takes them.

    Raises:
        ValueError: what is there cannot be read, or `crop` is not given.
    """

    from_files = True

    def __init__(self, source: str, crop: int | None) -> None:
        if crop is None:
            raise ValueError(
                f"{source}: a data set's images are brought to one size, which a reference's --crop says, such as "
                "--crop 256; to score them, unpack them into a folder"
            )
        self.source, self.crop = open_source(source), crop
        self.where = str(Path(source).resolve()) if Path(source).exists() else source
        records = self.source.records
        self.about = About(
            name=f"{source}, centre-cropped to {crop}x{crop}",
            num_images=len(records),
            size=(crop, crop),
            labels=np.array([record.label for record in records]),
            class_names=self.source.class_names,
            by_class=True,
            suffixes=frozenset(Path(record.key).suffix.lower() for record in records),
        )
        self.pool = ThreadPoolExecutor(READERS)

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `Images`."""
        return np.stack(list(self.pool.map(self._image, indices)))

    def identity(self) -> dict[str, Any]:
        """Labels, keys and sizes of its records."""
        lines = "\n".join(f"{label} {key} {size}" for label, key, size in self.source.records)
        path = Path(self.where)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        return {
            "source": self.where,
            "crop": self.crop,
            "records_sha256": hashlib.sha256(lines.encode()).hexdigest(),
            "modified": max((file.stat().st_mtime_ns for file in files), default=0),
        }

    def _image(self, index: int) -> NDArray[np.uint8]:
        image = decode_bytes(self.source.read(index), self.source.records[index].key)
        return center_crop(image, self.crop).transpose(2, 0, 1)


class DigitsImages:
    """The real digits, 8x8 or enlarged to 16x16, three equal channels."""

    from_files = True

    def __init__(self, size: int = 8) -> None:
        self.data = Digits(size)
        enlarged = "" if size == 8 else f", enlarged to {size}x{size}"
        self.about = About(
            name=f"digits (scikit-learn, 1797 real images{enlarged})",
            num_images=len(self.data),
            size=(size, size),
            labels=self.data.labels,
            class_names=Digits.class_names,
        )

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `Images`."""
        return np.stack([self.data.image(index) for index in indices]).repeat(3, axis=1)

    def identity(self) -> dict[str, Any]:
        """The data set's hash."""
        return {"digits": self.data.fingerprint}


class NpzImages:
    """`arr_0` of an npz, uint8 (N, H, W, 3), as ADM's evaluator takes samples and references; read image by image.

    Raises:
        ValueError: there is no such array, or it holds something else.
    """

    from_files = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                with archive.open("arr_0.npy") as file:
                    shape, _, dtype = _read_header(file)
                names = archive.namelist()
                labels = _member(archive, "arr_1.npy") if "arr_1.npy" in names else None
        except UNREADABLE as error:
            raise ValueError(f"{path}: not an npz with images in arr_0 ({' '.join(str(error).split())})") from error
        if dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or 0 in shape:
            raise ValueError(f"{path}: arr_0 is {dtype} {shape}; expected uint8 (N, H, W, 3), levels 0..255")
        if labels is not None and labels.shape != (shape[0],):
            raise ValueError(f"{path}: arr_1 has shape {labels.shape}; expected one label per image of arr_0")
        self.about = About(str(path), shape[0], (shape[1], shape[2]), labels)

    @functools.cached_property
    def array(self) -> NDArray[np.uint8]:
        """The images on disk, (N, H, W, 3); compressed ones are unpacked when the first is asked for."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                return _mapped_member(archive, "arr_0.npy")
        except UNREADABLE as error:
            raise ValueError(f"{self.path}: arr_0 cannot be read ({' '.join(str(error).split())})") from error

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `Images`."""
        return np.ascontiguousarray(self.array[list(indices)].transpose(0, 3, 1, 2))

    def identity(self) -> dict[str, Any]:
        """Size and time of the file."""
        status = self.path.stat()
        return {"npz": str(self.path.resolve()), "bytes": status.st_size, "modified": status.st_mtime_ns}


def open_images(source: str, crop: int | None, check: bool = True) -> Images:
    """The images that a name on the command line means: `digits`, an npz, a folder, or tar or parquet files."""
    path = Path(source)
    if crop is not None and crop < 1:
        raise ValueError(f"--crop {crop}: must be at least 1")
    if not source:
        raise ValueError("an empty name: give a folder, a file or digits")
    if source == DIGITS_REFERENCE:
        if path.exists():
            raise ValueError(
                f"{source} is a folder here and the embedded data set too; write ./{source} for the folder"
            )
        return DigitsImages(16 if crop == 16 else 8)
    if path.suffix == ".npz":
        return NpzImages(path)
    shards = path.is_dir() and (bool(visible_files(path, ".tar")) or has_dataset(path))
    if shards or path.suffix in (".tar", ".parquet"):
        return DatasetImages(source, crop)
    return FolderImages(path, crop, check)


def split_positions(images: Images) -> NDArray[np.int64]:
    """Each image's place in the order that splits go by: its own, as ADM's, or a fixed shuffle's if that is by class.

    Shape (N,), int64.
    """
    places = np.arange(images.about.num_images)
    return np.random.default_rng(0).permutation(places) if images.about.by_class else places


def _member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _mapped_member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of an npz on disk: one stored as it is is mapped in place; a compressed one is unpacked beside /tmp."""
    info = archive.getinfo(name)
    path = archive.filename
    assert path is not None
    if info.compress_type == zipfile.ZIP_STORED:
        with open(path, "rb") as file:
            file.seek(info.header_offset + 26)  # lengths of name and extra field, which precede the content
            name_length, extra_length = np.frombuffer(file.read(4), dtype="<u2").tolist()
            file.seek(info.header_offset + 30 + name_length + extra_length)
            return _map_array(file, path)
    with tempfile.NamedTemporaryFile(suffix=".npy") as unpacked:
        with archive.open(info) as member:
            shutil.copyfileobj(member, unpacked)
        unpacked.seek(0)
        return _map_array(unpacked, unpacked.name)  # the map outlives the name


def _map_array(file: Any, path: str) -> NDArray[Any]:
    shape, fortran_order, dtype = _read_header(file)
    return np.memmap(path, dtype, "r", offset=file.tell(), shape=shape, order="F" if fortran_order else "C")


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and type of the .npy array that begins here."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


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
