"""A folder of image files as people have them: odd modes, odd suffixes, damage."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

RED, GREEN, WHITE = (200, 40, 90), (20, 160, 60), (255, 255, 255)


def halves(left: tuple[int, int, int], right: tuple[int, int, int]) -> np.ndarray:
    """uint8 (16, 32, 3), so that the two colours do not share a block of a JPEG."""
    image = np.empty((16, 32, 3), np.uint8)
    image[:, :16], image[:, 16:] = left, right
    return image


@dataclass
class OddFiles:
    root: Path
    good: dict[Path, np.ndarray]
    bad: list[Path]
    stray: list[Path]


def write_odd_files(root: Path) -> OddFiles:
    """Three classes; the bad files lie between good ones of the classes "colour" and "gray"."""
    colour, gray, other = root / "colour", root / "gray", root / "other"
    for folder in (colour, gray, other):
        folder.mkdir(parents=True)
    picture = Image.fromarray(halves(RED, GREEN))
    alpha = Image.fromarray(np.where(np.arange(32) < 16, 255, 0)[None].repeat(16, 0).astype(np.uint8))
    good = {}

    def save(path: Path, image: Image.Image, expected: np.ndarray, **options: object) -> None:
        image.save(path, **options)
        good[path] = expected

    save(colour / "rgb.png", picture, halves(RED, GREEN))
    save(colour / "capital.JPEG", picture, halves(RED, GREEN), quality=95, subsampling=0)
    save(colour / "lower.jpeg", picture, halves(RED, GREEN), quality=95, subsampling=0)
    save(colour / "web.webp", picture, halves(RED, GREEN), lossless=True)
    save(colour / "cmyk.jpg", picture.convert("CMYK"), halves(RED, GREEN), quality=95)
    exif = Image.Exif()
    exif[274] = 6  # stored a quarter turn to the left, to be shown upright
    turned = Image.fromarray(np.rot90(halves(RED, GREEN)))
    save(colour / "turned.jpg", turned, halves(RED, GREEN), exif=exif, quality=95, subsampling=0)

    low, high = (60, 60, 60), (200, 200, 200)
    level = halves(low, high)[..., 0]
    save(gray / "8.png", Image.fromarray(level), halves(low, high))
    save(gray / "16.png", Image.fromarray(level.astype(np.uint16) * 257 + 100), halves(low, high))
    save(gray / "alpha.png", Image.merge("LA", [Image.fromarray(level), alpha]), halves(low, WHITE))

    rgba = picture.copy()
    rgba.putalpha(alpha)
    save(other / "rgba.png", rgba, halves(RED, WHITE))
    palette = Image.fromarray((level > 100).astype(np.uint8))
    palette.putpalette([*RED, *GREEN])
    save(other / "palette.png", palette, halves(RED, GREEN))
    save(other / "see_through.png", palette, halves(RED, WHITE), transparency=1)
    save(other / "single.png", Image.new("RGB", (1, 1), RED), np.array([[RED]], np.uint8))

    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(colour / "half.jpg")
    jpeg = (colour / "half.jpg").read_bytes()
    bad = [colour / "half.jpg", gray / "empty.png", gray / "text.png"]
    for path, content in zip(bad, [jpeg[: len(jpeg) // 2], b"", b"not an image"], strict=True):
        path.write_bytes(content)
    stray = [root / "README.md", gray / "notes.txt"]
    for path in [*stray, root / ".DS_Store", gray / ".hidden.png"]:
        path.write_text("not an image")
    return OddFiles(root, good, bad, stray)
