"""The latent cache on disk: shards of moments and a manifest that says what they are.

CACHE/
    manifest.json                 `Manifest`; written last, so a folder without it is not whole
    shards/00000.safetensors      moments   float16 (n, 2C, h, w): mean, then standard deviation, before scale and shift
                                  mirrored  the same of the mirror images, where the cache has them
                                  labels    int64 (n,)
                                  key_bytes uint8, key_ends int64 (n,): the keys, UTF-8, one behind the other

The bytes depend on images, keys, labels, autoencoder, crop and, in the last bits, the encoder's batch size alone, not
on the source's kind or the number of processes.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file

from vcagen.autoencoder import Autoencoder, AutoencoderConfig
from vcagen.files import file_sha256, written_aside

MANIFEST_FILE, PLAN_FILE, SHARD_FOLDER = "manifest.json", "plan.json", "shards"
FORMAT_VERSION = 1

Model = TypeVar("Model", bound=BaseModel)

_NUMPY_TYPES = {"F16": np.float16, "I64": np.int64, "U8": np.uint8}


class Plan(BaseModel, extra="forbid", frozen=True):
    """What a cache is, known before its first shard.

    Attributes:
        format_version: of the layout.
        autoencoder: which; encoder_sha256: hash of its encoder's weights; scale, shift: latent = (moment draw - shift)
            * scale.
        precision: of the encoder.
        image_size: side of ADM's centre crop, pixels; 0 for imported latents.
        image_shape: (C, H, W) of what was encoded.
        latent_shape: (C, h, w).
        mirrored: whether moments of mirror images are there too.
        batch_size: images per encoder call, which decides the last bits; 0 for imported latents.
        shard_size: records a shard was planned for; skipped images leave fewer.
        num_records: images of the source.
        listing_sha256: hash of their labels, keys and file sizes, in order.
        class_names: in label order.
        imported_from: layout it was imported from; None where images were encoded here.
    """

    format_version: Literal[1] = 1
    autoencoder: AutoencoderConfig
    encoder_sha256: str
    scale: float
    shift: float
    precision: Literal["fp32", "bf16"]
    image_size: int
    image_shape: tuple[int, int, int]
    latent_shape: tuple[int, int, int]
    mirrored: bool
    batch_size: int = 0
    shard_size: int
    num_records: int
    listing_sha256: str
    class_names: tuple[str, ...]
    imported_from: str | None = None

    @property
    def record_bytes(self) -> int:
        """Bytes of one record, keys aside."""
        channels, height, width = self.latent_shape
        return 2 * channels * height * width * 2 * (2 if self.mirrored else 1) + 8

    @property
    def num_shards(self) -> int:
        """How many there will be."""
        return -(-self.num_records // self.shard_size)

    def part(self, number: int) -> range:
        """Positions of the records that belong into shard `number`."""
        start = number * self.shard_size
        return range(start, min(start + self.shard_size, self.num_records))


def plan_for(
    config: AutoencoderConfig,
    autoencoder: Autoencoder,
    records: Sequence[tuple[int, str, int]],
    class_names: tuple[str, ...],
    image_shape: tuple[int, int, int],
    *,
    mirrored: bool,
    shard_size: int,
    precision: Literal["fp32", "bf16"] = "fp32",
    batch_size: int = 0,
    imported_from: str | None = None,
) -> Plan:
    """The plan of a cache of some records (label, key, bytes of the file) under an autoencoder.

    Raises:
        ValueError: the autoencoder does not take such images, or a key is not UTF-8.
    """
    return Plan(
        autoencoder=config,
        encoder_sha256=autoencoder.encoder_sha256(),
        scale=autoencoder.scale,
        shift=autoencoder.shift,
        precision=precision,
        image_size=0 if imported_from else image_shape[1],
        image_shape=image_shape,
        latent_shape=autoencoder.latent_shape(image_shape),
        mirrored=mirrored,
        batch_size=batch_size,
        shard_size=shard_size,
        num_records=len(records),
        listing_sha256=listing_sha256(records),
        class_names=class_names,
        imported_from=imported_from,
    )


class ShardRecord(BaseModel, extra="forbid", frozen=True):
    """A shard in the manifest.

    Attributes:
        count: records in it.
        sha256: of the file.
        labels_sha256: of labels and keys, small enough to be checked whenever the cache is opened.
        source_sha256: of labels, keys and file sizes of what was to go into it, bad images too.
        num_bytes: of the file.
    """

    count: int
    sha256: str
    labels_sha256: str
    source_sha256: str
    num_bytes: int


class Manifest(BaseModel, extra="forbid", frozen=True):
    """`manifest.json`.

    Attributes:
        plan: what the cache is.
        shards: in order.
        count: records in all.
        skipped: images that could not be used, with the reason, by key.
        latent_mean, latent_std: per channel, over all latents as training draws them.
    """

    plan: Plan
    shards: tuple[ShardRecord, ...]
    count: int
    skipped: dict[str, str]
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]

    @property
    def identity(self) -> str:
        """Hash of everything that training sees."""
        hashes = "\n".join(shard.sha256 for shard in self.shards)
        return hashlib.sha256(f"{json.dumps(self.plan.model_dump(mode='json'))}\n{hashes}".encode()).hexdigest()


def read_manifest(cache: Path) -> Manifest:
    """The manifest of a whole cache.

    Raises:
        ValueError: there is none, or it is damaged or of a newer format.
    """
    path = cache / MANIFEST_FILE
    if not path.exists():
        begun = (cache / PLAN_FILE).is_file()
        what = "the cache is not finished; run the same command again" if begun else "not a latent cache"
        raise ValueError(f"{path}: missing; {what}")
    manifest = _read(path, Manifest, lambda content: content["plan"]["format_version"])
    if manifest.count != sum(shard.count for shard in manifest.shards) or not manifest.shards:
        raise ValueError(f"{path}: count {manifest.count} is not the sum over its shards; the manifest is damaged")
    return manifest


def read_plan(path: Path) -> Plan:
    """The plan of an unfinished cache; a `ValueError` where it is damaged or of a newer format."""
    return _read(path, Plan, lambda content: content["format_version"])


def _read(path: Path, model: type[Model], version_in: Callable[[Any], object]) -> Model:
    try:
        content = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); build the cache again, into another folder") from error
    with contextlib.suppress(KeyError, TypeError):
        version = version_in(content)
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise ValueError(
                f"{path}: format {version} is newer than this vcagen reads ({FORMAT_VERSION}); update vcagen"
            )
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "content"
        raise ValueError(
            f"{path}: {key}: {first['msg']}; the file is damaged or not ours, choose another folder"
        ) from error


@contextlib.contextmanager
def disk_errors_named(path: Path) -> Iterator[None]:
    """Gives an error of the disk the name of the file; what a full disk raises while writing has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{path}: cannot be written ({error.strerror or error})") from error


def listing_sha256(records: Sequence[tuple[int, str] | tuple[int, str, int]]) -> str:
    """Hash of labels and keys, and of the files' sizes where they are given, in order.

    Raises:
        ValueError: a key is not UTF-8.
    """
    digest = hashlib.sha256()
    try:
        for record in records:
            digest.update((" ".join(map(str, record)) + "\n").encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{record[1]!a}: the name is not UTF-8; rename it") from error
    return digest.hexdigest()


def shard_path(cache: Path, number: int) -> Path:
    """Where shard `number` lies."""
    return cache / SHARD_FOLDER / f"{number:05d}.safetensors"


def write_shard(
    path: Path,
    moments: torch.Tensor,
    mirrored: torch.Tensor | None,
    records: Sequence[tuple[int, str]],
    source_sha256: str,
) -> ShardRecord:
    """Writes a shard, whole or not at all.

    Args:
        path: where to.
        moments: float16 (n, 2C, h, w).
        mirrored: the same of the mirror images.
        records: label and key of each.
        source_sha256: for the manifest.

    Raises:
        OSError: the disk refuses; the line names the file.
    """
    encoded = [key.encode() for _, key in records]
    ends = np.cumsum([len(key) for key in encoded], dtype=np.int64)
    tensors = {
        "moments": moments.contiguous(),
        "labels": torch.tensor([label for label, _ in records], dtype=torch.int64),
        "key_bytes": torch.from_numpy(np.frombuffer(b"".join(encoded), dtype=np.uint8).copy()),
        "key_ends": torch.from_numpy(ends),
    }
    if mirrored is not None:
        tensors["mirrored"] = mirrored.contiguous()
    with disk_errors_named(path), written_aside(path) as aside:
        try:
            save_file(tensors, aside, metadata={"format": "vcagen latents"})
        except SafetensorError as error:  # a disk that refuses
            raise OSError(str(error)) from error
        record = ShardRecord(
            count=len(records),
            sha256=file_sha256(aside),
            labels_sha256=listing_sha256(records),
            source_sha256=source_sha256,
            num_bytes=aside.stat().st_size,
        )
    return record


class Shard:
    """A shard, memory-mapped.

    Attributes:
        arrays: by name, views of the file.

    Raises:
        ValueError: the file is missing, cut off, or not a shard.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            is_empty = path.stat().st_size == 8 + length  # of a shard whose images were all bad
            content = np.empty(0, np.uint8) if is_empty else np.memmap(path, np.uint8, "r", offset=8 + length)
            self.arrays: dict[str, np.ndarray] = {
                name: content[slice(*entry["data_offsets"])].view(_NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
                for name, entry in header.items()
            }
            self.moments, self.labels = self.arrays["moments"], self.arrays["labels"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
            raise ValueError(
                f"{path}: missing or damaged ({type(error).__name__}: {error}); python -m vcagen.cache verify says more"
            ) from error

    def keys(self) -> list[str]:
        """The keys, in order."""
        text = self.arrays["key_bytes"].tobytes()
        ends = self.arrays["key_ends"].tolist()
        return [text[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def records(self) -> list[tuple[int, str]]:
        """Label and key of each record."""
        return list(zip(self.labels.tolist(), self.keys(), strict=True))
