"""Hashes a latent cache again."""

from pathlib import Path

from tqdm import tqdm

from vcagen.data.latent_format import (
    MANIFEST_FILE,
    SHARD_FOLDER,
    Manifest,
    Shard,
    ShardRecord,
    read_manifest,
    shard_path,
)
from vcagen.files import file_sha256


def verify_cache(cache: Path) -> Manifest:
    """Hashes every shard again and compares it with the manifest.

    Raises:
        ValueError: a shard is missing, damaged, too many, or not the one that was written, or has
            labels without class names; all are listed.
    """
    manifest = read_manifest(cache)
    problems = []
    names = {shard_path(cache, number).name for number in range(len(manifest.shards))}
    extra = sorted(path.name for path in (cache / SHARD_FOLDER).iterdir() if path.name not in names)
    problems += [f"{SHARD_FOLDER}/{name}: does not belong to this cache" for name in extra]
    total = sum(shard.num_bytes for shard in manifest.shards)
    with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, delay=2) as bar:
        for number, shard in enumerate(manifest.shards):
            problem = _problem(shard_path(cache, number), shard, len(manifest.plan.class_names))
            problems += [problem] if problem else []
            bar.update(shard.num_bytes)
    if problems:
        raise ValueError(f"{cache}: {len(problems)} faults\n" + "\n".join(problems))
    return manifest


def _problem(path: Path, expected: ShardRecord, num_classes: int) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    if path.stat().st_size != expected.num_bytes:
        return f"{path}: {path.stat().st_size} bytes, expected {expected.num_bytes}"
    found = file_sha256(path)
    if found != expected.sha256:
        return f"{path}: sha256 {found}, expected {expected.sha256}"
    labels = Shard(path).labels.tolist()
    if labels and not 0 <= min(labels) <= max(labels) < num_classes:
        return f"{path}: labels from {min(labels)} to {max(labels)}, but {num_classes} class names in {MANIFEST_FILE}"
    return None
