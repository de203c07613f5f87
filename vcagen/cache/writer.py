"""Builds a latent cache: any number of processes, resumable, the same bytes every time."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import BaseModel
from tqdm import tqdm

from vcagen.autoencoder import Autoencoder
from vcagen.cache.sources import ImageSource, Record
from vcagen.data.images import center_crop, decode_bytes
from vcagen.data.latent_format import (
    MANIFEST_FILE,
    SHARD_FOLDER,
    Manifest,
    Plan,
    Shard,
    ShardRecord,
    read_manifest,
    shard_path,
    write_shard,
)
from vcagen.files import file_sha256, write_json

PLAN_FILE = "plan.json"


class Moments(NamedTuple):
    """Moments of some records, float16 (n, 2C, h, w), and those that could not be used, by key."""

    positions: list[int]
    moments: torch.Tensor
    mirrored: torch.Tensor | None
    bad: dict[str, str]


class MomentSource(Protocol):
    """Where moments come from: images that are encoded, or someone else's latents."""

    records: list[Record]

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """Moments of the records from `start` to `end`, in order."""


class ShardNote(BaseModel, extra="forbid", frozen=True):
    """What is kept beside a shard until the manifest is written.

    Attributes:
        shard: None where bad images kept it from being written.
        bad: images that cannot be used, by key, with the reason.
        sums, squares, draws: per channel, of raw means, of their squares and of squared deviations.
        num_values: summed.
    """

    shard: ShardRecord | None
    bad: dict[str, str]
    sums: tuple[float, ...]
    squares: tuple[float, ...]
    draws: tuple[float, ...]
    num_values: int


class EncodedImages:
    """Images of a source, decoded, cropped and encoded.

    Args:
        source: the images.
        autoencoder: encodes, on its device and in its precision.
        image_size: side of ADM's centre crop.
        mirrored: encode mirror images too.
        batch_size: images per encoder call.
        num_threads: that decode.

    Attributes:
        seconds: spent so far on `decode` (over all threads), `encode` and, by the caller, `write`.
    """

    def __init__(
        self,
        source: ImageSource,
        autoencoder: Autoencoder,
        image_size: int,
        mirrored: bool,
        batch_size: int,
        num_threads: int,
    ) -> None:
        self.source, self.autoencoder = source, autoencoder
        self.records = source.records
        self.image_size, self.mirrored = image_size, mirrored
        self.batch_size, self.num_threads = batch_size, num_threads
        self.seconds = {"decode": 0.0, "encode": 0.0, "write": 0.0}

    def image(self, position: int) -> np.ndarray:
        """uint8 (C, size, size), cropped; a `ValueError` that starts with the key."""
        key = self.records[position].key
        try:
            content = self.source.read(position)
        except OSError as error:
            raise ValueError(f"{key}: {error.strerror or error}") from error
        image = center_crop(decode_bytes(content, key), self.image_size)
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """See `MomentSource`. The next batch decodes while this one is encoded."""
        starts = range(start, end, self.batch_size)
        with ThreadPoolExecutor(self.num_threads) as pool:
            ahead = []
            for first in starts:
                positions = range(first, min(first + self.batch_size, end))
                ahead.append((positions, [pool.submit(self._decode, position) for position in positions]))
                if len(ahead) == 2:
                    yield self._encode(*ahead.pop(0))
            for positions, futures in ahead:
                yield self._encode(positions, futures)

    def _decode(self, position: int) -> np.ndarray | str:
        started = time.thread_time()
        try:
            return self.image(position)
        except ValueError as error:
            return str(error)
        finally:
            self.seconds["decode"] += time.thread_time() - started

    def _encode(self, positions: range, futures: list[Any]) -> Moments:
        found = {position: future.result() for position, future in zip(positions, futures, strict=True)}
        good = [position for position, image in found.items() if not isinstance(image, str)]
        bad = {self.records[position].key: image for position, image in found.items() if isinstance(image, str)}
        shape = self.autoencoder.latent_shape((3, self.image_size, self.image_size))
        empty = torch.empty(0, 2 * shape[0], *shape[1:], dtype=torch.float16)
        if not good:
            return Moments([], empty, empty if self.mirrored else None, bad)
        started = time.perf_counter()
        device = next(self.autoencoder.parameters(), torch.empty(0)).device
        images = torch.from_numpy(np.stack([found[position] for position in good])).to(device)
        moments = self._half(images, good)
        mirrored = self._half(images.flip(-1), good) if self.mirrored else None
        self.seconds["encode"] += time.perf_counter() - started
        return Moments(good, moments, mirrored, bad)

    def _half(self, images: torch.Tensor, positions: list[int]) -> torch.Tensor:
        moments = self.autoencoder.encode(images).to(torch.float16).cpu()
        finite = torch.isfinite(moments).flatten(1).all(1)
        if not finite.all():
            keys = [self.records[position].key for position, good in zip(positions, finite, strict=True) if not good]
            raise ValueError(
                f"{', '.join(keys[:5])}: the autoencoder's moments are not finite in float16; use precision fp32, or "
                "look at the image"
            )
        return moments


def build_cache(
    cache: Path,
    plan: Plan,
    source: MomentSource,
    on_bad: Literal["stop", "skip"],
    rank: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    seconds: dict[str, float] | None = None,
) -> Manifest:
    """Builds what is missing of a cache; each process takes every `num_processes`-th shard.

    A shard is written whole or not at all, so the same command goes on after any stop. Bad images do not stop the
    work at once: with `stop` the shards that have some are left out, all bad ones are listed at the end, and a later
    `skip`, or repaired files, need those shards alone.

    Args:
        cache: the folder; its plan must have been written by `prepare_cache`.
        plan: what the cache is.
        source: where moments come from.
        on_bad: what bad images mean.
        rank: of this process.
        num_processes: of all.
        wait: returns when all processes have called it.
        seconds: counts what writing takes, under `write`.

    Raises:
        ValueError: images are bad and `on_bad` is `stop` (all are listed, with the way on), or moments are not finite.
    """
    if (cache / MANIFEST_FILE).is_file():
        manifest = read_manifest(cache)
        _require_whole(cache, manifest)
        if rank == 0:
            _tidy(cache, plan)
        return manifest
    mine = range(rank, plan.num_shards, num_processes)
    bar = tqdm(total=plan.num_records, desc="latents", unit="image", disable=rank != 0, smoothing=0.05, mininterval=0.5)
    with bar:
        for number in mine:
            start = number * plan.shard_size
            end = min(start + plan.shard_size, plan.num_records)
            note = _read_note(cache, number)
            if note is None or note.shard is None or note.bad:  # bad images may have been repaired since
                note = _build_shard(cache, number, plan, source, start, end, on_bad, bar, num_processes, seconds)
            else:
                bar.update((end - start) * num_processes)
    wait()
    manifest = _merge(cache, plan, source, on_bad)
    wait()  # nobody tidies up while another still reads
    if rank == 0:
        write_json(cache / MANIFEST_FILE, manifest.model_dump(mode="json"))
        _tidy(cache, plan)
    return manifest


def _tidy(cache: Path, plan: Plan) -> None:
    for number in range(plan.num_shards):
        _note_path(cache, number).unlink(missing_ok=True)
    (cache / PLAN_FILE).unlink(missing_ok=True)


def _require_whole(cache: Path, manifest: Manifest) -> None:
    for number, shard in enumerate(manifest.shards):
        path = shard_path(cache, number)
        if not path.is_file() or path.stat().st_size != shard.num_bytes:
            raise ValueError(
                f"{path}: missing or damaged; delete {cache / MANIFEST_FILE} and run the same command again"
            )


def prepare_cache(cache: Path, plan: Plan) -> None:
    """Writes the plan of a new cache, or proves that the folder holds a part of the same one.

    Half-written shards of a process that was killed go; call it in one process, before any writes.

    Raises:
        ValueError: it holds another cache; each difference is shown.
    """
    path = cache / PLAN_FILE
    if (cache / MANIFEST_FILE).is_file():
        before = read_manifest(cache).plan
    elif path.is_file():
        before = Plan.model_validate_json(path.read_text())
    else:
        (cache / SHARD_FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(path, plan.model_dump(mode="json"))
        return
    differences = [
        f"{key} was {getattr(before, key)!r}, now {getattr(plan, key)!r}"
        for key in Plan.model_fields
        if getattr(before, key) != getattr(plan, key)
    ]
    if differences:
        raise ValueError(f"{cache}: holds another cache: {'; '.join(differences)}; choose another folder")
    for half in (cache / SHARD_FOLDER).glob(".*"):
        half.unlink()


def _build_shard(
    cache: Path,
    number: int,
    plan: Plan,
    source: MomentSource,
    start: int,
    end: int,
    on_bad: Literal["stop", "skip"],
    bar: "tqdm[Any]",
    num_processes: int,
    seconds: dict[str, float] | None,
) -> ShardNote:
    moments, mirrored, records, bad = [], [], [], {}
    for batch in source.batches(start, end):
        moments.append(batch.moments)
        if batch.mirrored is not None:
            mirrored.append(batch.mirrored)
        records += [source.records[position] for position in batch.positions]
        for key, reason in batch.bad.items():
            bad[key] = reason
            tqdm.write(f"bad image: {reason}")
        bar.update((len(batch.positions) + len(batch.bad)) * num_processes)
    whole = torch.cat(moments)
    started = time.perf_counter()
    shard = None
    if not bad or on_bad == "skip":
        shard = write_shard(shard_path(cache, number), whole, torch.cat(mirrored) if plan.mirrored else None, records)
    mean, std = whole.double().chunk(2, dim=1)
    note = ShardNote(
        shard=shard,
        bad=bad,
        sums=tuple(mean.sum((0, 2, 3)).tolist()),
        squares=tuple(mean.square().sum((0, 2, 3)).tolist()),
        draws=tuple(std.square().sum((0, 2, 3)).tolist()),
        num_values=mean[:, 0].numel(),
    )
    write_json(_note_path(cache, number), note.model_dump())
    if seconds is not None:
        seconds["write"] += time.perf_counter() - started
    return note


def _note_path(cache: Path, number: int) -> Path:
    return shard_path(cache, number).with_suffix(".json")


def _read_note(cache: Path, number: int) -> ShardNote | None:
    """The note of a shard that is there, or that could not be made; None for one still to come."""
    try:
        note = ShardNote.model_validate_json(_note_path(cache, number).read_text())
    except (OSError, ValueError):
        return None
    path = shard_path(cache, number)
    if note.shard is not None and (not path.is_file() or path.stat().st_size != note.shard.num_bytes):
        return None
    return note


def _merge(cache: Path, plan: Plan, source: MomentSource, on_bad: Literal["stop", "skip"]) -> Manifest:
    notes = []
    for number in range(plan.num_shards):
        note = _read_note(cache, number)
        if note is None:
            raise ValueError(f"{shard_path(cache, number)}: missing; run the same command again")
        notes.append(note)
    bad = {key: reason for note in notes for key, reason in note.bad.items()}
    count = sum(note.shard.count for note in notes if note.shard)
    if bad and (on_bad == "stop" or not count):
        shown = "\n".join(list(bad.values())[:20]) + (f"\nand {len(bad) - 20} more" if len(bad) > 20 else "")
        advice = "" if not count and on_bad == "skip" else ", or go on without them by --on-bad skip"
        raise ValueError(
            f"{len(bad)} of {plan.num_records} images are bad: repair them{advice}; what is done is kept\n{shown}"
        )
    used = {label for number in range(plan.num_shards) for label in Shard(shard_path(cache, number)).labels.tolist()}
    lost = [plan.class_names[label] for label in sorted({record.label for record in source.records} - used)]
    if lost:
        raise ValueError(f"no readable image is left in class {', '.join(lost[:10])}: repair some")
    total = sum(note.num_values for note in notes)
    mean, square, draw = (
        np.sum([getattr(note, name) for note in notes], axis=0) / total for name in ("sums", "squares", "draws")
    )
    return Manifest(
        plan=plan,
        shards=tuple(note.shard for note in notes if note.shard),
        count=count,
        skipped=bad,
        latent_mean=tuple(((mean - plan.shift) * plan.scale).tolist()),
        latent_std=tuple((np.sqrt(square - mean**2 + draw) * abs(plan.scale)).tolist()),
    )


def verify_cache(cache: Path) -> Manifest:
    """Hashes every shard again and compares it with the manifest.

    Raises:
        ValueError: a shard is missing, damaged, too many, or not the one that was written; all are listed.
    """
    manifest = read_manifest(cache)
    problems = []
    names = {shard_path(cache, number).name for number in range(len(manifest.shards))}
    extra = sorted(path.name for path in (cache / SHARD_FOLDER).iterdir() if path.name not in names)
    problems += [f"{SHARD_FOLDER}/{name}: does not belong to this cache" for name in extra]
    total = sum(shard.num_bytes for shard in manifest.shards)
    with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, delay=2) as bar:
        for number, shard in enumerate(manifest.shards):
            problem = _problem(shard_path(cache, number), shard)
            problems += [problem] if problem else []
            bar.update(shard.num_bytes)
    if problems:
        raise ValueError(f"{cache}: {len(problems)} faults\n" + "\n".join(problems))
    return manifest


def _problem(path: Path, expected: ShardRecord) -> str | None:
    if not path.is_file():
        return f"{path}: missing"
    if path.stat().st_size != expected.num_bytes:
        return f"{path}: {path.stat().st_size} bytes, expected {expected.num_bytes}"
    found = file_sha256(path)
    return None if found == expected.sha256 else f"{path}: sha256 {found}, expected {expected.sha256}"
