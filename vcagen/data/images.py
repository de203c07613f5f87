"""Finding the images in a folder and turning each into uint8 RGB: one rule for training and for scoring.

An image is a visible file with one of `IMAGE_SUFFIXES`, in any case. Names that start with a dot are skipped; links are
followed.

How a file becomes RGB:

- The EXIF orientation is applied. EXIF data that cannot be read counts as none.
- Gray is repeated to three channels. 16-bit gray is scaled by 1/257 and rounded, so that white stays white. In 16-bit
  colour, and in gray with alpha, Pillow keeps the high byte.
- Alpha, in a channel, a palette or a transparent colour, is composited over white.
- Palettes are expanded; CMYK and YCCK are converted, with JPEG inks stored inverted as Adobe does. Colour profiles are
  ignored.
- Of an animation the first frame is used.
- Refused: files that do not decode to the last row, floating-point pixels and gray beyond 16 bits (they name no white),
  and pictures so large that Pillow takes them for a decompression bomb.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from tqdm import tqdm

IMAGE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
)  # lower-case; compared without case

# A suffix may lie about the format within this list (ImageNet has a PNG called .JPEG), but not beyond it: some of
# Pillow's other readers start programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by EXIF orientation
_CHECK_THREADS = 8
_CHECK_BATCH = 1024
_MOST_LISTED = 10


@dataclass(frozen=True)
class ImageFile:
    """One image and the class it belongs to.

    Attributes:
        path: The file.
        label: Index of its class in `ImageTree.class_names`.
    """

    path: Path
    label: int


@dataclass(frozen=True)
class ImageTree:
    """The images of a folder of class folders.

    Attributes:
        files: The images, ordered by label, then by path as text.
        class_names: Names of the class folders; a label is an index into this.
        ignored: Visible files that are not images by their suffix.
    """

    files: tuple[ImageFile, ...]
    class_names: tuple[str, ...]
    ignored: tuple[Path, ...]

    def without(self, bad: Collection[Path]) -> "ImageTree":
        """The same tree less some files; class names and the labels of the other files stay.

        Args:
            bad: Paths to leave out, such as the keys that `check_images` returns.

        Raises:
            ValueError: If a class is left without images.
        """
        files = tuple(file for file in self.files if file.path not in bad)
        kept = {file.label for file in files}
        lost = [name for label, name in enumerate(self.class_names) if label not in kept]
        if lost:
            raise ValueError(
                f"no readable image is left in the class {_listed(lost)}: repair its files or remove the folder"
            )
        return ImageTree(files, self.class_names, self.ignored)


def sort_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in label order: by value if every name is a non-negative integer, else as plain text.

    So "2" comes before "10", and ImageNet's wnids keep their usual order.
    """
    names = sorted(names)
    if all(name.isascii() and name.isdigit() for name in names):
        names.sort(key=int)
    return tuple(names)


def walk_class_folders(root: Path) -> ImageTree:
    """Find the images of a folder that holds one folder per class.

    The label of an image is the index, in `sort_class_names` order, of the class folder that it lies in at any depth.
    The result depends on names only, never on the order in which the disk lists them.

    Args:
        root: The folder of class folders.

    Raises:
        ValueError: If `root` is not a folder, has no class folders or no images, has images beside its class folders,
            or has a class folder without images.
    """
    images, ignored = _find(root)
    class_names = sort_class_names(
        entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )
    loose = [path for path in images if path.parent == root]
    if not class_names and loose:
        raise ValueError(f"the images lie directly in {root}: move them into one folder per class")
    if not class_names:
        raise ValueError(f"no class folders in {root}: name a folder that holds one folder of images per class")
    if not images:
        raise ValueError(f"no images below {root}: its class folders must hold files {_suffixes()}")
    if loose:
        raise ValueError(f"{loose[0]} lies beside the class folders: move it into one of them or remove it")
    label_of = {name: label for label, name in enumerate(class_names)}
    files = [ImageFile(path, label_of[path.relative_to(root).parts[0]]) for path in images]
    files.sort(key=lambda file: file.label)  # stable: within a class the order by path stays
    used = {file.label for file in files}
    empty = [str(root / name) for name in class_names if label_of[name] not in used]
    if empty:
        raise ValueError(f"no images in the class folder {_listed(empty)}: add some or remove the folder")
    return ImageTree(tuple(files), class_names, ignored)


def walk_images(root: Path) -> tuple[Path, ...]:
    """All images below a folder at any depth, ordered by their path relative to it as text.

    Raises:
        ValueError: If `root` is not a folder or there is no image below it.
    """
    images, _ = _find(root)
    if not images:
        raise ValueError(f"no images below {root}: name a folder that holds files {_suffixes()}")
    return images


def decode_image(path: Path) -> np.ndarray:
    """Read an image file as RGB by the rules at the top of this module.

    Args:
        path: The file.

    Returns:
        uint8 (H, W, 3).

    Raises:
        ValueError: If the file cannot be decoded completely; the one-line message starts with its path.
    """
    try:
        with Image.open(path, formats=_FORMATS) as image:
            image.load()
            turn = _UPRIGHT.get(_orientation(image))
            image = _to_rgb(image)
        return np.array(image if turn is None else image.transpose(turn))
    except UnidentifiedImageError as error:
        reason = "not an image of a known format" if path.stat().st_size else "the file is empty"
        raise ValueError(f"{path}: {reason}") from error
    except Exception as error:  # Pillow raises many types on damaged files: OSError, SyntaxError, struct.error, ...
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: {reason}") from error


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Resize and crop to a square as ADM does: halve by averaging while possible, go bicubic to `size`, cut the centre.

    Args:
        image: uint8 (H, W, 3), of any size.
        size: Side of the result in pixels.

    Returns:
        uint8 (size, size, 3).
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    resized = (round(picture.width * scale), round(picture.height * scale))
    picture = picture.resize(resized, Image.Resampling.BICUBIC)
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    return np.array(picture.crop((left, top, left + size, top + size)))


def check_images(files: Sequence[Path], on_bad: Literal["stop", "skip"]) -> dict[Path, str]:
    """Decode every file once, so that a damaged one is found before any work is done.

    Args:
        files: The images to try.
        on_bad: "stop" raises if any file is bad; "skip" returns the bad ones for the caller to drop and report.

    Returns:
        The bad files in the order of `files`, each with a one-line message that names it.

    Raises:
        ValueError: If a file is bad and `on_bad` is "stop", or if no file can be decoded.
    """
    bad: dict[Path, str] = {}
    with (
        ThreadPoolExecutor(_CHECK_THREADS) as pool,
        tqdm(total=len(files), desc="checking images", unit="image", delay=2) as progress,
    ):
        for start in range(0, len(files), _CHECK_BATCH):  # in batches, or a million tasks would wait in memory
            batch = files[start : start + _CHECK_BATCH]
            for path, problem in zip(batch, pool.map(_problem, batch), strict=True):
                if problem is not None:
                    bad[path] = problem
                progress.update()
    if bad and (on_bad == "stop" or len(bad) == len(files)):
        advice = "" if len(bad) == len(files) else ", or leave them out with data.on_bad=skip"
        raise ValueError(
            f"{len(bad)} of {len(files)} images cannot be decoded: repair or remove them{advice}\n"
            + _listed(list(bad.values()), separator="\n")
        )
    return bad


def _find(root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The visible files below `root`, images and others, each ordered by relative path as text."""
    if not root.exists():
        raise ValueError(f"{root} does not exist: name a folder of images")
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: name a folder of images")
    found = sorted(_visible_files(root), key=lambda path: path.relative_to(root).as_posix())
    images = tuple(path for path in found if path.suffix.lower() in IMAGE_SUFFIXES)
    return images, tuple(path for path in found if path.suffix.lower() not in IMAGE_SUFFIXES)


def _visible_files(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:  # os.walk would leave out a folder it cannot list and say nothing
        raise ValueError(f"cannot list {error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=True):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # broken metadata beside sound pixels, in as many exception types as damaged files
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating-point pixels")
    if image.mode.startswith("I"):
        gray = np.asarray(image).astype(np.int64)
        if gray.min() < 0 or gray.max() > 65535:
            raise ValueError("gray values beyond 16 bits")
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


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    more = len(items) - _MOST_LISTED
    return separator.join([*items[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])])


def _suffixes() -> str:
    return " ".join(sorted(IMAGE_SUFFIXES))
