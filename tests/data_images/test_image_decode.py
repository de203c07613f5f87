import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from tests.data_images.image_helpers import GREEN, RED, halves
from vcagen.data.images import center_crop, decode_image

PICTURE = halves(RED, GREEN)
PICTURE[:8] //= 2  # so that no flip or turn maps it to itself
CROPS = load_file(Path(__file__).parents[1] / "data/center_crop.safetensors")


def saved(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


STORED = {  # from EXIF: which side of the picture the first row and the first column hold
    1: PICTURE,
    2: PICTURE[:, ::-1],  # top, right
    3: PICTURE[::-1, ::-1],  # bottom, right
    4: PICTURE[::-1],  # bottom, left
    5: PICTURE.swapaxes(0, 1),  # left, top
    6: PICTURE[:, ::-1].swapaxes(0, 1),  # right, top
    7: PICTURE[::-1, ::-1].swapaxes(0, 1),  # right, bottom
    8: PICTURE[::-1].swapaxes(0, 1),  # left, bottom
}


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    path = saved(tmp_path / f"x.{suffix}", np.ascontiguousarray(STORED[orientation]), exif=exif)
    np.testing.assert_array_equal(decode_image(path), PICTURE)


def test_broken_exif_beside_sound_pixels_is_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.jpg", PICTURE, exif=b"Exif\0\0no exif at all", quality=95, subsampling=0)
    assert np.abs(decode_image(path) - PICTURE.astype(int)).max() <= 4


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_16_bit_gray_is_scaled_and_rounded(tmp_path: Path, suffix: str) -> None:
    gray = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.round(gray / 257).astype(np.uint8)[..., None].repeat(3, 2)
    np.testing.assert_array_equal(decode_image(saved(tmp_path / f"x.{suffix}", gray)), expected)


def test_pixels_without_a_white_are_refused(tmp_path: Path) -> None:
    for pixels, reason in (
        (np.full((2, 2), 0.5, np.float32), "floating-point"),
        (np.full((2, 2), 70000, np.int32), "16 bits"),
    ):
        with pytest.raises(ValueError, match=reason):
            decode_image(saved(tmp_path / "x.tif", pixels))


def test_half_transparent_pixels_mix_with_white(tmp_path: Path) -> None:
    rgba = np.array([[[200, 40, 90, 128], [200, 40, 90, 255], [0, 0, 0, 0]]], np.uint8)
    expected = [[[227, 147, 172], [200, 40, 90], [255, 255, 255]]]
    np.testing.assert_array_equal(decode_image(saved(tmp_path / "x.png", rgba)), expected)


def test_gray_and_palette_with_alpha(tmp_path: Path) -> None:
    gray = np.array([[[200, 128], [200, 255], [0, 0]]], np.uint8)
    for suffix in ("png", "tif"):
        path = saved(tmp_path / f"x.{suffix}", gray)
        assert decode_image(path).tolist() == [[[227] * 3, [200] * 3, [255] * 3]]
    palette = Image.new("PA", (2, 1))
    palette.putpalette([*GREEN, *RED])
    palette.putpixel((0, 0), (1, 128))
    palette.putpixel((1, 0), (0, 255))
    palette.save(tmp_path / "palette.tif")
    assert decode_image(tmp_path / "palette.tif").tolist() == [[[227, 147, 172], list(GREEN)]]


@pytest.mark.parametrize(
    ("mode", "clear", "solid"), [("L", 10, 200), ("RGB", (1, 2, 3), (9, 9, 9)), ("I;16", 1000, 51400)]
)
def test_one_transparent_colour(tmp_path: Path, mode: str, clear: object, solid: object) -> None:
    image = Image.new(mode, (2, 1), solid)
    image.putpixel((0, 0), clear)
    image.save(tmp_path / "x.png", transparency=clear)
    left, right = decode_image(tmp_path / "x.png")[0]
    assert left.tolist() == [255, 255, 255]
    assert right.tolist() == ([9, 9, 9] if mode == "RGB" else [200, 200, 200])


def test_palette_with_an_alpha_of_each_entry(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8))
    image.putpalette([*RED, *RED])
    image.save(tmp_path / "x.png", transparency=bytes([255, 128]))
    assert decode_image(tmp_path / "x.png").tolist() == [[[200, 40, 90], [227, 147, 172]]]


def test_one_bit_and_gif_and_bmp(tmp_path: Path) -> None:
    bits = np.array([[True, False]])
    expected = [[[255] * 3, [0] * 3]]
    for suffix in ("png", "gif", "bmp", "tif"):
        assert decode_image(saved(tmp_path / f"x.{suffix}", bits)).tolist() == expected


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_first_frame_of_an_animation(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in (RED, GREEN)]
    frames[0].save(tmp_path / f"x.{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    assert (decode_image(tmp_path / f"x.{suffix}") == RED).all()


def test_ycck_jpeg(tmp_path: Path) -> None:
    """A CMYK file whose pixels are luma and chroma of the inks, as its Adobe marker is then made to say."""
    ycc = np.asarray(Image.fromarray(255 - PICTURE).convert("YCbCr"))
    stored = np.concatenate([ycc, np.full_like(ycc[..., :1], 255)], -1)
    buffer = io.BytesIO()
    Image.fromarray(255 - stored, "CMYK").save(buffer, "JPEG", quality=95)
    content = bytearray(buffer.getvalue())
    content[content.index(b"Adobe") + 11] = 2
    (tmp_path / "x.jpg").write_bytes(content)
    assert np.abs(decode_image(tmp_path / "x.jpg") - PICTURE.astype(int)).max() <= 6


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp", "gif", "tiff", "ppm"])
@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF data")
def test_cut_files_are_refused_in_one_line_that_names_them(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    path = saved(tmp_path / f"x.{suffix}", noise)
    assert decode_image(path).shape == (32, 32, 3)
    content = path.read_bytes()
    for length in (0, 3, 20, len(content) // 2, len(content) * 9 // 10):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"^\S*x\.\w+: .+") as error:
            decode_image(path)
        assert "\n" not in str(error.value)


def test_other_formats_behind_an_image_suffix(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.png", PICTURE, format="JPEG", quality=95)  # ImageNet has one
    assert decode_image(path).shape == PICTURE.shape
    saved(path, PICTURE, format="EPS")
    with pytest.raises(ValueError, match="not an image of a known format"):
        decode_image(path)


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "x.png", PICTURE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"x\.png: .*decompression bomb"):
        decode_image(path)


# Input 3 is more than twice as high as wide: Pillow before 13 resizes such images in another order.
@pytest.mark.parametrize("index", range(4))
def test_center_crop_equals_adm(index: int) -> None:
    cropped = center_crop(CROPS[f"{index}.input"], 32)
    assert cropped.dtype == np.uint8
    np.testing.assert_array_equal(cropped, CROPS[f"{index}.cropped_32"])


def test_center_crop_of_one_pixel_and_of_long_images() -> None:
    assert (center_crop(np.full((1, 1, 3), RED, np.uint8), 32) == RED).all()
    wide = np.concatenate([np.full((8, 8, 3), c, np.uint8) for c in (RED, GREEN, RED)], 1)
    for image in (wide, wide.swapaxes(0, 1)):
        np.testing.assert_array_equal(center_crop(image, 8), np.full((8, 8, 3), GREEN, np.uint8))
    assert center_crop(np.zeros((5, 301, 3), np.uint8), 32).shape == (32, 32, 3)
