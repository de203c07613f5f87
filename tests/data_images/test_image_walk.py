import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data_images.image_helpers import OddFiles
from vcagen.data.images import decode_image, sort_class_names, walk_class_folders, walk_images


def write_image(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (2, 2), value).save(path)


def test_numbered_classes_are_ordered_by_value() -> None:
    assert sort_class_names(["10", "2", "0", "1"]) == ("0", "1", "2", "10")
    assert sort_class_names(["010", "2"]) == ("2", "010")


def test_other_class_names_are_ordered_as_text() -> None:
    assert sort_class_names(["n02", "n01", "n010"]) == ("n01", "n010", "n02")
    assert sort_class_names(["10", "2", "dog"]) == ("10", "2", "dog")
    assert sort_class_names(["10", "-2", "1.5"]) == ("-2", "1.5", "10")


def test_label_is_the_number_of_the_folder_whatever_the_creation_order(tmp_path: Path) -> None:
    trees = []
    for name, order in (("up", range(12)), ("down", reversed(range(12)))):
        root = tmp_path / name
        for number in order:
            for image in ("b.png", "a.png", "deep/c.png") if number % 2 else ("deep/c.png", "a.png", "b.png"):
                write_image(root / str(number) / image, value=number)
        trees.append(walk_class_folders(root))
        assert trees[-1].class_names == tuple(str(number) for number in range(12))
        assert all(decode_image(file.path)[0, 0, 0] == file.label for file in trees[-1].files)
    up, down = (
        [(file.label, file.path.relative_to(root).as_posix()) for file in tree.files]
        for tree, root in zip(trees, (tmp_path / "up", tmp_path / "down"), strict=True)
    )
    assert up == down
    assert up == sorted(up)
    assert len(up) == 36


def test_order_does_not_follow_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/x.png", "b/a/y.png", "a/z.png", "a/y.png"):
        write_image(tmp_path / name)
    expected = walk_class_folders(tmp_path), walk_images(tmp_path)
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda *args, **kwargs: reversed(list(walk(*args, **kwargs))))
    assert (walk_class_folders(tmp_path), walk_images(tmp_path)) == expected


def test_both_walkers_find_the_same_files(odd_files: OddFiles) -> None:
    tree = walk_class_folders(odd_files.root)
    flat = walk_images(odd_files.root)
    assert len(tree.files) == len(flat) == len(odd_files.good) + len(odd_files.bad)
    assert {file.path for file in tree.files} == set(flat) == {*odd_files.good, *odd_files.bad}
    assert set(tree.ignored) == set(odd_files.stray)
    assert tree.class_names == ("colour", "gray", "other")
    assert all(file.path.parent.name == tree.class_names[file.label] for file in tree.files)


def test_walk_images_reads_a_flat_folder(tmp_path: Path) -> None:
    for name in ("10.png", "2.PNG", "sub/1.png", ".hidden/3.png"):
        write_image(tmp_path / name)
    assert walk_images(tmp_path) == (tmp_path / "10.png", tmp_path / "2.PNG", tmp_path / "sub/1.png")


def test_linked_class_folders_are_followed(tmp_path: Path) -> None:
    write_image(tmp_path / "all/n01/a.png")
    (tmp_path / "some").mkdir()
    (tmp_path / "some/n01").symlink_to(tmp_path / "all/n01")
    assert [file.path for file in walk_class_folders(tmp_path / "some").files] == [tmp_path / "some/n01/a.png"]


def test_a_link_upwards_does_not_repeat_images(tmp_path: Path) -> None:
    write_image(tmp_path / "a/x.png")
    (tmp_path / "a/loop").symlink_to(tmp_path / "a")
    with pytest.raises(ValueError, match=r"loop is a link to a folder above it"):
        walk_images(tmp_path)


def test_relative_root_with_a_step_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_image(tmp_path / "a/x.png")
    monkeypatch.chdir(tmp_path / "a")
    assert len(walk_class_folders(Path("..")).files) == len(walk_images(Path("../a/../a"))) == 1
    assert len(walk_class_folders(Path("../a/..")).files) == 1


def test_missing_root_and_file_as_root(tmp_path: Path) -> None:
    write_image(tmp_path / "x.png")
    for walk in (walk_class_folders, walk_images):
        with pytest.raises(ValueError, match=r"nowhere does not exist: give a folder"):
            walk(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"x\.png is not a folder: give a folder"):
            walk(tmp_path / "x.png")


def test_no_images(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").touch()
    for walk in (walk_class_folders, walk_images):
        with pytest.raises(ValueError, match=f"no images below {tmp_path}: .*\\.webp"):
            walk(tmp_path)


def test_images_outside_the_class_folders(tmp_path: Path) -> None:
    write_image(tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"x\.png lies outside the class folders"):
        walk_class_folders(tmp_path)
    write_image(tmp_path / "a/y.png")
    with pytest.raises(ValueError, match=r"x\.png lies outside the class folders"):
        walk_class_folders(tmp_path)


def test_class_folder_without_images_is_named(tmp_path: Path) -> None:
    write_image(tmp_path / "full/x.png")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/notes.txt").touch()
    (tmp_path / ".cache").mkdir()
    with pytest.raises(ValueError, match=f"no images in class folder {tmp_path / 'hollow'}:"):
        walk_class_folders(tmp_path)


def test_found_files_hold_what_was_written(odd_files: OddFiles) -> None:
    for path in set(walk_images(odd_files.root)) - set(odd_files.bad):
        expected = odd_files.good[path].astype(int)
        image = decode_image(path)
        assert image.dtype == np.uint8
        assert image.shape == expected.shape, path
        assert np.abs(image - expected).max() <= (4 if "j" in path.suffix.lower() else 0), path
