"""The scoring command, on real small runs and folders."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fid.__main__ import main as fid_main
from tests.conftest import pooling_vae
from tests.tiny_runs import ROOT, tiny_config
from vcagen.autoencoder import KLAutoencoder
from vcagen.data.digits import Digits
from vcagen.files import locked, write_image
from vcagen.generation import ImageMaker, load_model, plan_samples
from vcagen.sample_folder import prepare_samples, write_samples
from vcagen.training import train

FOLDER = ("data.name=image_folder", "data.image_size=16", "model.patch_size=4", "train.max_steps=3")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve classes 0..11 of one 24x20 image; the colour encodes the class."""
    root = tmp_path / "images"
    for label in range(12):
        (root / str(label)).mkdir(parents=True)
        image = np.full((24, 20, 3), (20 * label, 255 - 20 * label, 128), dtype=np.uint8)
        image[2:6, :4] = 80
        Image.fromarray(image).save(root / f"{label}/0.png")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train(tiny_config(run_dir, "train.max_steps=2"))
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run of two steps on digits."""
    return shutil.copytree(trained, tmp_path / "run")


def scores_of(path: Path) -> dict[str, float]:
    return {score["name"]: score["value"] for score in json.loads(path.read_text())["scores"]}


def score(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fid", "score", *map(str, arguments)])
    return fid_main()


def test_digits_score_of_real_digits_is_near_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = Digits()
    for index in range(len(digits)):
        write_image(tmp_path / f"{index:05d}.png", digits.image(index).transpose(1, 2, 0))
    assert score(tmp_path, "--reference", "digits", monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "score.json").read_text())
    assert scores_of(tmp_path / "score.json") == {"FD-digits-1797": pytest.approx(0, abs=1e-6)}
    assert result["reference_halves_distance"] > 0.1
    assert len(result["extractor"]["weights_sha256"]) == 64
    assert "FD-digits-1797" in capsys.readouterr().out
    assert not (tmp_path / "score.parts").exists()


def test_a_model_is_sampled_and_scored_and_the_second_call_repeats_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (run, "--reference", "digits", "--num-images", 30, "--out", tmp_path / "score.json")
    assert score(*arguments, "guidance.scale=1", monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "score.json").read_text())
    assert [entry["name"] for entry in result["scores"]] == ["FD-digits-30"]
    assert result["generated"]["sampling"]["guidance"]["scale"] == 1
    assert result["generated"]["sampling"]["seed"] == 0
    assert 0 <= result["own_label_accuracy"] <= 1
    assert "rank-deficient" in result["warnings"][0]
    assert "warning: fid is unreliable" in capsys.readouterr().out
    stamp = (tmp_path / "score.json").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(ImageMaker, "batch", None)  # sampling would fail
        assert score(*arguments, "guidance.scale=1", monkeypatch=monkeypatch) == 0
    assert "FD-digits-30" in capsys.readouterr().out
    assert (tmp_path / "score.json").stat().st_mtime_ns == stamp
    assert score(*arguments, monkeypatch=monkeypatch) == 0  # other images
    assert json.loads((tmp_path / "score.json").read_text())["generated"]["sampling"]["guidance"]["scale"] == 1.5


def test_more_metrics_join_the_ones_that_are_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "score.json"
    arguments = (run, "--reference", "digits", "--num-images", 30, "--kid-subset-size", 10, "--out", out)
    assert score(*arguments, "--metrics", "kid", monkeypatch=monkeypatch) == 0
    kid = scores_of(out)
    assert score(*arguments, "--metrics", "fid,pr,is", monkeypatch=monkeypatch) == 0
    scores = scores_of(out)
    assert list(scores) == [
        *("FD-digits-30", "IS-digits-30", "precision-digits-30", "recall-digits-30", "KID-digits-30 (subsets of 10)"),
    ]
    assert scores["KID-digits-30 (subsets of 10)"] == kid["KID-digits-30 (subsets of 10)"]


def test_results_of_other_references_lie_side_by_side(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        Image.new("L", (8, 8), 40 * number).save(tmp_path / f"{number}.png")
    assert score(run, "--reference", "digits", "--num-images", 8, monkeypatch=monkeypatch) == 0
    arguments = ("--reference", tmp_path, "--extractor", "digits-classifier", "--num-images", 8)
    assert score(run, *arguments, monkeypatch=monkeypatch) == 0
    (folder,) = (run / "scores").glob("step_0000002-8-*")
    assert len(list(folder.glob("score*.json"))) == 2


def test_sampled_images_are_kept_as_png_or_npz_and_score_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def result(*arguments: object) -> dict[str, Any]:
        out = tmp_path / "score.json"
        out.unlink(missing_ok=True)
        assert score(*arguments, "--reference", "digits", "--out", out, monkeypatch=monkeypatch) == 0
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    model = (run, "--num-images", 21, "--seed", 3, "--batch-size", 5)
    dropped, png, npz = result(*model), result(*model, "--save", "png"), result(*model, "--save", "npz")
    again = [result(png["saved"]), result(npz["saved"])]
    for other in (png, npz, *again):
        assert other["scores"][0]["value"] == pytest.approx(dropped["scores"][0]["value"], rel=1e-9)
        assert other["generated"]["pixels_sha256"] == dropped["generated"]["pixels_sha256"]
    assert again[0]["generated"]["sampling"] == dropped["generated"]["sampling"]
    assert Path(npz["saved"]).name == "samples_21x8x8x3.npz"
    with np.load(npz["saved"]) as content:
        assert content["arr_0"].shape == (21, 8, 8, 3)
        assert content["arr_1"].dtype == np.int64
        for index, image in enumerate(content["arr_0"]):
            assert (image[..., 0] == np.asarray(Image.open(f"{png['saved']}/{index:06d}.png"))).all()
        labels = [entry["label"] for entry in json.loads(Path(png["saved"], "samples.json").read_text())["samples"]]
        assert content["arr_1"].tolist() == labels
    assert not list(Path(npz["saved"]).parent.glob("*.npy"))


def test_a_sample_folder_is_scored_by_its_own_record(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = load_model(run), tmp_path / "images"
    samples = plan_samples([0, 1, 2, 3], 5, 10)
    prepare_samples(model, samples, folder)
    write_samples(model, samples, folder, 4, 0, 1)
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 0
    assert json.loads((folder / "score.json").read_text())["generated"]["sampling"]["seed"] == 5
    for arguments in (["--seed", "3"], ["--num-images", "3"], ["--save", "png"], ["guidance.scale=2"]):
        assert score(folder, "--reference", "digits", *arguments, monkeypatch=monkeypatch) == 1
        assert "nothing to sample" in capsys.readouterr().err
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
    train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}", "data.image_size=24"))
    assert score(tmp_path / "run", "--reference", "digits", monkeypatch=monkeypatch) == 1
    assert "sizes must agree" in capsys.readouterr().err
    assert not (tmp_path / "run/scores").exists()


def test_the_reference_of_a_run_is_cropped_as_its_training_images_were(
    tree: Path, tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}"))
    arguments = ("--reference", tree, "--extractor-weights", inception_path, "--num-images", 4)
    assert score(tmp_path / "run", *arguments, "--out", tmp_path / "score.json", monkeypatch=monkeypatch) == 0
    result = json.loads((tmp_path / "score.json").read_text())
    assert result["reference"]["reference"] == f"{tree}, centre-cropped to 16x16"
    assert result["reference"]["image_size"] == result["generated"]["image_size"] == [16, 16]


def test_lossy_images_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(3):
        Image.new("L", (8, 8), 80 * index).save(tmp_path / f"{index}.jpg")
    assert score(tmp_path, "--reference", "digits", monkeypatch=monkeypatch) == 0
    assert "generated images are stored lossily (.jpg)" in capsys.readouterr().out


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
    sizes = {"odd size": [8, 8, 9], "other size": [9, 9, 9], "corrupt": [8, 8, 8]}.get(case, [])
    for name, size in zip("abc", sizes, strict=False):
        Image.new("L", (size, size)).save(folder / f"{name}.png")
    if case == "corrupt":
        (folder / "a.png").write_text("text")
    assert score(folder, "--reference", "digits", monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (folder / "score.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metrics", "fid,fad"], "'fad' is not known; choose of fid,sfid,is,pr,kid"),
        (["--metrics", "sfid"], "sfid is a metric of inception-v3-compat, not of digits-classifier"),
        (["--metrics", "kid"], "KID needs at least 1000 generated images for its subsets, got 30"),
        (["--metrics", "pr", "--num-images", "3"], "3 generated images: precision and recall need more than 3"),
        (["--num-images", "1"], "--num-images 1: a covariance needs at least 2 images"),
        (["--reference-format", "adm"], "--reference-format adm says what an npz is, but digits is none"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
    ],
)
def test_what_cannot_be_computed_is_said_before_anything_is_sampled(
    run: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ImageMaker, "batch", None)
    assert score(run, "--num-images", "30", "--reference", "digits", *arguments, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_copies_and_images_of_one_colour_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(6):
        Image.new("L", (8, 8), 40 * (index // 2)).save(tmp_path / f"{index}.png")
    assert score(tmp_path, "--reference", "digits", monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    assert "6 of the 6 generated images are of one colour alone" in output
    assert "3 of the 6 generated images are exact copies of others" in output


def test_a_full_disk_loses_nothing_that_was_collected(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    arguments = (run, "--reference", "digits", "--num-images", 12, "--out", tmp_path / "score.json")
    with monkeypatch.context() as patch:
        patch.setattr("fid.score.write_json", full)
        assert score(*arguments, monkeypatch=patch) == 1
    assert "No space left" in capsys.readouterr().err
    assert not (tmp_path / "score.json").exists()
    monkeypatch.setattr(ImageMaker, "batch", None)  # all images have been sampled
    assert score(*arguments, monkeypatch=monkeypatch) == 0
    assert list(scores_of(tmp_path / "score.json")) == ["FD-digits-12"]


def test_two_commands_do_not_write_one_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "score.parts").mkdir()
    with locked(tmp_path / "score.parts"):
        arguments = (run, "--reference", "digits", "--num-images", 12, "--out", tmp_path / "score.json")
        assert score(*arguments, monkeypatch=monkeypatch) == 1
    assert "another command is writing the same result" in capsys.readouterr().err


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
    scores = scores_of(Path("few/score.json"))
    assert list(scores) == ["FID-3", "sFID-3", "IS-3"]
    assert scores["FID-3"] == pytest.approx(0, abs=1e-4)
    assert scores["sFID-3"] == pytest.approx(0, abs=1e-4)
    assert result["generated"]["image_size"] == [24, 20]
    assert "rank-deficient" in result["warnings"][0]
    assert result["own_label_accuracy"] is None


def test_two_processes_write_the_result_of_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [run, "--reference", "digits", "--num-images", 21, "--metrics", "fid,is,pr", "--save", "npz"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert score(*arguments, "--out", one, monkeypatch=monkeypatch) == 0
    (npz,) = run.glob("scores/*/samples_21x8x8x3.npz")
    kept = npz.read_bytes()
    npz.unlink()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fid"]
    command = [*launcher, "score", *map(str, arguments), "--out", str(two), "--batch-size", "4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("FD-digits-21") == 1  # one process speaks
    assert scores_of(two) == pytest.approx(scores_of(one), rel=1e-6)
    assert json.loads(two.read_text())["run"]["num_processes"] == 2
    with np.load(npz) as after:
        images = after["arr_0"].astype(int)
    npz.write_bytes(kept)
    with np.load(npz) as before:
        assert np.abs(images - before["arr_0"]).max() <= 1


def test_nothing_is_overwritten_that_is_no_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.json").write_text('{"dear": "diary"}')
    for out, message in (("notes.json", "holds something else than a result"), ("score.parts", "ends in .json")):
        options = ("--reference", "digits", "--num-images", 4, "--out", tmp_path / out)
        assert score(run, *options, monkeypatch=monkeypatch) == 1
        assert message in capsys.readouterr().err
    assert (tmp_path / "notes.json").read_text() == '{"dear": "diary"}'
    monkeypatch.setattr("sys.argv", ["fid", "reference", "digits", "--out", str(tmp_path / "images.npz")])
    np.savez(tmp_path / "images.npz", arr_0=np.zeros((2, 8, 8, 3), np.uint8))
    assert fid_main() == 1
    assert "holds something else than a reference" in capsys.readouterr().err


def test_a_folder_called_digits_is_not_taken_for_the_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    for index in range(3):
        Image.new("L", (8, 8), 80 * index).save(f"digits/{index}.png")
    assert score("digits", "--reference", "digits", monkeypatch=monkeypatch) == 1
    assert "write ./digits" in capsys.readouterr().err


def test_kid_of_other_subsets_stays_and_has_a_name_of_its_own(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "score.json"
    arguments = (run, "--reference", "digits", "--num-images", 12, "--out", out)
    assert score(*arguments, "--metrics", "kid", "--kid-subset-size", 6, monkeypatch=monkeypatch) == 0
    assert score(*arguments, "--metrics", "fid", monkeypatch=monkeypatch) == 0
    assert list(scores_of(out)) == ["FD-digits-12", "KID-digits-12 (subsets of 6)"]
    assert score(*arguments, "--metrics", "kid", "--kid-subset-size", 5, monkeypatch=monkeypatch) == 0
    assert list(scores_of(out)) == ["FD-digits-12", "KID-digits-12 (subsets of 5)"]


def test_pngs_that_were_taken_away_are_made_again(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (run, "--reference", "digits", "--num-images", 9, "--save", "png", "--out", tmp_path / "score.json")
    with monkeypatch.context() as patch:
        patch.setattr("fid.score.write_json", lambda *_: (_ for _ in ()).throw(OSError("stopped")))
        assert score(*arguments, monkeypatch=patch) == 1
    (lost,) = run.glob("scores/*/images/000004.png")
    content = lost.read_bytes()
    lost.unlink()
    assert score(*arguments, monkeypatch=monkeypatch) == 0
    assert lost.read_bytes() == content


def test_another_decoder_is_another_set_of_images(tmp_path: Path) -> None:
    vae = pooling_vae(1.0, 0.0)
    other = copy.deepcopy(vae)
    before, after = KLAutoencoder(vae, vae), KLAutoencoder(vae, other)
    assert before.decoder_sha256() == after.decoder_sha256()
    other.post_quant_conv = torch.nn.Conv2d(3, 3, 1)
    assert before.decoder_sha256() != after.decoder_sha256()
    assert before.encoder_sha256() == after.encoder_sha256()
