"""References as other tools and our own write them, written here the way they do it."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from fid import features, reference
from fid.__main__ import main as fid_main
from fid.features import CLIP, DIGITS, DINO, INCEPTION
from fid.images import NpzImages
from fid.metrics import distance
from fid.reference import Reference, open_reference
from fid.score import require_comparable, require_same_weights
from vcagen.data.digits import Digits
from vcagen.data.images import center_crop
from vcagen.files import file_sha256

WIDTH, SPATIAL_WIDTH = 6, 5

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inception with 6 features and 5 for sFID: the readers look at shapes alone, and 2,048 take seconds a file."""
    monkeypatch.setitem(features.DIMENSIONS, INCEPTION, WIDTH)
    monkeypatch.setattr(reference, "SPATIAL_DIMENSION", SPATIAL_WIDTH)


def statistics(width: int = WIDTH, seed: int = 0, mean: str = "mu", covariance: str = "sigma") -> Arrays:
    rows = np.random.default_rng(seed).standard_normal((4 * width, width))
    return {mean: rows.mean(axis=0), covariance: np.cov(rows, rowvar=False)}


def spatial_statistics(width: int = SPATIAL_WIDTH) -> Arrays:
    return statistics(width, 1, "mu_s", "sigma_s")


def pictures(n: int = 4, side: int = 8, seed: int = 2) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


def assert_holds(found: Reference, arrays: Arrays) -> None:
    assert found.pooled is not None
    for value, key in ((found.pooled.mean, "mu"), (found.pooled.covariance, "sigma")):
        assert value.dtype == np.float64
        np.testing.assert_array_equal(value, arrays[key].astype(np.float64))


# ADM's npz


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adms_reference(tmp_path: Path, narrow: None, dtype: type) -> None:
    arrays = {key: value.astype(dtype) for key, value in {**statistics(), **spatial_statistics()}.items()}
    np.savez(tmp_path / "adm.npz", arr_0=pictures(), **arrays)
    found = open_reference(str(tmp_path / "adm.npz"), None)
    assert_holds(found, arrays)
    assert found.spatial is not None
    np.testing.assert_array_equal(found.spatial.mean, arrays["mu_s"].astype(np.float64))
    np.testing.assert_array_equal(found.spatial.covariance, arrays["sigma_s"].astype(np.float64))
    assert found.spatial.covariance.dtype == np.float64
    assert isinstance(found.images, NpzImages)
    assert found.images.about.num_images == 4
    assert (found.size, found.extractor, found.num_images) == ((8, 8), INCEPTION, None)
    assert found.notes == ("ADM statistics: the whole training set, Inception v3 of 2015-12-05",)


def test_adms_reference_at_its_own_width(tmp_path: Path) -> None:
    arrays = {"mu": np.zeros(2048, np.float32), "sigma": np.eye(2048), "mu_s": np.ones(2023), "sigma_s": np.eye(2023)}
    np.savez(tmp_path / "adm.npz", arr_0=pictures(), **arrays)
    found = open_reference(str(tmp_path / "adm.npz"), None)
    assert_holds(found, arrays)
    assert found.spatial is not None
    assert found.spatial.mean.shape == (2023,)


def test_statistics_are_read_without_the_images(tmp_path: Path, narrow: None) -> None:
    path, arrays = tmp_path / "adm.npz", statistics()
    np.savez_compressed(path, **arrays, arr_0=pictures(50, 20))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2  # well within the images, which are last and nearly all of it
    content[middle : middle + 2000] = bytes(2000)
    path.write_bytes(content)
    found = open_reference(str(path), None)
    assert_holds(found, arrays)
    assert found.size == (20, 20)
    assert found.images is not None
    with pytest.raises(ValueError, match="arr_0 cannot be read"):
        found.images.batch([49])


def test_half_of_sfids_statistics_is_none(tmp_path: Path, narrow: None) -> None:
    np.savez(tmp_path / "a.npz", **statistics(), mu_s=np.zeros(SPATIAL_WIDTH))
    assert open_reference(str(tmp_path / "a.npz"), None).spatial is None


def test_images_without_statistics_are_the_reference_themselves(tmp_path: Path) -> None:
    np.savez(tmp_path / "samples_4x8x8x3.npz", arr_0=pictures(), arr_1=np.arange(4))
    found = open_reference(str(tmp_path / "samples_4x8x8x3.npz"), None)
    assert found.pooled is found.extractor is None
    assert (found.num_images, found.size) == (4, (8, 8))
    assert found.notes == ("no statistics in it, so they are computed from its 4 images",)
    assert found.sha256 is not None


# Other tools' npz


@pytest.mark.parametrize(
    ("form", "note"),
    [
        ("mar", "MAR statistics: mu and sigma copied from ADM's file"),
        ("adm", "ADM statistics"),
        ("edm", "EDM statistics: .* EDM's own preprocessing"),
        ("pytorch-fid", "pytorch-fid statistics: its resize has half-pixel centres, which moves FID by about 0.002"),
        ("clean-fid-legacy_tensorflow", "clean-fid statistics in legacy_tensorflow mode"),
        ("clean-fid-legacy_pytorch", "clean-fid statistics in legacy_pytorch mode: its resize has half-pixel centres"),
        (None, f"of an unknown tool, taken to be of {INCEPTION} with the same resize rule; --reference-format says"),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mu_and_sigma_alone_say_what_was_assumed(
    tmp_path: Path, narrow: None, form: Any, note: str, save: Callable[..., None]
) -> None:
    arrays = statistics()
    save(tmp_path / "a.npz", **arrays)
    found = open_reference(str(tmp_path / "a.npz"), None, form)
    assert_holds(found, arrays)
    assert found.spatial is found.images is found.size is None
    assert found.extractor == INCEPTION
    assert re.search(note, found.notes[0])


@pytest.mark.parametrize("mode", ["legacy_tensorflow", "legacy_pytorch"])
def test_clean_fids_files_are_known_by_their_names(tmp_path: Path, narrow: None, mode: str) -> None:
    np.savez(tmp_path / f"cifar10_{mode}_train_32.npz", **statistics())
    found = open_reference(str(tmp_path / f"cifar10_{mode}_train_32.npz"), None)
    assert found.notes[0].startswith(f"clean-fid statistics in {mode} mode")


def test_clean_fids_clean_mode_does_not_compare(tmp_path: Path, narrow: None) -> None:
    message = (
        "clean-fid statistics in clean mode .* cannot be compared with anything here; use statistics of its legacy"
    )
    np.savez(tmp_path / "ffhq_clean_trainval_256.npz", **statistics())
    with pytest.raises(ValueError, match=message):
        open_reference(str(tmp_path / "ffhq_clean_trainval_256.npz"), None)
    assert open_reference(str(tmp_path / "ffhq_clean_trainval_256.npz"), None, "adm").notes[0].startswith("ADM")
    np.savez(tmp_path / "a.npz", **statistics())
    with pytest.raises(ValueError, match=message):
        open_reference(str(tmp_path / "a.npz"), None, "clean-fid-clean")


def test_a_name_that_looks_like_clean_fids_is_no_matter_where_the_file_says_more(tmp_path: Path, narrow: None) -> None:
    path = tmp_path / "flowers_clean_copy_256.npz"
    np.savez(path, arr_0=pictures())
    assert open_reference(str(path), None).images is not None
    np.savez(path, **statistics(), **spatial_statistics())
    assert open_reference(str(path), None).notes[0].startswith("ADM")
    np.savez(path, **statistics(), n=np.array(9), meta=np.array(json.dumps({"extractor": INCEPTION})))
    assert open_reference(str(path), None).notes == ()


@pytest.mark.parametrize(("width", "extractor"), [(1024, DINO), (768, CLIP)])
def test_other_networks_are_told_by_the_number_of_features(tmp_path: Path, width: int, extractor: str) -> None:
    np.savez(tmp_path / "a.npz", mu=np.zeros(width), sigma=np.eye(width))
    found = open_reference(str(tmp_path / "a.npz"), None)
    assert found.extractor == extractor
    assert f"taken to be of {extractor}" in found.notes[0]
    with pytest.raises(ValueError, match=f"statistics of {width} features, but {INCEPTION} has 2048"):
        open_reference(str(tmp_path / "a.npz"), None, "pytorch-fid")  # its --dims 768 is another layer


# Pickles


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("numpy_module", [b"numpy._core.", b"numpy.core."])
def test_edm2s_pickle(tmp_path: Path, narrow: None, protocol: int, numpy_module: bytes) -> None:
    arrays = statistics()
    content = {"num_images": 1281167, "fid": arrays, "fd_dinov2": statistics(8)}
    written = pickle.dumps(content, protocol)
    if numpy_module == b"numpy.core.":  # as numpy 1 writes it; lengths that precede names, in protocol 4 and on
        written = written.replace(b"numpy._core.", numpy_module)
        for name, length in ((b"multiarray", 21), (b"numeric", 18)):
            written = written.replace(bytes([length + 1]) + numpy_module + name, bytes([length]) + numpy_module + name)
        written = unframed(written)
    (tmp_path / "img512.pkl").write_bytes(written)
    found = open_reference(str(tmp_path / "img512.pkl"), None)
    assert_holds(found, arrays)
    assert (found.num_images, found.extractor) == (1281167, INCEPTION)
    assert found.images is found.spatial is None
    assert found.notes == ("EDM2 statistics: the same network",)


def unframed(pickled: bytes) -> bytes:
    """Without the frame, whose length no longer fits."""
    return pickled[:2] + pickled[11:] if pickled[1] > 3 else pickled


def test_a_pickle_that_runs_code_does_not(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (ran,)

    for content in (Malicious(), {"fid": {**statistics(), "more": Malicious()}}):
        for name in ("a.pkl", "a.pt"):
            if name == "a.pkl":
                (tmp_path / name).write_bytes(pickle.dumps(content))
            else:
                torch.save(content, tmp_path / name)
            with pytest.raises(ValueError, match=rf"{name}: n") as raised:
                open_reference(str(tmp_path / name), None)
            assert "\n" not in str(raised.value)
    assert not ran.exists()
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match=r"it wants to run \S+, and only arrays are read"):
        open_reference(str(tmp_path / "a.pkl"), None)


@pytest.mark.parametrize(
    "content",
    [{"num_images": 3}, {"fid": {"mu": np.zeros(3)}}, {"fid": None}, {"fid": "text"}, [1, 2], None, 3, np.zeros(3)],
)
@pytest.mark.parametrize("suffix", [".pkl", ".pt", ".pth"])
def test_pickles_of_something_else_are_refused(tmp_path: Path, content: Any, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if suffix == ".pkl":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"a\.p[a-z]+: n") as raised:
        open_reference(str(path), None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"text", b"\x80\x02}q", b"PK\x03\x04", bytes(range(200, 256)), b"x"])
@pytest.mark.parametrize("name", ["a.pkl", "a.pt", "a.npz"])
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: n") as raised:
        open_reference(str(tmp_path / name), None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("numpy_module", [b"numpy._core.", b"numpy.core."])
def test_torch_fidelitys_cached_statistics(tmp_path: Path, narrow: None, numpy_module: bytes) -> None:
    arrays = {"mu": statistics()["mu"].astype(np.float32), "sigma": statistics()["sigma"]}
    torch.save(arrays, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as source, zipfile.ZipFile(tmp_path / "a.pt", "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name).replace(b"numpy._core.", numpy_module))
    found = open_reference(str(tmp_path / "a.pt"), None)
    assert_holds(found, arrays)
    assert found.features is found.num_images is None
    assert found.notes == ("torch-fidelity's cache: the file does not say which weights made it",)


def test_torch_fidelitys_cached_features(tmp_path: Path, narrow: None) -> None:
    rows = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0))
    torch.save(rows, tmp_path / "a-features-2048.pt")
    found = open_reference(str(tmp_path / "a-features-2048.pt"), None)
    assert found.pooled is not None
    np.testing.assert_allclose(found.pooled.mean, rows.double().mean(dim=0), rtol=1e-12)
    np.testing.assert_allclose(found.pooled.covariance, np.cov(rows.double().numpy(), rowvar=False), rtol=1e-12)
    assert found.num_images == 40
    assert found.features is not None
    np.testing.assert_array_equal(found.features, rows)
    torch.save(rows[:1], tmp_path / "one.pt")
    with pytest.raises(ValueError, match=r"one\.pt: made of 1 images; a covariance needs at least 2"):
        open_reference(str(tmp_path / "one.pt"), None)


# What is refused


def changed(**arrays: Any) -> Arrays:
    return {**statistics(), **spatial_statistics(), **arrays}


def asymmetric() -> NDArray[np.float64]:
    covariance = statistics()["sigma"].copy()
    covariance[0, 1] += 0.1
    return covariance


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(mu=np.zeros((1, 6))), r"mu has shape \(1, 6\) and sigma \(6, 6\); expected \(d,\) and \(d, d\)"),
        (changed(sigma=np.eye(5)), r"mu has shape \(6,\) and sigma \(5, 5\)"),
        (changed(mu=np.zeros(0), sigma=np.zeros((0, 0))), r"mu has shape \(0,\)"),
        (changed(mu=np.full(6, np.nan)), "mu or sigma has NaN or inf; make the statistics again"),
        (changed(sigma=np.diag([1.0] * 5 + [np.inf])), "mu or sigma has NaN or inf"),
        (changed(sigma=asymmetric()), "sigma is not symmetric, so it is no covariance"),
        (changed(sigma=np.diag([1.0] * 5 + [-0.1])), r"sigma has the eigenvalue -0\.1 \(largest 1\)"),
        (changed(sigma_s=np.diag([1.0] * 4 + [-0.1])), "sigma_s has the eigenvalue"),
        (changed(mu_s=np.full(5, np.nan)), "mu_s or sigma_s has NaN or inf"),
        (changed(mu_s=np.zeros(4), sigma_s=np.eye(4)), "mu_s has 4 values, expected 5"),
        (changed(mu=np.zeros(7), sigma=np.eye(7)), f"statistics of 7 features, but {INCEPTION} has 6; they are of an"),
        (changed(mu=np.array(["a"] * 6)), "no numbers as mu and sigma in it"),
        (changed(mu=np.array([None] * 6)), "not a readable npz .*allow_pickle"),
        (changed(n=np.array(1)), "made of 1 images; a covariance needs at least 2"),
        (changed(n=np.zeros(3)), "not a readable npz"),
        (changed(meta=np.array("{")), "not a readable npz"),
        ({"mu": np.zeros(6)}, "holds mu; expected mu and sigma, or images in arr_0"),
        ({"feats": np.zeros((9, 6))}, "holds feats; expected mu and sigma, or images in arr_0"),
        (changed(arr_0=np.zeros((2, 4, 4, 3))), "arr_0 is float64"),
    ],
)
def test_what_is_no_statistics_is_refused(tmp_path: Path, narrow: None, arrays: Arrays, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=rf"a\.npz: {message}") as raised:
        open_reference(str(tmp_path / "a.npz"), None)
    assert "\n" not in str(raised.value)


def test_damage_within_compressed_statistics_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **statistics(200))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = bytes(2000)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable npz \(.+\)"):
        open_reference(str(path), None)


def test_names_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a\.txt: not a reference; known are folders, \.npz, \.pkl \(EDM2\) and \.pt"):
        open_reference(str(tmp_path / "a.txt"), None)
    for name in ("missing", "missing.npz", "missing.pkl"):
        with pytest.raises(
            ValueError, match=f"{name} does not exist: give a folder of images, a statistics file, or d"
        ):
            open_reference(str(tmp_path / name), None)
    (tmp_path / "a.pkl").write_bytes(b"")
    (tmp_path / "a.pt").write_bytes(b"")
    for source in ("digits", str(tmp_path), str(tmp_path / "a.pkl"), str(tmp_path / "a.pt")):
        with pytest.raises(ValueError, match=f"--reference-format adm says what an npz is, but {source} is none"):
            open_reference(source, None, "adm")


# Ours, by the command


def fid(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fid", *map(str, arguments)])
    return fid_main()


def digit_pictures(start: int, stop: int) -> NDArray[np.uint8]:
    """Real digits as images of a sample npz."""
    return Digits().images[start:stop].transpose(0, 2, 3, 1).repeat(3, axis=-1)


def result_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_reference_of_digits_is_made_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fid("reference", "digits", "--out", "ref.npz", "--keep-images", 50, monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    assert "ref.npz: statistics of 1797 images of 8x8 by digits-classifier, from digits (scikit-learn" in output
    assert [path.name for path in tmp_path.iterdir()] == ["ref.npz"]
    with np.load("ref.npz") as content:  # as ADM's evaluator reads it
        assert sorted(content.files) == ["arr_0", "meta", "mu", "n", "sigma"]
        assert (content["arr_0"].shape, content["arr_0"].dtype) == ((50, 8, 8, 3), np.uint8)
        digits = {image.tobytes() for image in digit_pictures(0, 1797)}
        assert {image.tobytes() for image in content["arr_0"]} <= digits
        assert len({image.tobytes() for image in content["arr_0"]}) == 50
        meta = json.loads(str(content["meta"]))
        assert (content["mu"].shape, content["sigma"].shape, int(content["n"])) == ((64,), (64, 64), 1797)
    with zipfile.ZipFile("ref.npz") as archive, archive.open("arr_0.npy") as member:
        assert member.read(8) == b"\x93NUMPY\x01\x00"  # the version that ADM's streaming reader wants
    found = open_reference("ref.npz", None)
    assert (found.extractor, found.num_images, found.size) == (DIGITS, 1797, (8, 8))
    assert found.notes == ("statistics of 1797 images; its 50 images in arr_0 are for pr and kid alone",)
    halves = [open_from_pictures(tmp_path, digit_pictures(0, 1797)[parity::2], monkeypatch) for parity in (0, 1)]
    assert halves[0].pooled is not None
    assert halves[1].pooled is not None
    assert found.halves_distance == pytest.approx(distance(halves[0].pooled, halves[1].pooled), rel=1e-5)
    assert meta["halves_distance"] == found.halves_distance > 0.01
    assert f"two halves of them are {found.halves_distance:.4g} apart" in output

    np.savez("samples.npz", arr_0=digit_pictures(0, 60))
    arguments = ("--reference", "ref.npz", "--metrics", "fid,pr,kid", "--kid-subset-size", 20, "--out", "score.json")
    assert fid("score", "samples.npz", *arguments, monkeypatch=monkeypatch) == 0
    result = result_of(tmp_path / "score.json")
    assert [score["name"] for score in result["scores"]] == [
        *("FD-digits-60", "precision-digits-60", "recall-digits-60", "KID-digits-60 (subsets of 20)"),
    ]
    assert "of 50 real images" in result["scores"][1]["note"]
    assert result["reference_halves_distance"] == found.halves_distance
    assert result["extractor"]["name"] == DIGITS
    assert result["reference"]["num_images"] == 1797
    assert result["reference"]["file_sha256"] == found.sha256


def open_from_pictures(folder: Path, images: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch) -> Reference:
    """A reference made of some digits, by the command."""
    source, out = folder / "part.npz", folder / "part-ref.npz"
    np.savez(source, arr_0=images)
    assert fid("reference", source, "--extractor", DIGITS, "--out", out, monkeypatch=monkeypatch) == 0
    found = open_reference(str(out), None)
    source.unlink()
    out.unlink()
    return found


def test_a_reference_by_inception_holds_adms_statistics_of_the_cropped_images(
    tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("real").mkdir()
    for index, image in enumerate(pictures(3, 16)):
        Image.fromarray(image).save(f"real/{index}.png")
    arguments = ("real", "--crop", 12, "--keep-images", 9, "--extractor-weights", inception_path, "--out", "ref.npz")
    assert fid("reference", *arguments, monkeypatch=monkeypatch) == 0
    assert "warning: 3 images for 2048 features give a rank-deficient covariance" in capsys.readouterr().out
    cropped = np.stack([center_crop(image, 12) for image in pictures(3, 16)])
    expected = features.build_extractor(INCEPTION, inception_path)(torch.from_numpy(cropped.transpose(0, 3, 1, 2)))
    assert expected.spatial is not None
    with np.load("ref.npz") as content:
        assert sorted(content.files) == ["arr_0", "meta", "mu", "mu_s", "n", "sigma", "sigma_s"]
        np.testing.assert_array_equal(content["arr_0"], cropped)
        for tensor, mean, covariance in ((expected.pooled, "mu", "sigma"), (expected.spatial, "mu_s", "sigma_s")):
            rows = tensor.double().numpy()
            assert content[mean].dtype == content[covariance].dtype == np.float64
            np.testing.assert_allclose(content[mean], rows.mean(axis=0), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(content[covariance], np.cov(rows, rowvar=False), rtol=1e-2, atol=1e-8)
        meta = json.loads(str(content["meta"]))
    assert meta["image_size"] == [12, 12]
    assert meta["resize"].startswith("TensorFlow 1 bilinear to 299")
    assert meta["extractor_weights_sha256"] == file_sha256(inception_path)
    assert meta["source"] == "real, centre-cropped to 12x12"
    assert meta["lossy"] == []
    assert meta["spatial_layout"] == "rows, columns, channels"
    Path("ref.npz").unlink()  # 67 MB


def test_a_reference_of_other_weights_sizes_or_networks_does_not_compare(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", arr_0=pictures(4, 8))
    images, extractor = NpzImages(tmp_path / "a.npz"), features.build_extractor(DIGITS)
    same = Reference("ref.npz", extractor=DIGITS, extractor_weights_sha256=extractor.weights_sha256, size=(8, 8))
    require_comparable(images, same, DIGITS)
    require_same_weights(same, extractor)
    require_same_weights(replace(same, extractor_weights_sha256=None), extractor)
    with pytest.raises(
        ValueError, match=r"^ref\.npz: made with digits-classifier weights of sha256 abc\.\.\., but the ones"
    ):
        require_same_weights(replace(same, extractor_weights_sha256="abc"), extractor)
    with pytest.raises(ValueError, match=r"images of 8x8 pixels, but the reference ref\.npz has 9x8; sizes must agree"):
        require_comparable(images, replace(same, size=(8, 9)), DIGITS)
    with pytest.raises(
        ValueError, match=r"^ref\.npz: statistics of digits-classifier, but --extractor is dinov2-vit-l-14"
    ):
        require_comparable(images, same, DINO)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--out", "ref.json"], "--out ref.json: a reference is an npz; give a name that ends in .npz"),
        (["digits", "--out", "ref.npz", "--batch-size", "0"], "--batch-size must be at least 1"),
        (["digits", "--out", "ref.npz", "--keep-images", "-1"], "--keep-images at least 0"),
        (["digits", "--out", "ref.npz", "--crop", "4"], "--crop 4: digits (scikit-learn, 1797 real images) is taken"),
        (["one.npz", "--out", "ref.npz"], "one.npz: 1 image; a covariance needs at least 2"),
        (["four.npz", "--out", "ref.npz", "--crop", "8"], "--crop 8: four.npz is taken as it is; leave out --crop"),
        (
            ["four.npz", "--out", "ref.npz", "--extractor", DIGITS],
            "digits-classifier reads 8x8 digits (or 16x16), not images of 9",
        ),
        (["four.npz", "--out", "ref.npz", "--extractor", "vgg"], "unknown feature extractor 'vgg'; known: incep"),
        (["missing", "--out", "ref.npz"], "missing does not exist"),
        (["four.npz", "--out", "folder.npz"], "folder.npz: is a folder; give the name of a file"),
    ],
)
def test_a_reference_that_cannot_be_made(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("one.npz", arr_0=pictures(1))
    np.savez("four.npz", arr_0=pictures(4, 9))
    Path("folder.npz").mkdir()
    assert fid("reference", *arguments, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not Path("ref.npz").exists()


def test_statistics_and_pictures_of_one_reference_are_two_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reference of 100 pictures and the statistics of 1,000 others."""
    monkeypatch.chdir(tmp_path)
    np.savez("thousand.npz", arr_0=digit_pictures(0, 1000))
    arguments = ("--extractor", DIGITS, "--out", "ref.npz")
    assert fid("reference", "thousand.npz", *arguments, monkeypatch=monkeypatch) == 0
    np.savez("hundred.npz", arr_0=digit_pictures(1000, 1100))
    with zipfile.ZipFile("hundred.npz") as source, zipfile.ZipFile("ref.npz", "a") as target:
        target.writestr("arr_0.npy", source.read("arr_0.npy"))

    def score(source: str, against: str, *options: str) -> dict[str, Any]:
        Path("score.json").unlink(missing_ok=True)
        command = ("score", source, "--reference", against, "--out", "score.json", *options)
        assert fid(*command, monkeypatch=monkeypatch) == 0
        return result_of(Path("score.json"))

    # The statistics against themselves, and against the images they are of.
    found = open_reference("ref.npz", None)
    assert found.pooled is not None
    assert distance(found.pooled, found.pooled) == pytest.approx(0, abs=1e-6)
    same = score("thousand.npz", "ref.npz")
    assert same["scores"][0]["name"] == "FD-digits-1000"
    assert same["scores"][0]["value"] == pytest.approx(0, abs=1e-6)
    # The file's own pictures against its statistics: something else, and the result says what.
    pictures_to_statistics = score("ref.npz", "ref.npz")
    assert pictures_to_statistics["scores"][0]["name"] == "FD-digits-100"
    assert pictures_to_statistics["scores"][0]["value"] > 1
    described = pictures_to_statistics["reference"]
    assert described["statistics"] == "of the file"
    assert described["num_images"] == 1000
    assert described["file_sha256"] == found.sha256
    assert described["notes"] == ["statistics of 1000 images; its 100 images in arr_0 are for pr and kid alone"]
    assert described["notes"][0] in capsys.readouterr().out
    assert pictures_to_statistics["extractor"]["name"] == DIGITS
    assert pictures_to_statistics["extractor"]["resize"] == "none for 8x8; means of 2x2 pixels for 16x16"
    # Pictures against pictures, where there are no statistics.
    pictures_to_pictures = score("hundred.npz", "hundred.npz", "--extractor", DIGITS)
    assert pictures_to_pictures["scores"][0]["value"] == pytest.approx(0, abs=1e-6)
    assert pictures_to_pictures["reference"]["statistics"] == "computed from the images"
    assert pictures_to_pictures["reference"]["num_images"] == 100
    assert pictures_to_pictures["reference"]["notes"] == [
        "no statistics in it, so they are computed from its 100 images"
    ]
    # Sixty samples, by name; another network is refused.
    np.savez("sixty.npz", arr_0=digit_pictures(1100, 1160))
    assert score("sixty.npz", "ref.npz")["scores"][0]["name"] == "FD-digits-60"
    command = ("score", "sixty.npz", "--reference", "ref.npz", "--extractor", INCEPTION)
    assert fid(*command, monkeypatch=monkeypatch) == 1
    assert "statistics of digits-classifier, but --extractor is inception-v3-compat" in capsys.readouterr().err
    # With the pictures cut out, the statistics do alone, except for what needs pictures.
    alone = {key: value for key, value in np.load("ref.npz").items() if key != "arr_0"}
    np.savez("alone.npz", **alone)
    assert score("sixty.npz", "alone.npz")["reference"]["notes"] == []
    assert fid("score", "sixty.npz", "--reference", "alone.npz", "--metrics", "pr", monkeypatch=monkeypatch) == 1
    assert "alone.npz holds statistics alone, and pr needs real images" in capsys.readouterr().err


def test_features_of_torch_fidelity_serve_the_metrics_that_need_features(
    tmp_path: Path, inception_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("samples.npz", arr_0=pictures(4, 16))
    extractor = features.build_extractor(INCEPTION, inception_path)
    torch.save(extractor(torch.from_numpy(pictures(4, 16).transpose(0, 3, 1, 2))).pooled, "cached.pt")
    arguments = ("--reference", "cached.pt", "--metrics", "pr,kid", "--kid-subset-size", 3, "--out", "score.json")
    options = ("--extractor-weights", inception_path)
    assert fid("score", "samples.npz", *arguments, *options, monkeypatch=monkeypatch) == 0
    result = result_of(Path("score.json"))
    scores = {score["name"]: score["value"] for score in result["scores"]}
    assert (scores["precision-4"], scores["recall-4"]) == (1, 1)
    assert abs(scores["KID-4 (subsets of 3)"]) < 1e-3
    assert result["reference"]["num_images"] == 4
