"""How images are stored does not change a score, or is announced."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from fid.__main__ import main as fid_main
from vcagen.data.digits import Digits

NUM_IMAGES = 50


def fid(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fid", *map(str, arguments)])
    assert fid_main() == 0


def score(source: str, reference: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    options = ("--extractor", "digits-classifier", "--out", "score.json")
    fid("score", source, "--reference", reference, *options, monkeypatch=monkeypatch)
    result: dict[str, Any] = json.loads(Path("score.json").read_text())
    return result


def digits(start: int) -> NDArray[np.uint8]:
    """(50, 8, 8, 3)."""
    return Digits().images[start : start + NUM_IMAGES].transpose(0, 2, 3, 1).repeat(3, axis=-1)


def write_folder(name: str, images: NDArray[np.uint8], suffix: str = ".png", quality: int = 75) -> None:
    Path(name).mkdir()
    for index, image in enumerate(images):
        options = {"quality": quality} if suffix == ".jpg" else {}
        Image.fromarray(image).save(f"{name}/{index:03d}{suffix}", **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fifty digits as an array, as PNG and as JPEG, and fifty others to compare with."""
    monkeypatch.chdir(tmp_path)
    np.savez("array.npz", arr_0=digits(0))
    np.savez_compressed("packed.npz", arr_0=digits(0))
    write_folder("png", digits(0))
    write_folder("jpeg75", digits(0), ".jpg", 75)
    write_folder("jpeg95", digits(0), ".jpg", 95)
    write_folder("real", digits(100))
    write_folder("real-jpeg", digits(100), ".jpg", 75)
    return tmp_path


def lossy_warnings(result: dict[str, Any]) -> list[str]:
    return [warning.partition(" are")[0] for warning in result["warnings"] if "lossily" in warning]


def test_lossless_files_and_arrays_score_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [score(source, "real", monkeypatch) for source in ("array.npz", "packed.npz", "png")]
    values = [result["scores"][0]["value"] for result in results]
    assert values[0] > 1
    assert values == pytest.approx([values[0]] * 3, rel=1e-6)
    assert len({result["generated"]["pixels_sha256"] for result in results}) == 1
    assert [lossy_warnings(result) for result in results] == [[], [], []]


def test_jpeg_moves_the_score_and_is_announced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    png, jpeg95, jpeg75 = (score(source, "png", monkeypatch) for source in ("png", "jpeg95", "jpeg75"))
    assert png["scores"][0]["value"] == pytest.approx(0, abs=1e-6)
    assert 1e-3 < jpeg95["scores"][0]["value"] < jpeg75["scores"][0]["value"]
    assert lossy_warnings(jpeg95) == lossy_warnings(jpeg75) == ["the generated images"]
    assert lossy_warnings(score("png", "real-jpeg", monkeypatch)) == ["the reference images"]
    Image.fromarray(digits(0)[0]).save("png/000.jpg")
    Path("png/000.png").unlink()
    assert lossy_warnings(score("png", "real", monkeypatch)) == ["the generated images"]  # one file of fifty


def test_a_reference_made_of_jpegs_still_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--extractor", "digits-classifier")
    for source, notes in (("real", []), ("real-jpeg", ["made of images that were stored lossily (.jpg)"])):
        fid("reference", source, "--out", f"{source}.npz", *options, monkeypatch=monkeypatch)
        result = score("png", f"{source}.npz", monkeypatch)
        assert result["reference"]["notes"] == notes


def test_sizes_and_rules_of_both_sides_are_in_the_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("large").mkdir()
    for index, image in enumerate(digits(200)):
        Image.fromarray(image).resize((96, 120)).save(f"large/{index}.png")
    fid(
        "reference", "large", "--crop", 8, "--extractor", "digits-classifier", "--out", "r.npz", monkeypatch=monkeypatch
    )
    result = score("png", "r.npz", monkeypatch)
    assert result["generated"]["image_size"] == result["reference"]["image_size"] == [8, 8]
    with np.load("r.npz") as content:
        assert json.loads(str(content["meta"]))["source"] == "large, centre-cropped to 8x8"
    assert result["extractor"]["resize"].startswith("none for 8x8")
    assert {"torch", "torch-fidelity", "numpy"} <= result["run"]["versions"].keys()
