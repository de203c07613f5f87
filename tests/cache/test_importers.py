import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cache.helpers import run_cache
from tests.conftest import tiny_vae
from vcagen.autoencoder import KLAutoencoder, KLConfig
from vcagen.cache.importers import EDM2_MEANS, ImportedLatents
from vcagen.cache.verify import verify_cache
from vcagen.cache.writer import build_cache, prepare_cache
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig
from vcagen.data.latent_format import plan_for

SCALE = 0.18215


@pytest.fixture(scope="module")
def autoencoder() -> KLAutoencoder:
    vae = tiny_vae()
    return KLAutoencoder(vae, vae)


def latent(label: int) -> np.ndarray:
    """Raw, (4, 8, 8); the label can be read back from it."""
    return np.random.default_rng(label).normal(label, 0.01, (4, 8, 8)).astype(np.float32)


def fast_dit(root: Path, order: list[int]) -> Path:
    for kind in ("features", "labels"):
        (root / f"imagenet256_{kind}").mkdir(parents=True)
    for number in order:
        np.save(root / f"imagenet256_features/{number}.npy", latent(number)[None] * SCALE)
    for number in reversed(order):
        np.save(root / f"imagenet256_labels/{number}.npy", np.array([number]))
    (root / "imagenet256_labels/.DS_Store").write_bytes(b"")
    (root / "imagenet256_features/x.tmp").write_bytes(b"")
    return root


def repa(root: Path, shift: np.ndarray | float = 0.0) -> Path:
    pairs = []
    for number in range(12):
        name = f"{number:05d}/img-mean-std-{number:08d}.npy"
        (root / f"vae-sd/{number:05d}").mkdir(parents=True)
        mean = latent(number) * 0.01 + np.reshape(shift, (-1, 1, 1))
        np.save(root / "vae-sd" / name, np.concatenate([mean, np.full_like(mean, 0.5)]))
        pairs.append([name, number])
    (root / "vae-sd/dataset.json").write_text(json.dumps({"labels": pairs[::-1]}))
    return root


def lightningdit(root: Path) -> Path:
    root.mkdir()
    for rank in range(2):
        labels = torch.arange(6) + 6 * rank
        drawn = torch.from_numpy(np.stack([latent(int(label)) for label in labels]))
        tensors = {"latents": drawn, "latents_flip": drawn.flip(-1).contiguous(), "labels": labels}
        save_file(tensors, root / f"latents_rank{rank:02d}_shard000.safetensors")
    return root


def imported(root: Path, cache: Path, autoencoder: KLAutoencoder, layout: Any = "fast-dit") -> None:
    source = ImportedLatents(root, layout, autoencoder)
    names = tuple(map(str, range(12)))
    config, shape = KLConfig(source="stub"), (3, 64, 64)
    plan = plan_for(
        config, autoencoder, source.records, names, shape, mirrored=False, shard_size=5, imported_from=layout
    )
    prepare_cache(cache, plan, source, "stop")
    build_cache(cache, plan, source, "stop")


def test_labels_and_values_survive_the_import(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    sources = {
        "fast-dit": fast_dit(tmp_path / "fast", list(range(12))),
        "repa": repa(tmp_path / "repa"),
        "lightningdit": lightningdit(tmp_path / "lightning"),
    }
    for layout, source in sources.items():
        cache = tmp_path / f"cache-{layout}"
        if layout == "lightningdit":
            result = run_cache("import", source, cache, "--layout", layout, "--autoencoder", tmp_path / "vae")
            assert result.returncode == 0, result.stderr
        else:
            imported(source, cache, autoencoder, layout)
        verify_cache(cache)
        data = LatentCache(LatentCacheConfig(root=str(cache), horizontal_flip=layout == "lightningdit"))
        assert len(data) == 12
        assert data.image_shape == (3, 64, 64)
        assert data.manifest.plan.imported_from == layout
        for index in range(12):
            mean, std = np.split(data.moments(index, False), 2)
            expected = latent(data.label(index)) * (0.01 if layout == "repa" else 1)
            assert np.allclose(mean, expected, atol=0.01)
            assert np.allclose(std, 0.5 if layout == "repa" else 0)
            if layout == "lightningdit":
                assert np.array_equal(data.moments(index, True), data.moments(index, False)[..., ::-1])


def test_a_missing_partner_stops_with_its_name(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    root = fast_dit(tmp_path / "fast", [3, 1, 10, 2])
    (root / "imagenet256_labels/10.npy").unlink()
    with pytest.raises(ValueError, match=r"imagenet256_labels: no label for 10.npy"):
        ImportedLatents(root, "fast-dit", autoencoder)
    np.save(root / "imagenet256_labels/10.npy", np.array([10]))
    np.save(root / "imagenet256_labels/11.npy", np.array([11]))
    with pytest.raises(ValueError, match=r"imagenet256_features: no latents for 11.npy"):
        ImportedLatents(root, "fast-dit", autoencoder)
    other = repa(tmp_path / "repa")
    (other / "vae-sd/00003/img-mean-std-00000003.npy").unlink()
    with pytest.raises(ValueError, match=r"no latents for 00003/img-mean-std-00000003.npy"):
        ImportedLatents(other, "repa", autoencoder)


def test_latents_of_pixels_in_the_wrong_range_are_refused(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    with pytest.raises(ValueError, match=r"EDM2 feeds its autoencoder pixels in \[0, 1\]"):
        ImportedLatents(tmp_path, "edm2", autoencoder)
    root = repa(tmp_path / "edm2", EDM2_MEANS)
    with pytest.raises(ValueError, match=r"channel means .* are those of EDM2's latents"):
        ImportedLatents(root, "repa", autoencoder)


def test_layouts_that_are_not_there(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        ImportedLatents(tmp_path / "x", "repa", autoencoder)
    with pytest.raises(ValueError, match="expected one folder NAME_features and NAME_labels beside it"):
        ImportedLatents(tmp_path, "fast-dit", autoencoder)
    with pytest.raises(ValueError, match=r"dataset.json: no list of names and labels"):
        ImportedLatents(tmp_path, "repa", autoencoder)
    with pytest.raises(ValueError, match=r"no \*.safetensors in it"):
        ImportedLatents(tmp_path, "lightningdit", autoencoder)
    save_file({"latents": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="has latents; expected latents, latents_flip, labels"):
        ImportedLatents(tmp_path, "lightningdit", autoencoder)


def test_an_autoencoder_of_other_latents_is_refused(tmp_path: Path) -> None:
    tiny_vae(latent_channels=3).save_pretrained(tmp_path / "vae")
    source = lightningdit(tmp_path / "lightning")
    vae = tmp_path / "vae"
    result = run_cache("import", source, tmp_path / "cache", "--layout", "lightningdit", "--autoencoder", vae)
    assert result.returncode == 1
    assert f"latents are (4, 8, 8), but {vae} makes (3, 8, 8)" in result.stderr
    assert not (tmp_path / "cache").exists()


def put(path: Path, content: object) -> None:
    """One file in the place of another."""
    with path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            np.save(file, content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros(()), r"shape \(\); expected latents \(C, h, w\) or \(1, C, h, w\)"),
        (np.zeros((2, 4, 8, 8)), r"shape \(2, 4, 8, 8\); expected latents"),
        (np.zeros((0, 8, 8)), r"shape \(0, 8, 8\); expected latents"),
        (np.zeros((4, 8, 8), np.complex64), "complex64 numbers; latents are floating-point"),
        (np.zeros((4, 8, 8), bool), "bool numbers; latents are floating-point"),
        (np.array([None]), "not a whole .npy file of numbers"),
        (b"PK\x03\x04 half an archive", "not a whole .npy file of numbers"),
        (b"", "not a whole .npy file of numbers"),
    ],
)
def test_arrays_that_are_no_latents_are_named(
    tmp_path: Path, autoencoder: KLAutoencoder, content: object, message: str
) -> None:
    path = fast_dit(tmp_path / "fast", [0, 1]) / "imagenet256_features/1.npy"
    put(path, content)
    with pytest.raises(ValueError, match=rf"imagenet256_features/1.npy: {message}[^\n]*$"):
        list(ImportedLatents(tmp_path / "fast", "fast-dit", autoencoder).batches(0, 2))


def test_archives_odd_channels_and_other_shapes_are_named(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    root = fast_dit(tmp_path / "fast", [0, 1])
    path = root / "imagenet256_features/1.npy"
    with path.open("wb") as file:
        np.savez(file, latent(1))
    with pytest.raises(ValueError, match=r"features/1.npy: an .npz archive; expected one array"):
        list(ImportedLatents(root, "fast-dit", autoencoder).batches(0, 2))
    np.save(path, latent(1)[:, :4])
    message = r"1.npy: latents \(4, 4, 8\), but those of 0.npy are \(4, 8, 8\); all must have one shape"
    with pytest.raises(ValueError, match=message):
        list(ImportedLatents(root, "fast-dit", autoencoder).batches(0, 2))
    other = repa(tmp_path / "repa")
    np.save(other / "vae-sd/00000/img-mean-std-00000000.npy", np.zeros((9, 8, 8), np.float32))
    with pytest.raises(ValueError, match=r"00000000.npy: shape \(9, 8, 8\); expected \(2C, h, w\): C means"):
        ImportedLatents(other, "repa", autoencoder)


def test_labels_count_from_0(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    root = fast_dit(tmp_path / "fast", [0, 1])
    np.save(root / "imagenet256_labels/1.npy", np.array([-1]))
    with pytest.raises(ValueError, match=r"labels/1.npy: -1 is not a class number \(classes count from 0\)"):
        ImportedLatents(root, "fast-dit", autoencoder)
    other = repa(tmp_path / "repa")
    listing = other / "vae-sd/dataset.json"
    listing.write_text(listing.read_text().replace(", 7]", ", -7]"))
    with pytest.raises(ValueError, match=r"dataset.json: 00007/img-mean-std-00000007.npy: -7 is not a class number"):
        ImportedLatents(other, "repa", autoencoder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("latents", torch.zeros(2, 4, 8, 8).to(torch.float8_e4m3fn), "latents is F8_E4M3; expected one of F64"),
        ("latents_flip", torch.zeros(2, 4, 8, 8, dtype=torch.int32), "latents_flip is I32; expected one of F64"),
        ("latents", torch.zeros(2, 4, 8, 8, dtype=torch.complex64), "latents is C64; expected one of F64"),
        ("latents_flip", torch.zeros(2, 4, 8, 4), r"latents_flip has shape \(2, 4, 8, 4\); expected \(n, C, h, w\)"),
        ("latents", torch.zeros(()), r"latents has shape \(\); expected \(n, C, h, w\)"),
        ("labels", torch.zeros(3), "2 latents, but 3 labels"),
        ("labels", torch.tensor([0, -1]), "labels, row 1: -1 is not a class number"),
    ],
)
def test_tensors_that_are_no_latents_are_named(
    tmp_path: Path, autoencoder: KLAutoencoder, name: str, tensor: torch.Tensor, message: str
) -> None:
    tensors = {"latents": torch.zeros(2, 4, 8, 8), "latents_flip": torch.ones(2, 4, 8, 8), "labels": torch.zeros(2)}
    save_file(tensors | {name: tensor}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=rf"a.safetensors: {message}[^\n]*$"):
        ImportedLatents(tmp_path, "lightningdit", autoencoder)


def test_bfloat16_is_read(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    drawn = torch.from_numpy(np.stack([latent(0), latent(1)])).bfloat16()
    save_file({"latents": drawn, "latents_flip": drawn + 1, "labels": torch.arange(2)}, tmp_path / "a.safetensors")
    (batch,) = ImportedLatents(tmp_path, "lightningdit", autoencoder).batches(0, 2)
    assert torch.equal(batch.moments[:, :4], drawn.half())
    assert batch.mirrored is not None
    assert torch.equal(batch.mirrored[:, :4], (drawn + 1).half())


def test_latents_that_changed_since_their_import_are_noticed(tmp_path: Path, autoencoder: KLAutoencoder) -> None:
    root, cache = fast_dit(tmp_path / "fast", list(range(12))), tmp_path / "cache"
    imported(root, cache, autoencoder)
    imported(root, cache, autoencoder)  # there is nothing left to do
    np.save(root / "imagenet256_features/7.npy", latent(3).astype(np.float64))
    with pytest.raises(ValueError, match=r"is finished, but from 5.npy to 9.npy names, labels or file sizes have"):
        imported(root, cache, autoencoder)
