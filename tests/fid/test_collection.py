"""What must not matter: batch size, process count, and where a run was stopped."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fid.collection import Collected, Collection, Wanted
from fid.features import Extractor
from fid.frechet import frechet_distance
from fid.images import About
from fid.moments import FeatureMoments
from tests.fid.collecting import NUM_IMAGES, collect
from tests.tiny_runs import ROOT, tiny_config
from vcagen.training import train

DIMENSION = 5


class NumberedImages:
    """2x2 images that hold their own number; counts how often each is asked for."""

    from_files = True

    def __init__(self, num_images: int, stop_at: int | None = None) -> None:
        self.about = About("numbers", num_images, (2, 2))
        self.asked: Counter[int] = Counter()
        self.stop_at, self.lock = stop_at, threading.Lock()

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        if self.stop_at is not None and self.stop_at in indices:
            raise KeyboardInterrupt
        with self.lock:
            self.asked.update(indices)
        return np.array([[[[i % 256, i // 256], [7, 0]]] * 3 for i in indices], dtype=np.uint8)

    def identity(self) -> dict[str, Any]:
        return {"numbers": self.about.num_images}


class Projection(nn.Module):
    """Features that are a fixed random function of an image's number, and two logits; NaN for one image if asked."""

    def __init__(self, nan_at: int | None = None) -> None:
        super().__init__()
        self.nan_at = nan_at

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = images[:, 0, 0, 0].long() + 256 * images[:, 0, 0, 1].long()
        generators = [torch.Generator().manual_seed(int(number)) for number in numbers]
        features = torch.stack([torch.randn(DIMENSION, generator=generator) for generator in generators])
        if self.nan_at is not None:
            features[numbers == self.nan_at, 2] = torch.nan
        return features, features[:, :2]


def extractor(nan_at: int | None = None) -> Extractor:
    return Extractor("digits-classifier", DIMENSION, "", Projection(nan_at), torch.device("cpu"))


class OneOf:
    """One of several processes, as threads."""

    def __init__(self, index: int, barrier: threading.Barrier) -> None:
        self.process_index, self.num_processes, self.barrier = index, barrier.parties, barrier

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def wait_for_everyone(self) -> None:
        self.barrier.wait(20)


def run_all(collection: Collection, num_processes: int, batch_size: int) -> Collected:
    collection.prepare()
    barrier = threading.Barrier(num_processes)
    threads = [
        threading.Thread(target=collection.run, args=(batch_size, OneOf(index, barrier)))
        for index in range(num_processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return collection.result()


def expected_features(num_images: int) -> NDArray[np.float32]:
    images = NumberedImages(num_images).batch(range(num_images))
    features: NDArray[np.float32] = Projection()(torch.from_numpy(images))[0].numpy()
    return features


WANTED = Wanted(features=True)


@pytest.mark.parametrize("num_images", [3, 7, 50])
@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_every_image_counts_once_in_any_number_of_processes(
    tmp_path: Path, num_images: int, num_processes: int, batch_size: int
) -> None:
    images = NumberedImages(num_images)
    collected = run_all(Collection(images, extractor(), WANTED, tmp_path, "numbers"), num_processes, batch_size)
    assert images.asked == Counter(range(num_images))
    features = expected_features(num_images)
    assert collected.features is not None
    np.testing.assert_array_equal(collected.features, features)
    moments = collected.part.pooled()
    assert moments.n == num_images
    np.testing.assert_allclose(moments.mean(), features.astype(np.float64).mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(moments.covariance(), np.cov(features.T.astype(np.float64)), rtol=0, atol=1e-12)
    assert [half.n for half in collected.part.halves] == [-(-num_images // 2), num_images // 2]
    np.testing.assert_array_equal(collected.part.predictions, features[:, :2].argmax(axis=1))
    assert collected.duplicates == 0


@pytest.mark.parametrize("processes_after", [1, 3])
def test_a_stopped_collection_goes_on_in_another_number_of_processes(tmp_path: Path, processes_after: int) -> None:
    stopped = NumberedImages(50, stop_at=33)
    with pytest.raises(KeyboardInterrupt):
        Collection(stopped, extractor(), WANTED, tmp_path, "numbers").run(4, OneOf(0, threading.Barrier(1)))
    assert sorted(stopped.asked) == list(range(32))
    resumed = NumberedImages(50)
    collected = run_all(Collection(resumed, extractor(), WANTED, tmp_path, "numbers"), processes_after, 7)
    assert sorted(resumed.asked) == list(range(32, 50))  # nothing is taken twice, nothing is lost
    assert collected.features is not None
    np.testing.assert_array_equal(collected.features, expected_features(50))
    assert collected.part.pooled().n == 50


def test_a_stop_while_parts_are_made_one_counts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection = Collection(NumberedImages(20), extractor(), WANTED, tmp_path, "numbers")
    run_all(collection, 3, 4)
    parts = sorted(tmp_path.glob("part-*.safetensors"))
    assert len(parts) == 3
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # the kill comes before the first deletion
        collection.prepare()
    assert len(sorted(tmp_path.glob("part-*.safetensors"))) == 4
    assert collection.result().part.pooled().n == 20
    collection.prepare()
    assert collection.result().part.pooled().n == 20


def test_features_that_are_not_finite_name_the_image_and_keep_the_rest(tmp_path: Path) -> None:
    bad = Collection(NumberedImages(20), extractor(nan_at=13), WANTED, tmp_path, "numbers")
    with pytest.raises(ValueError, match="numbers: the features of image 13 are NaN or inf"):
        bad.run(4, OneOf(0, threading.Barrier(1)))
    images = NumberedImages(20)
    assert run_all(Collection(images, extractor(), WANTED, tmp_path, "numbers"), 1, 4).part.pooled().n == 20
    assert min(images.asked) == 12


def test_a_stop_in_the_middle_of_adding_costs_a_batch_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Collection(NumberedImages(20), extractor(), WANTED, tmp_path, "numbers")
    update, calls = FeatureMoments.update, []

    def stop(self: FeatureMoments, features: torch.Tensor) -> None:
        update(self, features)
        calls.append(len(features))
        if len(calls) == 7:
            raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr(FeatureMoments, "update", stop)
        with pytest.raises(SystemExit):
            stopped.run(2, OneOf(0, threading.Barrier(1)))
    collected = run_all(Collection(NumberedImages(20), extractor(), WANTED, tmp_path, "numbers"), 1, 4)
    assert collected.part.pooled().n == 20
    np.testing.assert_array_equal(collected.features, expected_features(20))


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    collection = Collection(NumberedImages(20), extractor(), WANTED, tmp_path, "numbers")
    run_all(collection, 1, 4)
    (part,) = tmp_path.glob("part-*.safetensors")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{part.name}: damaged .*; delete it"):
        collection.prepare()
    part.unlink()
    assert run_all(collection, 1, 4).part.pooled().n == 20


def test_a_folder_that_cannot_be_written_is_said_before_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Collection(NumberedImages(20), extractor(), WANTED, tmp_path / "file/parts", "numbers").prepare()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    train(tiny_config(run_dir, "train.max_steps=2", "model.depth=1"))
    return run_dir


@pytest.fixture(scope="module")
def alone(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """1,003 samples by one process in batches of 64."""
    collected = collect(run, tmp_path_factory.mktemp("alone"), 64, OneOf(0, threading.Barrier(1)))
    assert collected is not None
    return collected


def command(run: Path, folder: Path, batch_size: int, processes: int = 1, seconds_a_batch: float = 0) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    arguments = [str(run), str(folder), str(batch_size), str(seconds_a_batch)]
    return [*launcher, "-m", "tests.fid.collecting", *arguments]


def assert_same(folder: Path, alone: Collected) -> None:
    moments = alone.part.pooled()
    mean, covariance = moments.mean(), moments.covariance()
    with np.load(folder / "result.npz") as result:
        np.testing.assert_allclose(result["mean"], mean, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(result["cov"], covariance, rtol=1e-10, atol=1e-10)
        reference = (np.zeros_like(mean), np.eye(len(mean)))
        distance = frechet_distance(result["mean"], result["cov"], *reference, NUM_IMAGES)
        assert distance == pytest.approx(frechet_distance(mean, covariance, *reference, NUM_IMAGES), rel=1e-8)
        assert alone.features is not None
        np.testing.assert_allclose(result["features"], alone.features, atol=1e-5)
        assert len(result["features"]) == NUM_IMAGES


def test_two_processes_and_another_batch_size_give_the_same_moments(
    run: Path, alone: Collected, tmp_path: Path
) -> None:
    result = subprocess.run(command(run, tmp_path, 7, processes=2), cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert_same(tmp_path, alone)


def test_a_run_that_is_killed_twice_gives_the_same_moments(run: Path, alone: Collected, tmp_path: Path) -> None:
    parts = 0
    for _ in range(2):
        process = subprocess.Popen(command(run, tmp_path, 25, seconds_a_batch=0.15), cwd=ROOT)
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list(tmp_path.glob("part-*.safetensors"))) == parts:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        parts = 1  # the next start makes all parts one, and adds its own
    assert subprocess.run(command(run, tmp_path, 64), cwd=ROOT, check=False).returncode == 0
    assert_same(tmp_path, alone)
