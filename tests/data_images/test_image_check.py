from pathlib import Path

import pytest

from tests.data_images.image_helpers import OddFiles
from vcagen.data.images import check_images, walk_class_folders, walk_images


def test_stop_lists_the_bad_files_and_the_way_on(odd_files: OddFiles) -> None:
    files = walk_images(odd_files.root)
    with pytest.raises(ValueError, match=r"data\.on_bad=skip") as error:
        check_images(files, "stop")
    message = str(error.value)
    assert message.startswith(f"3 of {len(files)} images are bad")
    assert [line.split(": ")[0] for line in message.splitlines()[1:]] == sorted(map(str, odd_files.bad))
    assert "truncated" in message


def test_skip_returns_the_bad_files_and_labels_stay(odd_files: OddFiles) -> None:
    tree = walk_class_folders(odd_files.root)
    bad = check_images([file.path for file in tree.files], "skip")
    assert set(bad) == set(odd_files.bad)
    assert all(message.startswith(f"{path}: ") for path, message in bad.items())
    rest = tree.without(bad)
    assert rest.files == tuple(file for file in tree.files if file.path in odd_files.good)
    assert len(rest.files) == len(odd_files.good)
    assert (rest.class_names, rest.ignored) == (tree.class_names, tree.ignored)
    assert rest.without({}) == rest


def test_scoring_and_training_use_the_same_files(odd_files: OddFiles) -> None:
    flat = walk_images(odd_files.root)
    bad = check_images(flat, "skip")
    tree = walk_class_folders(odd_files.root)
    assert [path for path in flat if path not in bad] == [file.path for file in tree.without(bad).files]


def test_good_files_pass_without_a_word(odd_files: OddFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_images(list(odd_files.good), "stop") == {}
    assert check_images([], "stop") == {}
    assert capsys.readouterr() == ("", "")


def test_a_long_list_is_cut(odd_files: OddFiles) -> None:
    empty = [odd_files.root / f"{number}.png" for number in range(12)]
    for path in empty:
        path.touch()
    with pytest.raises(ValueError, match="12 of 25 images are bad") as error:
        check_images([*empty, *odd_files.good], "stop")
    lines = str(error.value).splitlines()
    assert [line.split(": ")[0] for line in lines[1:11]] == [str(path) for path in empty[:10]]
    assert lines[11:] == ["and 2 more"]


def test_more_files_than_one_batch(odd_files: OddFiles) -> None:
    single = odd_files.root / "other/single.png"
    assert list(check_images([odd_files.bad[0], *[single] * 1100, odd_files.bad[1]], "skip")) == odd_files.bad[:2]


def test_nothing_but_bad_files_is_an_error_even_when_skipping(odd_files: OddFiles) -> None:
    with pytest.raises(ValueError, match="3 of 3 images are bad: repair or remove them\n"):
        check_images(odd_files.bad, "skip")


def test_a_class_left_without_images_is_an_error(odd_files: OddFiles) -> None:
    tree = walk_class_folders(odd_files.root)
    with pytest.raises(ValueError, match="no readable image in class gray"):
        tree.without({path for path in walk_images(odd_files.root) if path.parent.name == "gray"})


def test_a_dangling_link_is_a_bad_file(odd_files: OddFiles) -> None:
    link: Path = odd_files.root / "other/gone.png"
    link.symlink_to(odd_files.root / "nowhere.png")
    assert link in check_images(walk_images(odd_files.root), "skip")
