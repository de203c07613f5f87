import tarfile
from pathlib import Path

import datasets
import pytest

from tests.cache.helpers import add, write_parquet, write_tars, write_tree
from vcagen.cache.sources import open_source


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree") / "images", num_classes=12, images=2)


def test_every_kind_gives_the_same_records_and_bytes(tree: Path, tmp_path: Path) -> None:
    folder = open_source(str(tree))
    tars = open_source(str(write_tars(tree, tmp_path / "tars")))
    parquet = open_source(str(write_parquet(tree, tmp_path / "parquet")))
    saved = datasets.load_dataset("parquet", data_files=str(tmp_path / "parquet/train.parquet"), split="train")
    saved.save_to_disk(tmp_path / "saved")
    arrow = open_source(str(tmp_path / "saved"))
    assert folder.records[0] == (0, "0/0.png", (tree / "0/0.png").stat().st_size)
    assert [record.label for record in folder.records] == sorted(record.label for record in folder.records)
    for other in (tars, parquet, arrow):
        assert other.records == folder.records
        assert other.class_names == folder.class_names
        for position in (0, 13, 23):
            assert other.read(position) == folder.read(position)


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in files.items():
            add(archive, name, content)
    return path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"x"}, r"no .cls for a"),
        ({"a.png": b"x", "a.cls": b"0", "b.cls": b"1"}, r"no image for b"),
        ({"a.png": b"x", "a.jpg": b"x", "a.cls": b"0"}, r"two images for a; keys must be unique"),
        ({"a.png": b"x", "a.cls": b"cat"}, r"a.cls: expected a class number, found 'cat'"),
        ({"a.txt": b"x"}, r"no images in it"),
        (
            {"a.png": b"x", "a.cls": b"0", "x/000.v1.PNG": b"x", "x/000.v1.cls": b"0"},
            r"a.tar: x/000.v1.PNG: WebDataset's names end at the first dot, which makes this .v1.PNG of sample 000",
        ),
        ({"caf\udce9.png": b"x", "caf\udce9.cls": b"0"}, r"a.tar: 'caf\\udce9.png': the name is not UTF-8"),
    ],
)
def test_tars_that_do_not_pair_are_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(str(tar_of(tmp_path / "a.tar", files)))


def test_a_cut_tar_is_named(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", {"a.png": b"x" * 5000, "a.cls": b"0"})
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"a.tar: not a whole, uncompressed tar file|no .cls for a"):
        open_source(str(path))
    path.write_bytes(b"not a tar" * 100)
    with pytest.raises(ValueError, match=r"a.tar: not a whole, uncompressed tar file"):
        open_source(str(path))


def test_hidden_and_other_files_in_tars_are_ignored(tmp_path: Path) -> None:
    files = {"./x/a.JPEG": b"x", "./x/a.cls": b"1\n", "./x/.hidden.png": b"x", "x/a.json": b"{}"}
    source = open_source(str(tar_of(tmp_path / "a.tar", files)), class_names=("cat", "dog"))
    assert source.records == [(1, "x/a.JPEG", 1)]
    assert (source.class_names, source.ignored, source.read(0)) == (("cat", "dog"), 1, b"x")
    with pytest.raises(ValueError, match="labels up to 1, but 1 class names"):
        open_source(str(tmp_path / "a.tar"), class_names=("cat",))


def test_sources_that_are_none(tmp_path: Path, tree: Path) -> None:
    with pytest.raises(ValueError, match="neither a folder nor a data set that can be loaded"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"no .tar files there"):
        open_source(str(tree), "tar")
    with pytest.raises(ValueError, match="leave out --class-names"):
        open_source(str(tree), class_names=("a",))
    datasets.Dataset.from_dict({"picture": [1], "label": [0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"columns are picture, label; expected one of image, .* and one of label"):
        open_source(str(tmp_path / "a.parquet"))


def test_a_damaged_tar_loses_nothing_in_silence(tree: Path, tmp_path: Path) -> None:
    path = write_tars(tree, tmp_path / "tars", parts=1) / "part-0.tar"
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        middle = archive.getmembers()[20].offset
    flipped = bytearray(content)
    flipped[middle + 3] ^= 0xFF
    for damaged in (content[:middle], content[: middle + 100], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"part-0.tar: not a whole, uncompressed tar file"):
            open_source(str(path))


def test_parquet_splits_are_not_mixed(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        rows = {"image": [{"bytes": b"x", "path": None}] * count, "label": [0] * count}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    assert len(open_source(str(tmp_path)).records) == 3
    assert len(open_source(str(tmp_path), split="test").records) == 2
    with pytest.raises(ValueError, match="no parquet files of split bogus"):
        open_source(str(tmp_path), split="bogus")


@pytest.mark.parametrize("label", ["cat", 1.5, None, -1])
def test_labels_must_be_whole_numbers(tmp_path: Path, label: object) -> None:
    datasets.Dataset.from_dict({"image": [b"x"], "label": [label]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column label: .* is not a class number"):
        open_source(str(tmp_path / "a.parquet"))


def test_compressed_tars_beside_others_are_not_passed_over(tmp_path: Path) -> None:
    tar_of(tmp_path / "a.tar", {"a.png": b"x", "a.cls": b"0"})
    (tmp_path / "._a.tar").write_bytes(b"of macOS")
    assert len(open_source(str(tmp_path)).records) == 1
    tar_of(tmp_path / "b.TAR", {"b.png": b"x", "b.cls": b"0"})
    assert len(open_source(str(tmp_path)).records) == 2
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"c.tar.gz: .*decompress it, or move it elsewhere"):
        open_source(str(tmp_path))


def test_the_split_asked_for_is_the_one_read(tmp_path: Path) -> None:
    splits = datasets.DatasetDict()
    for split, count in (("train", 3), ("test", 2)):
        rows = {"image": [b"x"] * count, "label": [0] * count}
        splits[split] = datasets.Dataset.from_dict(rows, split=split)
    splits.save_to_disk(tmp_path / "both")
    splits["test"].save_to_disk(tmp_path / "one")
    (tmp_path / "clone/data").mkdir(parents=True)
    for split, part in splits.items():
        part.to_parquet(tmp_path / f"clone/data/{split}-00000-of-00001.parquet")
    for name in ("both", "clone"):
        assert len(open_source(str(tmp_path / name)).records) == 3
        assert len(open_source(str(tmp_path / name), split="test").records) == 2
        with pytest.raises(ValueError, match="bogus"):
            open_source(str(tmp_path / name), split="bogus")
    assert len(open_source(str(tmp_path / "one"), split="test").records) == 2
    with pytest.raises(ValueError, match="it is split test, not train; give --split test"):
        open_source(str(tmp_path / "one"))
    splits["train"].to_parquet(tmp_path / "0000.parquet")
    with pytest.raises(ValueError, match="show no split test; leave out --split"):
        open_source(str(tmp_path / "0000.parquet"), split="test")


def test_class_names_that_come_twice_are_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "a.tar", {"a.png": b"x", "a.cls": b"0"})
    with pytest.raises(ValueError, match="class name 'crane' comes twice"):
        open_source(str(path), class_names=("crane", "dog", "crane"))


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(b"four")
    stored = [{"bytes": b"xy", "path": None}, {"bytes": None, "path": str(tmp_path / "one.png")}]
    images = [*stored, {"bytes": None, "path": str(tmp_path / "none.png")}]
    datasets.Dataset.from_dict({"image": images, "label": [0] * 3}).to_parquet(tmp_path / "a.parquet")
    assert [record.size for record in open_source(str(tmp_path / "a.parquet")).records] == [2, 4, 0]
    datasets.Dataset.from_dict({"image": [[1, 2]], "label": [0]}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"column image holds .*; expected image files as bytes"):
        open_source(str(tmp_path / "b.parquet"))
