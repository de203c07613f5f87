"""One page about a latent cache, and a picture in which a person sees that scale and range are right."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from vcagen.autoencoder import Autoencoder, to_numpy
from vcagen.data.latent_format import Manifest, Shard, disk_errors_named, shard_path
from vcagen.files import write_grid, write_text

REPORT_FILE, SHEET_FILE = "report.md", "contact_sheet.png"
NUM_SHOWN = 16


def write_report(
    cache: Path,
    manifest: Manifest,
    source: str,
    ignored: int,
    seconds: dict[str, float],
    num_encoded: int,
) -> None:
    """Writes report.md: counts, bad images, statistics, and what took how long."""
    plan = manifest.plan
    per_class = Counter(
        label for number in range(len(manifest.shards)) for label in Shard(shard_path(cache, number)).labels.tolist()
    )
    smallest, largest = min(per_class.values()), max(per_class.values())
    size = sum(shard.num_bytes for shard in manifest.shards)
    lines = [
        f"# Latent cache {cache.name}",
        "",
        f"- source: {source}",
        f"- {manifest.count} of {plan.num_records} images in {len(plan.class_names)} classes ({smallest} to {largest} "
        f"in each), {len(manifest.shards)} shards, {size / 1e9:.3f} GB; other files ignored: {ignored}",
        f"- images {plan.image_shape}, ADM centre crop; latents {plan.latent_shape}; "
        f"{'with' if plan.mirrored else 'without'} mirror images",
        f"- autoencoder {plan.autoencoder}, encoder {plan.encoder_sha256[:12]}, scale {plan.scale:g}, shift "
        f"{plan.shift:g}, {plan.precision}",
        f"- latents as training draws them: mean {_rounded(manifest.latent_mean)}, standard deviation "
        f"{_rounded(manifest.latent_std)} per channel",
        *(
            f"- {what}: {num_encoded / seconds[what]:.1f} images/s (this process, {num_encoded} images)"
            for what in ("decode", "encode", "write")
            if seconds.get(what) and num_encoded
        ),
        f"- [{SHEET_FILE}]({SHEET_FILE}): originals, and below each its decoded latent",
        "",
        f"## Bad images skipped: {len(manifest.skipped)}",
        "",
        *(f"- {reason}" for reason in manifest.skipped.values()),
    ]
    with disk_errors_named(cache / REPORT_FILE):
        write_text(cache / REPORT_FILE, "\n".join(lines) + "\n")


@torch.no_grad()
def write_contact_sheet(
    cache: Path, manifest: Manifest, autoencoder: Autoencoder, original: Callable[[str], np.ndarray | None]
) -> None:
    """Writes a PNG of some originals and their decoded latents, below each other.

    Args:
        cache: the cache.
        manifest: its manifest.
        autoencoder: decodes.
        original: uint8 (C, H, W) by key, or None where it is not at hand.
    """
    device = next(autoencoder.parameters(), torch.empty(0)).device
    positions = np.unique(np.linspace(0, manifest.count - 1, NUM_SHOWN).astype(int))
    ends = np.cumsum([shard.count for shard in manifest.shards])
    tiles = []
    for position in positions:
        number = int(np.searchsorted(ends, position, side="right"))
        shard = Shard(shard_path(cache, number))
        row = position - (ends[number - 1] if number else 0)
        image = original(shard.keys()[row])
        mean = torch.from_numpy(shard.moments[row].copy()).float().chunk(2)[0][None].to(device)
        decoded = to_numpy(autoencoder.decode((mean - autoencoder.shift) * autoencoder.scale))[0]
        shown = np.full_like(decoded, 255) if image is None else image.transpose(1, 2, 0)
        tiles.append((shown, decoded))
    columns = min(8, len(tiles))
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    blank = np.full_like(tiles[0][0], 255)
    images = [
        tile
        for row in rows
        for line in (0, 1)
        for tile in [pair[line] for pair in row] + [blank] * (columns - len(row))
    ]
    with disk_errors_named(cache / SHEET_FILE):
        write_grid(cache / SHEET_FILE, np.stack(images), columns)


def _rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 4) for value in values]
