"""How fast latents are read and caches are built."""

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch.utils.data import default_collate

from vcagen.autoencoder import KLAutoencoder, KLConfig, load_vae
from vcagen.benchmark.measure import interleaved, machine, peak_memory, report
from vcagen.cache.moments import EncodedImages
from vcagen.cache.records import Record
from vcagen.cache.writer import build_cache, prepare_cache
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig
from vcagen.data.latent_format import MANIFEST_FILE, Manifest, plan_for, shard_path, write_shard
from vcagen.files import write_json
from vcagen.training_samples import TrainingSamples, draw_mirror, training_generator

BATCH = 256
LATENT_SHAPE = (4, 32, 32)
NUM_CLASSES = 1000
CONFIG = KLConfig(source="benchmark")


class GeneratedImages:
    """A source of JPEGs that exist in memory alone: smooth colour with noise, as large in bytes as photographs are."""

    ignored = 0

    def __init__(self, num_images: int, size: tuple[int, int]) -> None:
        self.class_names: tuple[str, ...] = ("all",)
        generator = np.random.default_rng(0)
        coarse = generator.integers(0, 256, (8, 6, 3), dtype=np.uint8)
        picture = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = np.clip(picture + generator.normal(0, 12, picture.shape), 0, 255).astype(np.uint8)
        content = io.BytesIO()
        Image.fromarray(noisy).save(content, "JPEG", quality=90)
        self.content = content.getvalue()
        self.records = [Record(0, f"{number:08d}.jpg", len(self.content)) for number in range(num_images)]

    def read(self, position: int) -> bytes:
        """See `ImageSource`."""
        return self.content


def benchmark_data(arguments: argparse.Namespace) -> None:
    """Measures, prints a table, and writes JSON if asked. See `python -m vcagen.benchmark data --help`."""
    with tempfile.TemporaryDirectory(prefix="vcagen-benchmark-") as name:
        folder = Path(name)
        result: dict[str, Any] = {
            "machine": machine(),
            **_reading(folder, arguments.num_latents, arguments.rounds),
            **_building(folder / "built", arguments.num_images, arguments.image_size, arguments.autoencoder),
        }
        if arguments.memory:
            result |= _memory(folder)
    report(result, arguments.json)


def random_cache(cache: Path, num_latents: int, vae: AutoencoderKL, source: str) -> None:
    """Writes a cache of random moments, as if `vae`, which lies at `source`, had encoded images of 256 pixels."""
    generator = torch.Generator().manual_seed(0)
    channels, height, width = LATENT_SHAPE
    records = [Record(number % NUM_CLASSES, f"{number:08d}", 0) for number in range(num_latents)]
    shards = []
    (cache / "shards").mkdir(parents=True)
    for number, start in enumerate(range(0, num_latents, 1024)):
        part = records[start : start + 1024]
        moments, mirrored = (
            torch.randn(len(part), 2 * channels, height, width, generator=generator).half().abs() for _ in range(2)
        )
        shards.append(write_shard(shard_path(cache, number), moments, mirrored, [record[:2] for record in part], ""))
    names = tuple(map(str, range(NUM_CLASSES)))
    plan = plan_for(
        KLConfig(source=source), KLAutoencoder(vae, vae), records, names, (3, 256, 256), mirrored=True, shard_size=1024
    )
    manifest = Manifest(
        plan=plan, shards=tuple(shards), count=num_latents, skipped={}, latent_mean=(0.0,) * 4, latent_std=(1.0,) * 4
    )
    write_json(cache / MANIFEST_FILE, manifest.model_dump(mode="json"))


def _reading(folder: Path, num_latents: int, rounds: int) -> dict[str, Any]:
    """Latents per second on one core, moments to latent included, against .npy files."""
    torch.set_num_threads(1)
    cache = folder / "cache"
    random_cache(cache, num_latents, tiny_vae(), CONFIG.source)
    data = LatentCache(LatentCacheConfig(root=str(cache)))
    # The same as one .npy per image with a label file, as the peers keep them.
    (folder / "npy").mkdir()
    for index in range(num_latents):
        np.save(folder / f"npy/{index:08d}.npy", data.moments(index, mirrored=False).astype(np.float32))
        np.save(folder / f"npy/{index:08d}.label.npy", np.array(data.label(index)))
    samples = TrainingSamples(data, seed=0)
    autoencoder = _ScaledDraw()
    order = np.random.default_rng(0).permutation(num_latents - num_latents % BATCH).reshape(-1, BATCH)

    def ours() -> None:
        for step, batch in enumerate(order):
            items = default_collate([samples[(int(index), step, row)] for row, index in enumerate(batch)])
            moments, _, _, steps, positions = items
            generators = [training_generator(0, int(s), int(p)) for s, p in zip(steps, positions, strict=True)]
            for generator in generators:
                draw_mirror(generator)
            autoencoder.sample_latents(moments.float(), generators)

    def theirs() -> None:
        for batch in order:
            files = [folder / f"npy/{index:08d}" for index in batch]
            items = [(torch.from_numpy(np.load(f"{f}.npy")), int(np.load(f"{f}.label.npy"))) for f in files]
            mean, std = default_collate(items)[0].chunk(2, dim=1)
            (mean + std * torch.randn_like(mean)).mul_(0.18215)

    times = interleaved({"ours": ours, "theirs": theirs}, rounds, "reading")
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    return {
        "latents/s read, one core, batch 256": order.size / statistics.median(times["ours"]),
        "latents/s from one .npy per image": order.size / statistics.median(times["theirs"]),
        "ratio (median of rounds)": statistics.median(ratios),
        "ratio (lowest, highest)": f"{min(ratios):.2f}, {max(ratios):.2f}",
    }


class _ScaledDraw(KLAutoencoder):
    """The posterior draw of `KLAutoencoder`, without weights."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.scale, self.shift = 0.18215, 0.0


def tiny_vae() -> AutoencoderKL:
    """A VAE of the real one's shape, 8 pixels to a latent, but narrow, with weights that torch's seed decides."""
    return AutoencoderKL(
        block_out_channels=(8,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
    )


def _building(cache: Path, num_images: int, image_size: int, source: str | None) -> dict[str, Any]:
    torch.set_num_threads(os.cpu_count() or 1)
    vae = tiny_vae() if source is None else load_vae(source, "--autoencoder")
    autoencoder = KLAutoencoder(vae, vae)
    images = GeneratedImages(num_images, (500, 375))
    shape = (3, image_size, image_size)
    plan = plan_for(CONFIG, autoencoder, images.records, images.class_names, shape, mirrored=True, shard_size=1024)
    encoded = EncodedImages(images, autoencoder, image_size, True, batch_size=32, num_threads=os.cpu_count() or 1)
    prepare_cache(cache, plan, encoded, "stop")
    started = time.perf_counter()
    build_cache(cache, plan, encoded, "stop", seconds=encoded.seconds)
    total = time.perf_counter() - started
    name = "tiny random" if source is None else source
    return {
        f"images/s built at {image_size}, mirrored, {name} VAE": num_images / total,
        "  decode and crop alone, per core": num_images / encoded.seconds["decode"],
        "  encode alone": num_images / encoded.seconds["encode"],
        "  write alone": num_images / encoded.seconds["write"],
    }


def _memory(folder: Path) -> dict[str, Any]:
    """Largest resident set of a build over 1,000 and 100,000 records, each in a process of its own."""
    found = {}
    for num_images in (1_000, 100_000):
        cache = str(folder / str(num_images))
        call = f"from vcagen.benchmark.data import build_small; build_small({cache!r}, {num_images})"
        result = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True)
        found[f"MB of memory to build {num_images:,} records"] = float(result.stdout.splitlines()[-1])
    return found


def build_small(cache: str, num_images: int) -> None:
    """Builds a cache of images of 16 pixels and prints the largest resident set in MB."""
    vae = tiny_vae()
    autoencoder = KLAutoencoder(vae, vae)
    images = GeneratedImages(num_images, (16, 16))
    plan = plan_for(
        CONFIG, autoencoder, images.records, images.class_names, (3, 16, 16), mirrored=True, shard_size=1024
    )
    encoded = EncodedImages(images, autoencoder, 16, True, batch_size=256, num_threads=2)
    prepare_cache(Path(cache), plan, encoded, "stop")
    build_cache(Path(cache), plan, encoded, "stop")
    print(peak_memory())
