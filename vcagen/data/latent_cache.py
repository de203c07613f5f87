"""A latent cache as training data."""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from vcagen.autoencoder import Autoencoder, AutoencoderConfig
from vcagen.data.image_folder import FolderName
from vcagen.data.latent_format import Shard, listing_sha256, read_manifest, shard_path


class LatentCacheConfig(BaseModel, extra="forbid", frozen=True):
    """A cache that `python -m vcagen.cache build` wrote.

    Attributes:
        root: its folder.
        horizontal_flip: take the mirror image's moments for every other sample, decided anew at each visit.
    """

    name: Literal["latent_cache"] = "latent_cache"
    root: FolderName
    horizontal_flip: bool = True


class LatentCache:
    """Moments by index, read from memory-mapped shards; nothing is written, so a read-only disk will do.

    Every shard is opened at construction and its size, labels and keys are compared with the manifest; whether its
    moments are intact, `python -m vcagen.cache verify` says.

    Attributes:
        image_shape: (C, H, W) of the images behind the latents.
        class_names: in label order.
        can_mirror: whether `moments` may be asked for mirror images.
        fingerprint: hash of everything that training sees.
        report: one line.

    Raises:
        ValueError: the cache is not whole, a shard is missing or not the manifest's, or mirror images are asked of a
            cache without.
    """

    def __init__(self, config: LatentCacheConfig) -> None:
        root = Path(config.root)
        self.manifest = read_manifest(root)
        plan = self.manifest.plan
        if config.horizontal_flip and not plan.mirrored:
            raise ValueError(
                f"{root}: has no mirror images, which data.horizontal_flip=true needs; build it with them, or use "
                "data.horizontal_flip=false"
            )
        self.shards = [_checked_shard(root, number, self) for number in range(len(self.manifest.shards))]
        self.ends = np.cumsum([record.count for record in self.manifest.shards])
        self.labels = np.concatenate([shard.labels for shard in self.shards])
        if self.labels.min() < 0 or self.labels.max() >= len(plan.class_names):
            raise ValueError(f"{root}: labels up to {self.labels.max()}, but {len(plan.class_names)} class names")
        self.root = root
        self.image_shape = plan.image_shape
        self.class_names = plan.class_names
        self.can_mirror = config.horizontal_flip
        self.fingerprint = self.manifest.identity
        self.report = f"{self.manifest.count} latents in {len(plan.class_names)} classes"
        if self.manifest.skipped:
            self.report += f", bad images skipped: {len(self.manifest.skipped)}"

    def __len__(self) -> int:
        return self.manifest.count

    def moments(self, index: int, mirrored: bool) -> np.ndarray:
        """Moments float16 (2C, h, w) of an image or its mirror image: mean, then standard deviation, unscaled."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        row = index - (int(self.ends[number - 1]) if number else 0)
        return self.shards[number].arrays["mirrored" if mirrored else "moments"][row].copy()

    def label(self, index: int) -> int:
        """Index into `class_names`."""
        return int(self.labels[index])

    def require_autoencoder(self, config: AutoencoderConfig, autoencoder: Autoencoder) -> None:
        """Proves that a run's autoencoder is the cache's; a `ValueError` that shows both values where not."""
        plan = self.manifest.plan
        pairs = [
            ("autoencoder.name", plan.autoencoder.name, config.name),
            ("scale", plan.scale, autoencoder.scale),
            ("shift", plan.shift, autoencoder.shift),
            ("encoder weights", plan.encoder_sha256[:12], autoencoder.encoder_sha256()[:12]),
            ("latents of its images", plan.latent_shape, _latent_shape(autoencoder, plan.image_shape)),
        ]
        differing = [f"{what} {theirs}, in the run's config {ours}" for what, theirs, ours in pairs if theirs != ours]
        if differing:
            raise ValueError(
                f"{self.root}: was made with another autoencoder ({plan.autoencoder}): {'; '.join(differing)}; "
                "use that one, or build the cache again"
            )


def _latent_shape(autoencoder: Autoencoder, image_shape: tuple[int, int, int]) -> tuple[int, int, int] | str:
    try:
        return autoencoder.latent_shape(image_shape)
    except ValueError as error:
        return str(error)


def _checked_shard(root: Path, number: int, cache: LatentCache) -> Shard:
    path, expected = shard_path(root, number), cache.manifest.shards[number]
    shard = Shard(path)
    plan = cache.manifest.plan
    channels, height, width = plan.latent_shape
    shape = (expected.count, 2 * channels, height, width)
    names = ["moments", "mirrored"] if plan.mirrored else ["moments"]
    if path.stat().st_size != expected.num_bytes or any(shard.arrays[name].shape != shape for name in names):
        raise ValueError(f"{path}: not the shard of the manifest (other size); build the cache again")
    if listing_sha256(shard.records()) != expected.labels_sha256:
        raise ValueError(f"{path}: labels or keys are not those of the manifest; build the cache again")
    return shard
