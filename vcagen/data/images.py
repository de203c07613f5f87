"""Finding the images in a folder and turning each into uint8 RGB: one rule for training and for scoring.

An image is a visible file with one of `IMAGE_SUFFIXES`, in upper or lower case. Files and folders whose
name starts with a dot are skipped; links are followed. How a file becomes RGB:

- The EXIF orientation is applied; EXIF data that cannot be read counts as none.
- Gray is repeated to three channels. 16-bit gray is divided by 257 and rounded, so white stays white. Of
  16-bit colour, and of 16-bit gray with alpha, Pillow keeps the high byte.
- Alpha, be it a channel, in a palette or one transparent colour, is composited over white.
- CMYK and YCCK are converted, taking the inks of a JPEG as inverted, as Adobe writes them.
- Palettes are expanded, colour profiles ignored. Of an animation the first frame is used.
- Refused: files that do not decode to the end, floating-point pixels and gray beyond 16 bits (neither says
  what is white), and sizes that Pillow takes for a decompression bomb.
"""

import io
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from tqdm import tqdm

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

# A suffix may name the wrong format of these (ImageNet has a PNG called .JPEG), but none beyond them: Pillow
# hands some others to external programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_TURN_OF_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class ImageFile:
    """An image and its label, an index into `ImageTree.class_names`."""

    path: Path
    label: int


@dataclass(frozen=True)
class ImageTree:
    """The images of a folder of class folders.

    Attributes:
        files: The images, ordered by label, then by path as text.
        class_names: The names of the class folders in label order.
        ignored: Visible files that are not images by their suffix.
    """

    files: tuple[ImageFile, ...]
    class_names: tuple[str, ...]
    ignored: tuple[Path, ...]

    def without(self, bad: Collection[Path]) -> "ImageTree":
        """The tree less some files, such as the ones `check_images` returns; all other labels stay.

        Raises:
            ValueError: If a class is left without images.
        """
        files = tuple(file for file in self.files if file.path not in bad)
        kept = {file.label for file in files}
        lost = [name for label, name in enumerate(self.class_names) if label not in kept]
        if lost:
            raise ValueError(f"no readable image in class {_some(lost)}: repair or remove its folder")
        return ImageTree(files, self.class_names, self.ignored)


def sort_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in label order: by value if all are non-negative integers, else as plain text.

    So "2" comes before "10", and ImageNet's wnids keep their usual order.
    """
    names = sorted(names)
    if all(name.isascii() and name.isdigit() for name in names):
        names.sort(key=int)
    return tuple(names)


def walk_class_folders(root: Path) -> ImageTree:
    """Find the images of a folder that holds one folder per class.

    An image, however deep in its class folder, has that folder's place in `sort_class_names` order as label.
    The result depends on names alone, not on the order in which the disk lists them.

    Raises:
        ValueError: If `root` is not a folder, holds no images or some outside of class folders, or if a class
            folder holds none.
    """
    images, ignored = _images_and_others(root)
    loose = [path for path in images if path.parent == root]
    if loose:
        raise ValueError(f"{loose[0]} lies outside the class folders: put it into one, named after its class")
    class_names = sort_class_names(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    label_of = {name: label for label, name in enumerate(class_names)}
    files = [ImageFile(path, label_of[path.parts[len(root.parts)]]) for path in images]
    files.sort(key=lambda file: file.label)  # stable: images of a class stay ordered by path
    kept = {file.label for file in files}
    empty = [str(root / name) for name in class_names if label_of[name] not in kept]
    if empty:
        raise ValueError(f"no images in class folder {_some(empty)}: add images or remove the folder")
    return ImageTree(tuple(files), class_names, ignored)


def walk_images(root: Path) -> tuple[Path, ...]:
    """All images below a folder, at any depth, ordered by their path as text.

    Raises:
        ValueError: If `root` is not a folder or has no image below it.
    """
    return _images_and_others(root)[0]


def decode_image(path: Path) -> np.ndarray:
    """Read an image file by the rules at the top of this module.

    Returns:
        uint8 (H, W, 3).

    Raises:
        ValueError: If the file cannot be decoded completely, in one line that starts with its path.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    return decode_bytes(content, str(path))


def decode_bytes(content: bytes, name: str) -> np.ndarray:
    """As `decode_image`, for a file's content; `name` starts the error line."""
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            image.load()
            turn = _TURN_OF_ORIENTATION.get(_orientation(image))
            rgb = _to_rgb(image)
        return np.array(rgb if turn is None else rgb.transpose(turn))
    except Exception as error:  # damaged files make Pillow raise OSError, SyntaxError, struct.error ...
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # its own message repeats the path and gives no reason
            reason = "empty, or not an image of a known format"
        raise ValueError(f"{name}: {reason}") from error


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Resize and crop to a square as ADM does: halve while possible, bicubic to `size`, keep the centre.

    Images more than twice as high as wide come out a little different under Pillow before 13.

    Args:
        image: uint8 (H, W, 3) of any size.
        size: Side of the result.

    Returns:
        uint8 (size, size, 3).
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    width, height = round(picture.width * scale), round(picture.height * scale)
    picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.array(picture.crop((left, top, left + size, top + size)))


def check_images(files: Sequence[Path], on_bad: Literal["stop", "skip"]) -> dict[Path, str]:
    """Decode every file once, to find the bad ones before any work is done.

    Returns:
        The bad files in the given order, each with a line that starts with its path and says what is wrong.

    Raises:
        ValueError: If a file is bad and `on_bad` is "stop", which lists them, or if all files are bad.
    """
    bad: dict[Path, str] = {}
    progress = tqdm(total=len(files), desc="checking images", unit="image", delay=2)
    with progress, ThreadPoolExecutor(max_workers=8) as pool:
        for start in range(0, len(files), 1024):  # a pool queues all it is given
            batch = files[start : start + 1024]
            for path, problem in zip(batch, pool.map(_problem, batch), strict=True):
                if problem:
                    bad[path] = problem
                progress.update()
    if bad and (on_bad == "stop" or len(bad) == len(files)):
        advice = "" if len(bad) == len(files) else ", or go on without them by data.on_bad=skip"
        summary = f"{len(bad)} of {len(files)} images are bad: repair or remove them{advice}\n"
        raise ValueError(summary + _some(list(bad.values()), "\n"))
    return bad


def _images_and_others(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The visible files below `root`, images and others, each ordered by path as text."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
        raise ValueError(f"{root} {problem}: give a folder of images")

    def refuse(error: OSError) -> None:  # left to itself, os.walk skips a folder it cannot list
        raise ValueError(f"cannot list {error.filename}: {error.strerror}") from error

    files: list[Path] = []
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        above = [os.path.realpath(root / parent) for parent in Path(folder).relative_to(root).parents]
        if os.path.realpath(folder) in above:  # would be walked again and again
            raise ValueError(f"{folder} is a link to a folder above it: remove the link")
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files.sort(key=Path.as_posix)  # all start with root
    images = tuple(path for path in files if path.suffix.lower() in IMAGE_SUFFIXES)
    if not images:
        raise ValueError(f"no images below {root}: give a folder of {' '.join(sorted(IMAGE_SUFFIXES))}")
    return images, tuple(path for path in files if path.suffix.lower() not in IMAGE_SUFFIXES)


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken metadata beside sound pixels
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels")
    if image.mode.startswith("I"):
        gray = np.asarray(image).astype(np.int64)
        if gray.min() < 0 or gray.max() > 65535:
            raise ValueError("gray beyond 16 bits")
        gray[gray == image.info.get("transparency", -1)] = 65535
        return Image.fromarray(((gray + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _problem(path: Path) -> str | None:
    try:
        decode_image(path)
    except ValueError as error:
        return str(error)
    return None


def _some(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:10] + ([f"and {len(items) - 10} more"] if len(items) > 10 else []))
