import argparse
import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cache.helpers import (
    STEP,
    build,
    cache_command,
    coloured_image,
    contents,
    run_cache,
    tiny_plan,
    write_parquet,
    write_tars,
    write_tree,
)
from tests.conftest import pooling_vae, tiny_vae
from tests.data_images.image_helpers import write_odd_files
from tests.tiny_runs import ROOT, losses
from vcagen.autoencoder import IdentityAutoencoder, KLAutoencoder
from vcagen.cache import commands
from vcagen.cache.moments import EncodedImages
from vcagen.cache.report import write_contact_sheet
from vcagen.cache.sources import open_source
from vcagen.cache.verify import verify_cache
from vcagen.cache.writer import prepare_cache
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig
from vcagen.data.latent_format import Shard, read_manifest, shard_path


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    tiny_vae().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree") / "images")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tree: Path, vae: Path) -> dict[str, bytes]:
    """The cache of the tree, built in one go by one process."""
    cache = tmp_path_factory.mktemp("cache") / "reference"
    result = run_cache(*arguments(tree, cache, vae))
    assert result.returncode == 0, result.stderr
    return contents(cache)


def arguments(source: Path, cache: Path, vae: Path) -> list[Any]:
    return ["build", source, cache, "--image-size", 64, "--autoencoder", vae, "--shard-size", 16, "--batch-size", 8]


def test_folder_tar_and_parquet_give_the_same_bytes(
    tmp_path: Path, tree: Path, vae: Path, reference: dict[str, bytes]
) -> None:
    for source in (write_tars(tree, tmp_path / "tars"), write_parquet(tree, tmp_path / "parquet")):
        cache = tmp_path / f"cache-{source.name}"
        result = run_cache(*arguments(source, cache, vae))
        assert result.returncode == 0, result.stderr
        assert contents(cache) == reference


def test_two_processes_give_the_same_bytes(tmp_path: Path, tree: Path, vae: Path, reference: dict[str, bytes]) -> None:
    result = run_cache(*arguments(tree, tmp_path / "cache", vae), processes=2)
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "cache") == reference
    assert result.stdout.count("60 images in 10 classes") == 1


def test_a_build_that_was_killed_goes_on_to_the_same_bytes(
    tmp_path: Path, tree: Path, vae: Path, reference: dict[str, bytes]
) -> None:
    cache = tmp_path / "cache"
    killed = 0
    for shards in (1, 3):  # killed when so many are there, twice
        process = subprocess.Popen(cache_command(*arguments(tree, cache, vae)), cwd=ROOT, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(list(cache.glob("shards/*.safetensors"))) < shards:
            time.sleep(0.002)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed
    result = run_cache(*arguments(tree, cache, vae))
    assert result.returncode == 0, result.stderr
    assert contents(cache) == reference
    assert run_cache("verify", cache).returncode == 0
    assert run_cache(*arguments(tree, cache, vae)).returncode == 0  # there is nothing left to do
    assert contents(cache) == reference


def test_what_another_stop_leaves_behind_is_done_again(tmp_path: Path, tree: Path) -> None:
    autoencoder = IdentityAutoencoder()
    build(tree, tmp_path / "whole", autoencoder)
    cache = tmp_path / "cut"
    source = open_source(str(tree))
    prepare_cache(cache, tiny_plan(source, autoencoder), EncodedImages(source, autoencoder, 64, True, 8, 2), "stop")
    (cache / "shards/.00001.999.safetensors").write_bytes(b"half a shard")
    (cache / "shards/00002.safetensors").write_bytes(b"a shard without its note")
    (cache / "shards/00003.json").write_text('{"shard":')
    build(tree, cache, autoencoder)
    assert contents(cache) == contents(tmp_path / "whole")


def test_from_odd_files_to_decoded_samples(tmp_path: Path, vae: Path) -> None:
    tree = write_tree(tmp_path / "tree", suffix=".jpg")
    odd = write_odd_files(tmp_path / "odd")
    for path in [*odd.good, *odd.bad]:
        path.rename(tree / "3" / f"{path.parent.name}-{path.name}")
    cache = tmp_path / "cache"
    strict = run_cache(*arguments(tree, cache, vae))
    assert strict.returncode == 1
    assert "3 of 76 images are bad: repair or remove them, or go on without them by --on-bad skip" in strict.stderr
    for name in ("3/colour-half.jpg: image file is truncated", "3/gray-empty.png: empty", "3/gray-text.png: empty"):
        assert name in strict.stderr
    assert not (cache / "manifest.json").exists()
    assert not list((cache / "shards").glob("*.safetensors"))  # they are found before any work is done
    result = run_cache(*arguments(tree, cache, vae), "--on-bad", "skip")
    assert result.returncode == 0, result.stderr
    assert "73 images, 3 bad ones skipped" in result.stdout
    assert "whole; 73 images in 5 shards" in run_cache("verify", cache).stdout
    report = (cache / "report.md").read_text()
    assert "73 of 76 images in 10 classes (6 to 19 in each)" in report
    assert "3/gray-text.png: empty" in report
    assert np.asarray(Image.open(cache / "contact_sheet.png")).shape == (4 * 66 + 2, 8 * 66 + 2, 3)
    by_key = {key: label for n in range(5) for label, key in Shard(shard_path(cache, n)).records()}
    assert by_key["3/colour-cmyk.jpg"] == 3
    assert all(label == int(key.split("/")[0]) for key, label in by_key.items())

    run_dir = tmp_path / "run"
    settings = [
        *("data.name=latent_cache", f"data.root={cache}", "autoencoder.name=kl", f"autoencoder.source={vae}"),
        *("train.max_steps=20", "train.num_workers=2", f"run_dir={run_dir}", "guidance.scale=1.5"),
        *("model.variant=SiT-tiny/2", "model.hidden_size=32", "model.depth=2", "model.num_heads=2"),
        *("train.global_batch_size=8", "train.trackers=[]", "train.log_every=5", "sampler.num_steps=3"),
    ]
    trained = subprocess.run(
        [*cache_command()[:1], "train.py", "configs/demo.yaml", *settings], cwd=ROOT, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    assert "data: 73 latents in 10 classes, bad images skipped: 3" in trained.stdout
    assert len(losses(run_dir)) == 4
    sampled = subprocess.run(
        [*cache_command()[:1], "sample.py", str(run_dir), "--labels", "1,2", "--out", str(tmp_path / "images")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert sampled.returncode == 0, sampled.stderr
    assert np.asarray(Image.open(tmp_path / "images/000000.png")).shape == (64, 64, 3)


def class_of(moments: np.ndarray) -> int:
    """The class that the red channel of an identity or pooled latent shows."""
    red = np.median(moments[0].astype(np.float32))
    return round(float((red + 1) * 127.5) / STEP)


def latents(cache: Path, **settings: Any) -> LatentCache:
    return LatentCache(LatentCacheConfig(root=str(cache), **settings))


def test_labels_belong_to_their_latents_whatever_was_made_first(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for label in reversed(range(12)):  # written in reverse; "10" sorts before "2" as text
        (tree / str(label)).mkdir(parents=True)
        for number in (1, 0):
            Image.fromarray(coloured_image(label % 10, number)).save(tree / f"{label}/{number}.png")
    for stray in (".DS_Store", "3/.tmp", "3/notes.tmp"):
        (tree / stray).write_bytes(b"")
    manifest = build(tree, tmp_path / "cache", IdentityAutoencoder())
    data = latents(tmp_path / "cache")
    assert manifest.plan.class_names == tuple(map(str, range(12)))
    assert len(data) == 24
    for index in range(len(data)):
        assert class_of(data.moments(index, mirrored=False)) == data.label(index) % 10
        assert data.class_names[data.label(index)] == str(data.label(index))


def test_mirror_images_are_encoded_as_mirror_images(tmp_path: Path, tree: Path) -> None:
    build(tree, tmp_path / "cache", IdentityAutoencoder())
    data = latents(tmp_path / "cache")
    for index in (0, 7, 33):
        assert np.array_equal(data.moments(index, True), data.moments(index, False)[..., ::-1])
    build(tree, tmp_path / "plain", IdentityAutoencoder(), mirrored=False)
    with pytest.raises(ValueError, match=r"has no mirror images, which data.horizontal_flip=true needs"):
        latents(tmp_path / "plain")
    assert not latents(tmp_path / "plain", horizontal_flip=False).can_mirror


def test_scale_and_shift_go_once_each_way_and_statistics_are_what_training_draws(tmp_path: Path, tree: Path) -> None:
    plain = build(tree, tmp_path / "plain", KLAutoencoder(pooling_vae(1.0, 0.0), pooling_vae(1.0, 0.0)))
    shift = plain.latent_mean[0]
    scale = 1 / plain.latent_std[0]
    vae = pooling_vae(scale, shift)
    autoencoder = KLAutoencoder(vae, vae)
    manifest = build(tree, tmp_path / "cache", autoencoder)
    assert (manifest.latent_mean[0], manifest.latent_std[0]) == (pytest.approx(0, abs=1e-3), pytest.approx(1, abs=1e-3))
    data = latents(tmp_path / "cache")
    data.require_autoencoder(manifest.plan.autoencoder, autoencoder)
    moments = torch.from_numpy(np.stack([data.moments(i, False) for i in range(len(data))])).float()
    drawn = autoencoder.sample_latents(moments, [torch.Generator() for _ in moments])
    assert drawn[:, 0].mean().item() == pytest.approx(0, abs=1e-3)
    assert drawn[:, 0].std().item() == pytest.approx(1, abs=0.02)
    images = autoencoder.decode(drawn)
    for index in (0, 20, 59):
        expected = torch.from_numpy(coloured_image(index // 6, index % 6)).permute(2, 0, 1)
        assert (images[index].int() - expected.int()).abs().max() <= 1
    other = KLAutoencoder(pooling_vae(0.5, 0.0), pooling_vae(0.5, 0.0))
    with pytest.raises(ValueError, match=rf"scale {scale}.*, in the run's config 0.5; shift {shift}.*config 0.0"):
        data.require_autoencoder(manifest.plan.autoencoder, other)
    write_contact_sheet(tmp_path / "cache", manifest, autoencoder, lambda key: coloured_image(0, 0).transpose(2, 0, 1))
    assert (tmp_path / "cache/contact_sheet.png").is_file()


def test_a_latent_that_is_not_finite_names_its_image(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", num_classes=2, images=2)
    Image.fromarray(np.full((64, 64, 3), 255, np.uint8)).save(tree / "1/bright.png")
    vae = pooling_vae(1.0, 0.0)
    encoder = vae.encoder

    class Overflowing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            out = self.inner(images)
            return torch.where(images.mean((1, 2, 3), keepdim=True) > 0.9, out * 1e6, out)

    vae.encoder = Overflowing()
    with pytest.raises(ValueError, match=r"1/bright.png: the autoencoder's moments are not finite in float16"):
        build(tree, tmp_path / "cache", KLAutoencoder(vae, vae))
    assert not (tmp_path / "cache/manifest.json").exists()


@pytest.fixture
def cache(tmp_path: Path, tree: Path) -> Path:
    build(tree, tmp_path / "cache", IdentityAutoencoder())
    return tmp_path / "cache"


def test_one_flipped_byte_is_found(cache: Path) -> None:
    path = shard_path(cache, 1)
    content = bytearray(path.read_bytes())
    content[-100_000] ^= 1
    path.write_bytes(content)
    latents(cache)  # size, labels and keys are as they were
    with pytest.raises(ValueError, match=r"1 faults\n.*00001.safetensors: sha256 [0-9a-f]+, expected [0-9a-f]+"):
        verify_cache(cache)


def test_labels_without_class_names_are_found(cache: Path) -> None:
    path = cache / "manifest.json"
    content = json.loads(path.read_text())
    content["plan"]["class_names"] = content["plan"]["class_names"][:7]
    path.write_text(json.dumps(content))
    message = r"00003.safetensors: labels from 8 to 9, but 7 class names in manifest.json"
    with pytest.raises(ValueError, match=message):
        verify_cache(cache)
    with pytest.raises(ValueError, match="labels up to 9, but 7 class names"):
        latents(cache)


def test_a_disk_that_refuses_is_told_with_the_file(tmp_path: Path, tree: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, name in ((100, "plan.json"), (100_000, "shards/00000.safetensors")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=rf"{name}: cannot be written \(.*too large"):
                build(tree, tmp_path / "cache", IdentityAutoencoder())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    build(tree, tmp_path / "cache", IdentityAutoencoder())
    verify_cache(tmp_path / "cache")


def test_missing_cut_and_extra_shards_are_refused(cache: Path) -> None:
    shard_path(cache, 2).unlink()
    with pytest.raises(ValueError, match=r"00002.safetensors: missing or damaged"):
        latents(cache)
    shard_path(cache, 1).write_bytes(shard_path(cache, 1).read_bytes()[:-7])
    shard_path(cache, 9).write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"(?s)3 faults.*00009.*does not belong.*00001.*bytes, expected.*00002.*missing"
    ):
        verify_cache(cache)
    with pytest.raises(ValueError, match=r"00001.safetensors: missing or damaged"):
        latents(cache)


def test_swapped_labels_are_refused(cache: Path) -> None:
    first, last = shard_path(cache, 0), shard_path(cache, 2)
    content = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(content)
    with pytest.raises(ValueError, match=r"00000.safetensors: labels or keys are not those of the manifest"):
        latents(cache)
    first.write_bytes(content)
    tensors = load_file(last)
    save_file(tensors | {"labels": tensors["labels"].flip(0)}, last, metadata={"format": "vcagen latents"})
    with pytest.raises(ValueError, match=r"00002.safetensors: (labels or keys|not the shard)"):
        latents(cache)


def test_another_autoencoder_or_crop_is_refused(cache: Path, tree: Path) -> None:
    data = latents(cache)
    vae = tiny_vae()
    from vcagen.autoencoder import KLConfig

    with pytest.raises(ValueError, match=r"autoencoder.name identity, in the run's config kl.*encoder weights"):
        data.require_autoencoder(KLConfig(source="x"), KLAutoencoder(vae, vae))
    before = contents(cache)
    with pytest.raises(ValueError, match=r"holds another cache: .*image_size was 64, now 32"):
        build(tree, cache, IdentityAutoencoder(), image_size=32)
    with pytest.raises(ValueError, match=r"mirrored was True, now False"):
        build(tree, cache, IdentityAutoencoder(), mirrored=False)
    assert contents(cache) == before


def test_manifests_that_cannot_be_used(cache: Path, tree: Path, tmp_path: Path) -> None:
    path = cache / "manifest.json"
    content = json.loads(path.read_text())
    content["plan"]["format_version"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="format 2 is newer than this vcagen reads"):
        read_manifest(cache)
    del content["count"]
    content["plan"]["format_version"] = 1
    for text, message in (
        (json.dumps(content), "count: Field required; the file is damaged or not ours"),
        ("[]", "content: Input should be a valid dictionary"),
        ('{"name": "an extension", "version": "1.0"}', "plan: Field required"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"manifest.json: {message}[^\n]*$"):
            read_manifest(cache)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json: cannot be read"):
        read_manifest(cache)
    path.unlink()
    (cache / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="the cache is not finished; run the same command again"):
        read_manifest(cache)
    with pytest.raises(ValueError, match=r"plan.json: autoencoder: Field required[^\n]*$"):
        build(tree, cache, IdentityAutoencoder())
    with pytest.raises(ValueError, match="not a latent cache"):
        read_manifest(tmp_path)


def test_classes_that_changed_are_refused_at_resume(tmp_path: Path) -> None:
    from tests.tiny_runs import tiny_config
    from vcagen.training import train

    tree = write_tree(tmp_path / "tree", num_classes=12, images=2)
    build(tree, tmp_path / "cache", IdentityAutoencoder(), image_size=8)
    settings = ["data.name=latent_cache", "train.label_dropout=0.1"]
    train(tiny_config(tmp_path / "run", *settings, f"data.root={tmp_path}/cache", "train.max_steps=1"))
    for path in (tree / "3").iterdir():
        path.unlink()
    (tree / "3").rmdir()
    build(tree, tmp_path / "fewer", IdentityAutoencoder(), image_size=8)
    with pytest.raises(ValueError, match="class 3 was '3' in training, but is '4' in the data now"):
        train(tiny_config(tmp_path / "run", *settings, f"data.root={tmp_path}/fewer", "train.max_steps=2"))


def test_repaired_images_are_read_again_after_a_skipping_build(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", num_classes=2, images=2)
    good = {path: path.read_bytes() for path in (tree / "1").iterdir()}
    for path in good:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no readable image is left in class 1"):
        build(tree, tmp_path / "cache", IdentityAutoencoder(), on_bad="skip")
    for path, content in good.items():
        path.write_bytes(content)
    assert build(tree, tmp_path / "cache", IdentityAutoencoder(), on_bad="skip").count == 4


def test_classes_without_images_are_no_loss(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", num_classes=2, images=2)
    tars = write_tars(tree, tmp_path / "tars", parts=1)
    names = ("a", "b", "c", "d")
    assert build(tars, tmp_path / "cache", IdentityAutoencoder(), on_bad="skip", names=names).plan.class_names == names


def test_what_a_kill_after_the_manifest_left_is_tidied(tmp_path: Path, cache: Path, tree: Path) -> None:
    (cache / "shards/00000.json").write_text("{}")
    (cache / "plan.json").write_text("{}")
    build(tree, cache, IdentityAutoencoder())
    assert not (cache / "plan.json").exists()
    verify_cache(cache)


def stamps(cache: Path) -> list[int]:
    """When each shard was written."""
    return [path.stat().st_mtime_ns for path in sorted((cache / "shards").glob("*.safetensors"))]


def test_shards_that_are_missing_cut_or_damaged_are_made_again(cache: Path, tree: Path) -> None:
    before, written = contents(cache), stamps(cache)
    shard_path(cache, 1).unlink()
    shard_path(cache, 2).write_bytes(before["shards/00002.safetensors"][:-7])
    build(tree, cache, IdentityAutoencoder())
    assert contents(cache) == before
    assert [stamp == old for stamp, old in zip(stamps(cache), written, strict=True)] == [True, False, False, True]


@pytest.mark.parametrize("mend", ["repair", "remove"])
def test_after_bad_images_are_repaired_or_removed_a_strict_build_goes_on(tmp_path: Path, mend: str) -> None:
    tree = write_tree(tmp_path / "tree", num_classes=4)
    image = tree / "0/3.png"
    content = image.read_bytes()
    image.write_bytes(content[:-40])
    with pytest.raises(ValueError, match=r"1 of 24 images are bad: repair or remove them.*\n0/3.png: "):
        build(tree, tmp_path / "cache", IdentityAutoencoder())
    assert not stamps(tmp_path / "cache")
    if mend == "repair":
        image.write_bytes(content)
    else:
        image.unlink()
    build(tree, tmp_path / "cache", IdentityAutoencoder())
    build(tree, tmp_path / "fresh", IdentityAutoencoder())
    assert contents(tmp_path / "cache") == contents(tmp_path / "fresh")


class Stopping(IdentityAutoencoder):
    """Breaks off at the third shard."""

    calls = 0

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 8:  # 16 images and their mirror images in batches of 8 make four
            raise KeyboardInterrupt
        return super().encode(images)


def test_images_that_change_between_calls_cost_their_own_shards_alone(tmp_path: Path) -> None:
    tree, cache = write_tree(tmp_path / "tree"), tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        build(tree, cache, Stopping())
    written = stamps(cache)
    assert len(written) == 2
    other = write_tree(tmp_path / "other", num_classes=4, suffix=".bmp")
    with pytest.raises(ValueError, match="holds another cache: of the 32 images done there 0 are in this source"):
        build(other, cache, IdentityAutoencoder())
    Image.fromarray(coloured_image(3, 9)).save(tree / "3/0.png", compress_level=0)
    (tree / "9/5.png").unlink()
    build(tree, cache, IdentityAutoencoder())
    build(tree, tmp_path / "fresh", IdentityAutoencoder())
    assert contents(cache) == contents(tmp_path / "fresh")
    assert [stamp in written for stamp in stamps(cache)] == [True, False, False, False]  # class 3 starts at 18


def test_fewer_images_leave_no_shards_behind(tmp_path: Path) -> None:
    tree, cache = write_tree(tmp_path / "tree", num_classes=3), tmp_path / "cache"
    (tree / "2/5.png").write_bytes(b"")
    with pytest.raises(ValueError, match="1 of 18 images are bad"):
        build(tree, cache, IdentityAutoencoder())
    for number in range(2, 6):
        (tree / f"2/{number}.png").unlink()
    assert len(build(tree, cache, IdentityAutoencoder()).shards) == 1
    verify_cache(cache)


def test_images_that_change_under_a_finished_cache_are_refused(tmp_path: Path) -> None:
    tree, cache = write_tree(tmp_path / "tree", num_classes=4), tmp_path / "cache"
    build(tree, cache, IdentityAutoencoder())
    before = contents(cache)
    Image.fromarray(coloured_image(3, 9)).save(tree / "3/0.png", compress_level=0)
    with pytest.raises(ValueError, match=r"is finished, but from 2/4.png to 3/5.png names, labels or file sizes have"):
        build(tree, cache, IdentityAutoencoder())
    (tree / "3/0.png").unlink()
    with pytest.raises(ValueError, match="is finished, of 24 images in 4 classes; now there are 23 in 4"):
        build(tree, cache, IdentityAutoencoder())
    assert contents(cache) == before


def test_skipped_images_are_tried_again_and_they_alone(tmp_path: Path) -> None:
    tree, cache = write_tree(tmp_path / "tree"), tmp_path / "cache"
    good = {name: (tree / name).read_bytes() for name in ("0/3.png", "9/5.png")}
    for name, content in good.items():
        (tree / name).write_bytes(bytes(len(content)))  # as long, so that only trying tells
    build(tree, cache, IdentityAutoencoder(), on_bad="skip")
    before, written = contents(cache), stamps(cache)
    build(tree, cache, IdentityAutoencoder(), on_bad="skip")
    assert (contents(cache), stamps(cache)) == (before, written)
    (tree / "0/3.png").write_bytes(good["0/3.png"])
    with pytest.raises(
        ValueError, match=r"1 images skipped before can be read now, but 1 are still bad: .*; the cache is as it was"
    ):
        build(tree, cache, IdentityAutoencoder())
    assert (contents(cache), stamps(cache)) == (before, written)
    manifest = build(tree, cache, IdentityAutoencoder(), on_bad="skip")
    assert (manifest.count, list(manifest.skipped)) == (59, ["9/5.png"])
    assert [stamp == old for stamp, old in zip(stamps(cache), written, strict=True)] == [False, True, True, True]
    (tree / "9/5.png").write_bytes(good["9/5.png"])
    build(tree, cache, IdentityAutoencoder())
    build(tree, tmp_path / "fresh", IdentityAutoencoder())
    assert contents(cache) == contents(tmp_path / "fresh")


@pytest.mark.parametrize("name", ["report.md", "contact_sheet.png", "shards"])
def test_a_folder_with_files_of_its_own_is_left_alone(tmp_path: Path, tree: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"mine/{name}: exists, but .*mine is no latent cache; choose another folder"):
        build(tree, tmp_path / "mine", IdentityAutoencoder())
    assert (tmp_path / "mine" / name).read_text() == "mine"


def test_a_cache_in_its_own_source_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", num_classes=1, images=1)
    for target in (tree, tree / "out"):
        given = argparse.Namespace(
            source=str(tree), cache=target, image_size=64, batch_size=8, threads=1, shard_size=16
        )
        with pytest.raises(ValueError, match=rf"{target}: lies in the source"):
            commands.build(given)
    assert sorted(path.name for path in tree.rglob("*")) == ["0", "0.png"]
