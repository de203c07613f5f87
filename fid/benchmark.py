"""Speed and memory of scoring, beside torch-fidelity's loop and scipy's matrix root in the same run."""

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch_fidelity.datasets import ImagesPathDataset
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.utils import get_featuresdict_from_dataset

from fid.collection import Collection, Wanted
from fid.features import DIGITS, FEATURE_NAMES, INCEPTION, Extractor
from fid.frechet import frechet_distance
from fid.images import About, FolderImages
from vcagen.benchmark.measure import interleaved, machine, peak_memory, report

DIMENSION = 2048
MEMORY_SIZES = (500, 5_000, 500_000)


class RandomInception(FeatureExtractorInceptionV3):
    """Inception with the weights it was born with."""

    def load_state_dict(self, *_: object, **__: object) -> None:
        """Leaves them."""


class TinyNetwork(nn.Module):
    """As many features as Inception's, and ten logits, from 8x8 pixels at next to no cost."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(192, DIMENSION, generator=generator) / 192, requires_grad=False)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, 2048) and logits (B, 10) of images (B, 3, 8, 8) uint8."""
        features = (images.float().flatten(1) @ self.weight).relu()
        return features, features[:, :10]


class RandomImages:
    """8x8 images of noise, made as they are asked for."""

    from_files = True

    def __init__(self, num_images: int) -> None:
        self.about = About("noise", num_images, (8, 8))

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `fid.images.Images`."""
        return np.random.default_rng(indices[0]).integers(0, 256, (len(indices), 3, 8, 8), dtype=np.uint8)

    def identity(self) -> dict[str, Any]:
        """The number of images."""
        return {"noise": self.about.num_images}


def benchmark_fid(arguments: argparse.Namespace) -> None:
    """Measures and prints a table. See `python -m vcagen.benchmark fid --help`."""
    with tempfile.TemporaryDirectory(prefix="vcagen-benchmark-") as name:
        result: dict[str, Any] = {"machine": machine()}
        if arguments.num_images:
            result |= _features(Path(name), arguments.num_images, arguments.rounds)
        result |= _frechet(arguments.dimension)
        if arguments.memory:
            result |= _memory()
    report(result, arguments.json)


def _features(folder: Path, num_images: int, rounds: int) -> dict[str, Any]:
    """Images a second through Inception of random weights, from PNGs of 256x256, both ways in turns."""
    images_folder = folder / "images"
    images_folder.mkdir()
    random = np.random.default_rng(0)
    for index in range(num_images):
        coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(images_folder / f"{index:05d}.png")
    torch.save({}, folder / "none.pth")
    network = RandomInception(
        INCEPTION, FEATURE_NAMES[INCEPTION], feature_extractor_weights_path=str(folder / "none.pth")
    )
    ours_too = copy.deepcopy(network).to(memory_format=torch.channels_last)  # as `build_extractor` does
    extractor = Extractor(INCEPTION, DIMENSION, "", ours_too, torch.device("cpu"))
    process, counter = PartialState(cpu=True), iter(range(10**9))

    def ours() -> None:
        images = FolderImages(images_folder)
        wanted = Wanted(spatial=True, scores=True)
        collection = Collection(images, extractor, wanted, folder / f"parts{next(counter)}", "ours")
        collection.prepare()
        collection.run(32, process)
        collection.result()

    def theirs() -> None:
        paths = [str(path) for path in sorted(images_folder.iterdir())]
        get_featuresdict_from_dataset(ImagesPathDataset(paths), network, 32, False, False, False)

    times = interleaved({"ours": ours, "theirs": theirs}, rounds, "features")
    ratios = [their / our for our, their in zip(times["ours"], times["theirs"], strict=True)]
    return {
        "images/s, features with sFID's and their sums": num_images / statistics.median(times["ours"]),
        "images/s, torch-fidelity's loop, features alone": num_images / statistics.median(times["theirs"]),
        "ratio of features (median of rounds)": statistics.median(ratios),
        "ratio of features, range": f"{min(ratios):.2f} to {max(ratios):.2f}",
    }


def _frechet(dimension: int) -> dict[str, Any]:
    """Seconds of one distance between full-rank covariances of a falling spectrum, ours and by scipy's sqrtm."""
    from scipy.linalg import sqrtm

    random = np.random.default_rng(0)
    spectrum = np.geomspace(10, 1e-6, dimension)
    means, covariances = random.standard_normal((2, dimension)), []
    for _ in range(2):
        basis = np.linalg.qr(random.standard_normal((dimension, dimension)))[0]
        covariances.append((basis * spectrum) @ basis.T)
    started = time.perf_counter()
    ours = frechet_distance(means[0], covariances[0], means[1], covariances[1])
    middle = time.perf_counter()
    root = sqrtm(covariances[0] @ covariances[1])
    theirs = ((means[0] - means[1]) ** 2).sum() + sum(map(np.trace, covariances)) - 2 * np.trace(root).real
    ended = time.perf_counter()
    return {
        f"s, Frechet distance, {dimension} features": middle - started,
        f"s, by scipy's sqrtm, {dimension} features": ended - middle,
        "ratio of Frechet distances": (ended - middle) / (middle - started),
        "difference of the two values": f"{abs(ours - theirs):.1e} of {ours:.1f}",
    }


def _memory() -> dict[str, Any]:
    """Largest resident set of scoring N images by the tiny network, each in a process of its own."""
    found = {}
    for num_images in MEMORY_SIZES:
        call = f"from fid.benchmark import collect_noise; collect_noise({num_images})"
        result = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True)
        found[f"MB of memory to score {num_images:,} images"] = float(result.stdout.splitlines()[-1])
    return found


def collect_noise(num_images: int) -> None:
    """Gathers what FID and the Inception Score need of noise and prints the largest resident set in MB."""
    extractor = Extractor(DIGITS, DIMENSION, "", TinyNetwork(), torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="vcagen-benchmark-") as folder:
        collection = Collection(RandomImages(num_images), extractor, Wanted(scores=True), Path(folder), "noise")
        collection.prepare()
        collection.run(256, PartialState(cpu=True))
        moments = collection.result().part.pooled()
        mean, covariance = moments.mean(), moments.covariance()
        frechet_distance(mean, covariance, mean, covariance, moments.n, moments.n)
    print(peak_memory())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m vcagen.benchmark fid")
    parser.add_argument("--num-images", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--dimension", type=int, required=True)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    benchmark_fid(parser.parse_args())
