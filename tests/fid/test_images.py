"""Sets of images: which, in which order, of which size, and what is refused before any feature is taken."""

import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fid import images as module
from fid.images import DatasetImages, DigitsImages, FolderImages, NpzImages, open_images, split_positions
from tests.cache.helpers import write_tars, write_tree
from tests.data_images.image_helpers import write_odd_files
from vcagen.data.digits import Digits
from vcagen.data.images import center_crop, decode_image

Pixels = NDArray[np.uint8]


def random_images(n: int = 5, height: int = 6, width: int = 4) -> Pixels:
    """uint8 (N, H, W, 3)."""
    return np.random.default_rng(0).integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def write_folder(folder: Path, images: Pixels, suffix: str = ".png") -> Path:
    folder.mkdir(parents=True)
    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{index:03d}{suffix}")
    return folder


def channels_last(batch: Pixels) -> Pixels:
    return batch.transpose(0, 2, 3, 1)


def write_member(archive: zipfile.ZipFile, name: str, array: NDArray[Any], version: tuple[int, int] = (1, 0)) -> None:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, version)
    archive.writestr(name, content.getvalue())


# npz


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npz_is_read_image_by_image(tmp_path: Path, save: Any, order: str) -> None:
    pixels = random_images()
    save(tmp_path / "a.npz", arr_0=np.asarray(pixels, order=order), arr_1=np.arange(5))
    images = NpzImages(tmp_path / "a.npz")
    assert (images.about.num_images, images.about.size) == (5, (6, 4))
    assert images.about.labels is not None
    assert images.about.labels.tolist() == [0, 1, 2, 3, 4]
    batch = images.batch([4, 0])
    assert (batch.dtype, batch.shape) == (np.uint8, (2, 3, 6, 4))
    assert (channels_last(batch) == pixels[[4, 0]]).all()
    assert isinstance(images.array, np.memmap)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arr_0_is_found_at_any_place_of_the_zip_and_labels_may_be_missing(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    pixels = random_images()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        write_member(archive, "mu.npy", np.zeros(7))
        write_member(archive, "arr_0.npy", pixels, version)
        write_member(archive, "sigma.npy", np.zeros(3))
    images = NpzImages(tmp_path / "a.npz")
    assert (channels_last(images.batch([0, 1, 2, 3, 4])) == pixels).all()
    assert images.about.labels is None


def test_a_compressed_npz_is_unpacked_only_for_its_images_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", arr_0=random_images())
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))  # unpacking would fail
    images = NpzImages(tmp_path / "a.npz")
    assert images.about.num_images == 5
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert (channels_last(images.batch([3])) == random_images()[[3]]).all()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"arr_0": np.zeros((2, 4, 4, 3))}, r"arr_0 is float64 \(2, 4, 4, 3\); expected uint8 \(N, H, W, 3\)"),
        ({"arr_0": np.zeros((2, 3, 4, 4), np.uint8)}, r"arr_0 is uint8 \(2, 3, 4, 4\); expected"),
        ({"arr_0": np.zeros((2, 4, 4, 1), np.uint8)}, r"arr_0 is uint8 \(2, 4, 4, 1\); expected"),
        ({"arr_0": np.zeros((4, 4, 3), np.uint8)}, r"arr_0 is uint8 \(4, 4, 3\); expected"),
        ({"arr_0": np.zeros((0, 4, 4, 3), np.uint8)}, r"arr_0 is uint8 \(0, 4, 4, 3\); expected"),
        ({"arr_0": np.array([None, 1], dtype=object)}, "arr_0 is object"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8)}, "not an npz with images in arr_0 .*arr_0"),
        ({"arr_0": random_images(), "arr_1": np.arange(4)}, r"arr_1 has shape \(4,\); expected one label per image"),
        ({"arr_0": random_images(), "arr_1": np.eye(5)}, r"arr_1 has shape \(5, 5\); expected one label per image"),
    ],
)
def test_an_npz_of_something_else_is_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=rf"a\.npz: {message}") as raised:
        NpzImages(tmp_path / "a.npz")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"not an npz", None])
def test_a_file_that_is_no_npz_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: not an npz with images in arr_0"):
        NpzImages(path)


def test_damage_within_a_compressed_array_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, arr_0=random_images(50, 20, 20))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = bytes(2000)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: arr_0 cannot be read \(.+\)") as raised:
        NpzImages(path).batch([0])
    assert "\n" not in str(raised.value)


# Folders


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/1.png", "a/10.png", "a/2.PNG", "c.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (5, 3), (sum(map(ord, name)) % 256, 0, 0)).save(path, "png")
    (tmp_path / "notes.txt").write_text("not an image")
    images = FolderImages(tmp_path)
    names = ["a/10.png", "a/2.PNG", "b/1.png", "c.png"]
    assert [path.relative_to(tmp_path).as_posix() for path in images.paths] == names
    assert (images.about.num_images, images.about.size) == (4, (3, 5))
    assert images.about.suffixes == {".png"}
    batch = images.batch([3, 0, 1, 2])
    assert batch.shape == (4, 3, 3, 5)
    assert batch[:, 0, 0, 0].tolist() == [sum(map(ord, names[index])) % 256 for index in (3, 0, 1, 2)]


def test_a_turned_image_has_the_size_it_is_shown_with(tmp_path: Path) -> None:
    upright = random_images(1, 6, 4)[0]
    Image.fromarray(upright).save(tmp_path / "a.png")
    for orientation in (3, 6, 8, 9):  # the last is none
        exif = Image.Exif()
        exif[274] = orientation
        turns = {3: 2, 6: 1, 8: 3, 9: 0}[orientation]
        for suffix, options in ((".png", {}), (".jpg", {"quality": 95})):
            path = tmp_path / f"{orientation}{suffix}"
            Image.fromarray(np.rot90(upright, turns)).save(path, exif=exif, **options)
    images = FolderImages(tmp_path)
    batch = channels_last(images.batch(range(len(images.paths))))
    assert batch.shape == (9, 6, 4, 3)
    for path, image in zip(images.paths, batch, strict=True):
        if path.suffix == ".png":
            assert (image == upright).all(), path


def test_the_odd_sized_file_is_found_by_the_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "images", random_images(50, 8, 8))
    Image.new("RGB", (8, 9)).save(folder / "031.png")

    def decode(path: Path) -> Pixels:
        raise AssertionError(f"{path} was decoded")

    monkeypatch.setattr(module, "decode_image", decode)
    message = r"031\.png: 8x9 pixels, but .*000\.png has 8x8; bring all images to one size first"
    for check in (True, False):
        with pytest.raises(ValueError, match=message):
            FolderImages(folder, check=check)


def test_a_file_that_says_another_size_than_it_has_is_found_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", random_images(3, 8, 8))
    images = FolderImages(folder)
    Image.new("RGB", (8, 9)).save(folder / "001.png")  # changed since
    with pytest.raises(ValueError, match=r"001\.png: 8x9 pixels"):
        images.batch([0, 1])


def test_odd_files_are_read_as_by_training(tmp_path: Path) -> None:
    odd = write_odd_files(tmp_path / "odd")
    with pytest.raises(ValueError, match="3 files cannot be used: ") as raised:
        FolderImages(odd.root, crop=16)
    for path in odd.bad:
        assert str(path) in str(raised.value)
        path.unlink()
    images = FolderImages(odd.root, crop=16)
    assert sorted(images.paths) == sorted(odd.good)
    assert images.about.size == (16, 16)
    assert images.about.name == f"{odd.root}, centre-cropped to 16x16"
    batch = channels_last(images.batch(range(len(images.paths))))
    for path, image in zip(images.paths, batch, strict=True):
        assert (image == center_crop(decode_image(path), 16)).all(), path
    (odd.root / "other/single.png").unlink()  # the only one of another size
    whole = FolderImages(odd.root)
    assert whole.about.size == (16, 32)
    for path, image in zip(whole.paths, channels_last(whole.batch(range(len(whole.paths)))), strict=True):
        lossy = path.suffix.lower() in (".jpg", ".jpeg")
        assert np.abs(image.astype(int) - odd.good[path]).max() <= (8 if lossy else 0), path


def test_bad_files_of_a_folder_are_found_at_the_start_by_the_checking_process(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", random_images(4, 8, 8))
    half = (folder / "002.png").read_bytes()
    (folder / "002.png").write_bytes(half[: len(half) // 2])  # its header is whole
    with pytest.raises(ValueError, match=r"1 files cannot be used: .*002\.png"):
        FolderImages(folder)
    images = FolderImages(folder, check=False)
    with pytest.raises(ValueError, match=r"002\.png"):
        images.batch([2])


@pytest.mark.parametrize("crop", [None, 4])
def test_a_folder_that_changes_is_another_set(tmp_path: Path, crop: int | None) -> None:
    folder = write_folder(tmp_path / "images", random_images(3, 8, 8))
    before = FolderImages(folder, crop).identity()
    assert FolderImages(folder, crop).identity() == before
    assert json.loads(json.dumps(before)) == before
    Image.new("RGB", (8, 8)).save(folder / "001.png")
    assert FolderImages(folder, crop).identity() != before


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no images below"):
        FolderImages(tmp_path)
    with pytest.raises(ValueError, match="missing does not exist"):
        FolderImages(tmp_path / "missing")


# Data sets


def test_tars_are_read_as_by_a_latent_cache(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", 3, 2)
    tars = write_tars(tree, tmp_path / "tars")
    images = open_images(str(tars), 32)
    assert isinstance(images, DatasetImages)
    assert (images.about.num_images, images.about.size) == (6, (32, 32))
    assert images.about.labels is not None
    assert images.about.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert images.about.suffixes == {".png"}
    expected = FolderImages(tree, crop=32).batch(range(6))
    assert (images.batch(range(6)) == expected).all()
    single = open_images(str(tars / "part-0.tar"), 32)
    assert single.about.num_images == 3
    assert images.identity() != single.identity()
    assert images.identity() == open_images(str(tars), 32).identity()


def test_tars_need_a_size(tmp_path: Path) -> None:
    tars = write_tars(write_tree(tmp_path / "tree", 2, 1), tmp_path / "tars")
    with pytest.raises(
        ValueError, match="tars: a data set's images are brought to one size, which a reference's --crop"
    ):
        open_images(str(tars), None)


def test_a_damaged_image_of_a_tar_is_named(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", 2, 1)
    (tree / "1/0.png").write_bytes(b"damaged")
    images = open_images(str(write_tars(tree, tmp_path / "tars")), 32)
    assert images.batch([0]).shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"1/0\.png: empty, or not an image"):
        images.batch([1])


def test_parquet_files_are_read_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pixels = random_images(4, 8, 8)
    content = {"image": [Image.fromarray(image) for image in pixels], "label": [1, 0, 1, 0]}
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict(content).to_parquet(tmp_path / "set/train.parquet")
    for source in (tmp_path / "set", tmp_path / "set/train.parquet"):
        images = open_images(str(source), 8)
        assert isinstance(images, DatasetImages)
        assert (channels_last(images.batch(range(4))) == pixels[[1, 3, 0, 2]]).all()


# All


def test_digits_have_three_equal_channels() -> None:
    images = open_images("digits", None)
    assert isinstance(images, DigitsImages)
    batch = images.batch([3, 700])
    assert batch.shape == (2, 3, 8, 8)
    assert (batch == np.stack([Digits().image(3), Digits().image(700)])).all()
    assert images.about.num_images == 1797


def test_a_name_means_one_kind_of_set(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", random_images(2))
    np.savez(tmp_path / "a.npz", arr_0=random_images())
    assert isinstance(open_images(str(folder), None), FolderImages)
    assert isinstance(open_images(str(tmp_path / "a.npz"), None), NpzImages)
    for crop in (0, -8):
        with pytest.raises(ValueError, match=f"--crop {crop}: must be at least 1"):
            open_images(str(folder), crop)


def test_splits_go_by_the_sets_own_order_unless_that_may_be_by_class(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", arr_0=random_images(40))
    assert split_positions(NpzImages(tmp_path / "a.npz")).tolist() == list(range(40))
    assert split_positions(DigitsImages()).tolist() == list(range(1797))
    images = FolderImages(write_folder(tmp_path / "images", random_images(40)))
    places = split_positions(images).tolist()
    assert sorted(places) == list(range(40))
    assert len(set(places[:20]) & set(range(20))) < 18  # a half is of both halves
    assert split_positions(images).tolist() == places
    tars = open_images(str(write_tars(write_tree(tmp_path / "tree", 2, 3), tmp_path / "tars")), 8)
    assert sorted(split_positions(tars).tolist()) == list(range(6))
    assert split_positions(tars).tolist() != list(range(6))
