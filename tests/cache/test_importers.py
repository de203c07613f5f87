import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cache.helpers import run_cache
from tests.conftest import tiny_vae
from vcagen.autoencoder import KLAutoencoder
from vcagen.cache.importers import EDM2_MEANS, ImportedLatents
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig

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


def test_labels_and_values_survive_the_import(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    sources = {
        "fast-dit": fast_dit(tmp_path / "fast", list(range(12))),
        "repa": repa(tmp_path / "repa"),
        "lightningdit": lightningdit(tmp_path / "lightning"),
    }
    for layout, source in sources.items():
        cache = tmp_path / f"cache-{layout}"
        result = run_cache("import", source, cache, "--layout", layout, "--autoencoder", tmp_path / "vae")
        assert result.returncode == 0, result.stderr
        assert run_cache("verify", cache).returncode == 0
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
