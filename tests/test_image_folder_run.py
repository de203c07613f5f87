"""A folder of images through training, sampling and scoring."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fid import features
from fid.__main__ import main as fid_main
from tests.tiny_runs import losses, tiny_config
from vcagen.checkpoint import list_checkpoints
from vcagen.data import build_data
from vcagen.data.image_folder import ImageFolder, ImageFolderConfig
from vcagen.generation import load_model, parse_labels, plan_samples
from vcagen.sample_folder import prepare_samples, write_samples
from vcagen.training import train

FOLDER = ("data.name=image_folder", "data.image_size=16", "model.patch_size=4", "train.max_steps=3")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve classes 0..11 of three 24x20 images; the colour encodes the class, a corner the image."""
    root = tmp_path / "images"
    for label in range(12):
        (root / str(label)).mkdir(parents=True)
        for number in range(3):
            image = np.full((24, 20, 3), (20 * label, 255 - 20 * label, 128), dtype=np.uint8)
            image[2:6, :4] = 80 * number
            Image.fromarray(image).save(root / f"{label}/{number}.png")
    return root


def test_labels_follow_the_folders_by_number(tree: Path) -> None:
    data = build_data(ImageFolderConfig(root=str(tree), image_size=16))
    assert data.class_names == tuple(str(label) for label in range(12))
    assert data.image_shape == (3, 16, 16)
    for index in range(len(data)):
        image = data.image(index)
        assert image.dtype == np.uint8
        assert image[0, 12, 12] == 20 * data.label(index)


def test_train_sample_by_name_and_refuse_other_classes(tree: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(run_dir, *FOLDER, f"data.root={tree}"))
    assert len(losses(run_dir)) == 3
    run = load_model(run_dir)
    assert parse_labels("10", run.class_names) == [10]
    (_, image), *_ = run.maker.images(plan_samples([10], 0, 12), 1, progress=False)
    assert image.shape == (16, 16, 3)
    shutil.rmtree(tree / "3")
    with pytest.raises(ValueError, match="class 3 was '3' in training, but is '4' in the data now"):
        train(tiny_config(run_dir, *FOLDER, f"data.root={tree}", "train.max_steps=4"))


def test_mirroring_changes_the_training_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    for flip in ("true", "false"):
        settings = (f"data.root={tree}", f"data.horizontal_flip={flip}", "train.num_workers=2")
        train(tiny_config(tmp_path / flip, *FOLDER, *settings))
    assert losses(tmp_path / "true")[1] != losses(tmp_path / "false")[1]


def test_an_empty_folder_and_bad_files_stop_before_training(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tmp_path}/empty"))
    (tree / "4/1.png").write_bytes((tree / "4/1.png").read_bytes()[:60])
    (tree / "4/notes.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"4/1.png"):
        train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}"))
    assert not (tmp_path / "run").exists()
    data = ImageFolder(ImageFolderConfig(root=str(tree), on_bad="skip"))
    assert len(data) == 35
    assert "35 images used in 12 classes, files ignored that are not images: 1, bad images skipped: 1 (" in data.report
    assert "4/1.png" in data.report
    assert [data.label(index) for index in range(len(data))].count(4) == 2


def test_data_that_changed_does_not_resume_and_data_that_moved_does(tree: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(run_dir, *FOLDER, f"data.root={tree}"))
    moved = tmp_path / "moved #1"  # a path is taken as it is
    shutil.move(tree, moved)
    train(tiny_config(run_dir, *FOLDER, f"data.root={moved}", "train.max_steps=4"))
    assert len(losses(run_dir)) == 4
    (moved / "3/1.png").unlink()
    with pytest.raises(ValueError, match="trained on other data"):
        train(tiny_config(run_dir, *FOLDER, f"data.root={moved}", "train.max_steps=5"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_vanishes_ends_the_run_with_its_name_and_a_checkpoint(
    tree: Path, tmp_path: Path, num_workers: int
) -> None:
    run_dir = tmp_path / "run"
    settings = (f"data.root={tree}", "train.global_batch_size=1", "train.checkpoint_every=99", "train.max_steps=36")
    from vcagen.data.order import epoch_order

    tree_files = build_data(ImageFolderConfig(root=str(tree))).files  # type: ignore[union-attr]
    victim = tree_files[epoch_order(36, 0, 0)[9]].path  # the sample of step 10
    build = build_data

    def build_and_delete(config: ImageFolderConfig) -> object:
        data = build(config)
        victim.unlink()
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vcagen.run.build_data", build_and_delete)
        with pytest.raises(ValueError, match=rf"^{victim}: ") as error:
            train(tiny_config(run_dir, *FOLDER, *settings, f"train.num_workers={num_workers}"))
    assert "\n" not in str(error.value)
    assert list_checkpoints(run_dir)[-1][0] == 9


def score(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fid", "score", *map(str, arguments)])
    return fid_main()


def test_digits_score_of_real_digits_is_near_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vcagen.data.digits import Digits
    from vcagen.files import write_image

    digits = Digits()
    for index in range(len(digits)):
        write_image(tmp_path / f"{index:05d}.png", digits.image(index).transpose(1, 2, 0))
    assert score(tmp_path, "--reference", "digits", monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "score.json").read_text())
    assert result["metric"] == "FD-1797 (digits-classifier, 64 features)"
    assert result["frechet_distance"] == pytest.approx(0, abs=1e-6)
    assert result["reference_halves_distance"] > 0.1
    assert result["protocol"]["extractor_weights_sha256"]
    assert "FD-1797" in capsys.readouterr().out


def test_a_run_is_sampled_and_scored_and_the_second_call_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(run_dir, "train.max_steps=2"))
    arguments = (run_dir, "--reference", "digits", "--num-images", 30, "--out", tmp_path / "score.json")
    assert score(*arguments, "guidance.scale=1", monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "score.json").read_text())
    assert result["metric"].startswith("FD-30 ")
    assert result["protocol"]["sampling"]["guidance"]["scale"] == 1
    assert 0 <= result["own_label_accuracy"] <= 1
    assert "rank-deficient" in result["warnings"][0]
    assert "warning: unreliable" in capsys.readouterr().out
    (folder,) = (run_dir / "samples").iterdir()
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    assert len(stamps) == 30
    assert score(*arguments, "guidance.scale=1", monkeypatch=monkeypatch) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.png")} == stamps
    assert score(*arguments, monkeypatch=monkeypatch) == 0
    assert len(list((run_dir / "samples").iterdir())) == 2


def test_a_sample_folder_is_scored_by_its_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(tmp_path / "run", "train.max_steps=2"))
    run, folder = load_model(tmp_path / "run"), tmp_path / "images"
    samples = plan_samples([0, 1, 2, 3], 5, 10)
    prepare_samples(run, samples, folder)
    write_samples(run, samples, folder, 4, 0, 1)
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 0
    assert json.loads((folder / "score.json").read_text())["protocol"]["seed"] == 5
    for arguments in (["--seed", "3"], ["--num-images", "3"], ["guidance.scale=2"]):
        assert score(folder, "--reference", "digits", *arguments, monkeypatch=monkeypatch) == 1
    shutil.copy(folder / "000000.png", folder / "copy.png")
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 1
    assert "was not sampled with the others" in capsys.readouterr().err
    (folder / "copy.png").unlink()
    (folder / "000002.png").unlink()
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 1
    assert "1 of 4 images are missing (000002.png first)" in capsys.readouterr().err


def test_a_run_that_does_not_fit_the_reference_is_not_sampled(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}"))
    assert score(tmp_path / "run", "--reference", "digits", monkeypatch=monkeypatch) == 1
    assert "sizes must agree" in capsys.readouterr().err
    assert not (tmp_path / "run/samples").exists()


def test_the_reference_of_a_run_is_cropped_as_its_training_images_were(
    tree: Path, tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}"))
    arguments = ("--reference", tree, "--extractor-weights", inception_path, "--num-images", 4)
    assert score(tmp_path / "run", *arguments, "--out", tmp_path / "score.json", monkeypatch=monkeypatch) == 0
    protocol = json.loads((tmp_path / "score.json").read_text())["protocol"]
    assert protocol["reference"] == f"{tree}, centre-cropped to 16x16"
    assert protocol["image_size"] == [16, 16]


def test_lossy_images_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        Image.new("L", (8, 8), 80 * index).save(tmp_path / f"{index}.jpg")
    assert score(tmp_path, "--reference", "digits", monkeypatch=monkeypatch) == 0
    assert "generated images are stored lossily (.jpg)" in capsys.readouterr().out


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batch_size_does_not_change_the_score(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    from fid.score import DigitsImages, distance, extract

    extractor = features.build_extractor(features.DIGITS)
    images = DigitsImages()
    monkeypatch.setattr(DigitsImages, "__len__", lambda _: 150)
    extracted = extract(images, extractor, batch_size, "digits")
    assert [half.n for half in extracted.halves] == [75, 75]
    reference = extract(images, extractor, 150, "digits")
    assert distance(*extracted.halves) == pytest.approx(distance(*reference.halves), rel=1e-4)
    assert torch.equal(extracted.predictions, reference.predictions)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("empty", "no images"),
        ("missing", "missing"),
        ("odd size", "bring all images to one size first"),
        ("other size", "sizes must agree"),
        ("corrupt", "a.png"),
    ],
)
def test_folders_that_cannot_be_scored(
    tree: Path,
    tmp_path: Path,
    case: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / case
    if case != "missing":
        folder.mkdir()
    sizes = {"odd size": [8, 8, 9], "other size": [16, 16, 16], "corrupt": [8, 8, 8]}.get(case, [])
    for name, size in zip("abc", sizes, strict=False):
        Image.new("L", (size, size)).save(folder / f"{name}.png")
    if case == "corrupt":
        (folder / "a.png").write_text("text")
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (folder / "score.json").exists()


def test_image_folders_are_scored_by_inception(
    tree: Path, tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").mkdir()
    for label in range(3):
        shutil.copy(tree / f"{label}/0.png", tmp_path / f"few/{label}.png")
    shutil.copytree(tmp_path / "few", tmp_path / "reference")
    arguments = ("few", "--reference", "reference", "--extractor-weights", inception_path)
    assert score(*arguments, monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "few/score.json").read_text())
    assert result["metric"] == "FD-3 (inception-v3-compat, 2048 features)"
    assert result["frechet_distance"] == pytest.approx(0, abs=1e-4)
    assert result["protocol"]["image_size"] == [24, 20]
    assert "rank-deficient" in result["warnings"][0]
    assert "own_label_accuracy" not in result
