"""Builds a latent cache: any number of processes, resumable, the same bytes every time."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np
import torch
from pydantic import BaseModel
from tqdm import tqdm

from vcagen.cache.moments import MomentSource
from vcagen.cache.report import REPORT_FILE, SHEET_FILE
from vcagen.data.latent_format import (
    MANIFEST_FILE,
    PLAN_FILE,
    SHARD_FOLDER,
    Manifest,
    Plan,
    Shard,
    ShardRecord,
    disk_errors_named,
    listing_sha256,
    read_manifest,
    read_plan,
    shard_path,
    write_shard,
)
from vcagen.files import file_sha256, write_json

OnBad = Literal["stop", "skip"]

CHECKED_AT_ONCE = 1024


class ShardNote(BaseModel, extra="forbid", frozen=True):
    """What is kept beside a shard until the manifest is written.

    Attributes:
        source_sha256: `listing_sha256` of its records; a note of other records counts for nothing.
        shard: None where it is still to be written: its images were checked, or some are bad.
        bad: images that cannot be used, by key, with the reason.
        sums, squares, draws: per channel, of raw means, of their squares and of squared deviations.
        num_values: summed.
    """

    source_sha256: str
    shard: ShardRecord | None = None
    bad: dict[str, str]
    sums: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()
    draws: tuple[float, ...] = ()
    num_values: int = 0


def prepare_cache(cache: Path, plan: Plan, source: MomentSource, on_bad: OnBad) -> str:
    """Writes the plan of a new cache, or proves that the folder holds the same one, begun or finished.

    Images are compared by name, label and file size. Of one begun, shards of changed images will be made again. Of one
    finished, those that are missing or cut, and those whose skipped images can be read by now; it is unfinished until
    then. Half-written shards of a process that was killed go. Call it in one process, before any writes.

    Returns:
        A line on what became of an earlier cache; empty for a new one.

    Raises:
        ValueError: it holds another cache, a finished one of other images, or files that are no cache's.
    """
    path = cache / PLAN_FILE
    manifest = read_manifest(cache) if (cache / MANIFEST_FILE).is_file() else None
    if manifest is None and not path.is_file():
        for name in (SHARD_FOLDER, REPORT_FILE, SHEET_FILE):
            if (cache / name).exists():
                raise ValueError(f"{cache / name}: exists, but {cache} is no latent cache; choose another folder")
        cache.mkdir(parents=True, exist_ok=True)
        _write_json(path, plan)
        (cache / SHARD_FOLDER).mkdir()
        return ""
    before = read_plan(path) if manifest is None else manifest.plan
    of_images = ("num_records", "listing_sha256", "class_names")
    differences = [
        f"{key} was {getattr(before, key)!r}, now {getattr(plan, key)!r}"
        for key in Plan.model_fields
        if key not in of_images and getattr(before, key) != getattr(plan, key)
    ]
    if differences:
        raise ValueError(f"{cache}: holds another cache: {'; '.join(differences)}; choose another folder")
    (cache / SHARD_FOLDER).mkdir(exist_ok=True)
    for half in (cache / SHARD_FOLDER).glob(".*"):
        half.unlink()
    if manifest is not None:
        return _reopen(cache, manifest, plan, source, on_bad)
    return "" if before == plan else _replan(cache, before, plan, source)


def _replan(cache: Path, before: Plan, plan: Plan, source: MomentSource) -> str:
    """Goes on with a begun cache whose images have changed."""
    notes = {number: note for number in range(before.num_shards) if (note := _read_note(cache, number))}
    finished = [number for number, note in notes.items() if note.shard]
    keys = {record.key for record in source.records}
    done = [key for number in finished for _, key in Shard(shard_path(cache, number)).records()]
    known = sum(key in keys for key in done)
    if 2 * known < len(done):
        raise ValueError(
            f"{cache}: holds another cache: of the {len(done)} images done there {known} are in this source; choose "
            "another folder"
        )
    for number in range(plan.num_shards, before.num_shards):
        _note_path(cache, number).unlink(missing_ok=True)
        shard_path(cache, number).unlink(missing_ok=True)
    _write_json(cache / PLAN_FILE, plan)
    kept = sum(number < plan.num_shards and _note_of(cache, plan, source, number) is not None for number in finished)
    counts = f": {kept} of {len(finished)} finished shards are kept" if finished else ""
    return f"the images have changed since the last call{counts}"


def _reopen(cache: Path, manifest: Manifest, plan: Plan, source: MomentSource, on_bad: OnBad) -> str:
    """Makes a finished cache unfinished where shards must be made again."""
    if manifest.plan.num_records != plan.num_records or manifest.plan.class_names != plan.class_names:
        raise ValueError(
            f"{cache}: is finished, of {manifest.plan.num_records} images in {len(manifest.plan.class_names)} classes; "
            f"now there are {plan.num_records} in {len(plan.class_names)}, or classes of other names; choose another "
            "folder"
        )
    again, repaired, still_bad = [], 0, 0
    for number, shard in enumerate(manifest.shards):
        part = plan.part(number)
        skipped = [position for position in part if source.records[position].key in manifest.skipped]
        changed = _source_sha256(source, part) != shard.source_sha256
        if changed and not skipped:
            first, last = source.records[part[0]].key, source.records[part[-1]].key
            raise ValueError(
                f"{cache}: is finished, but from {first} to {last} names, labels or file sizes have changed since; "
                "choose another folder"
            )
        bad = len(source.bad(skipped))
        still_bad += bad
        repaired += len(skipped) - bad
        path = shard_path(cache, number)
        whole = path.is_file() and path.stat().st_size == shard.num_bytes
        if changed or bad < len(skipped) or not whole:
            again.append(number)
    if not again:
        return "finished before; names, labels and file sizes are as they were (contents are not compared)"
    if still_bad and on_bad == "stop":
        raise ValueError(
            f"{cache}: {len(again)} of its shards are to be made again, {repaired} images skipped before can be read "
            f"now, but {still_bad} are still bad: repair them too, or go on without them by --on-bad skip; the cache "
            "is as it was"
        )
    for number, shard in enumerate(manifest.shards):
        path = shard_path(cache, number)
        if number not in again and file_sha256(path) == shard.sha256:
            part = plan.part(number)
            keys = [source.records[position].key for position in part]
            bad_ones = {key: manifest.skipped[key] for key in keys if key in manifest.skipped}
            moments = torch.from_numpy(Shard(path).moments.copy())
            _write_json(_note_path(cache, number), _note(shard.source_sha256, shard, bad_ones, moments))
    _write_json(cache / PLAN_FILE, plan)
    (cache / MANIFEST_FILE).unlink()
    return f"finished before; {len(again)} shards are made again, {repaired} images skipped before can be read now"


def build_cache(
    cache: Path,
    plan: Plan,
    source: MomentSource,
    on_bad: OnBad,
    rank: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
    seconds: dict[str, float] | None = None,
) -> Manifest:
    """Builds what is missing of a cache; each process takes every `num_processes`-th shard.

    A shard is written whole or not at all, so the same command goes on after any stop. With `stop` all images are
    decoded once before the first is encoded, and the bad ones listed; what was checked is not checked again.

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
        if rank == 0:
            _tidy(cache, plan)
        return read_manifest(cache)
    mine = range(rank, plan.num_shards, num_processes)
    with _bar("checking images", plan, rank, delay=0.5) as bar:  # without `stop` there is little to check
        for number in mine:
            _check_shard(cache, plan, source, number, on_bad)
            bar.update(len(plan.part(number)) * num_processes)
    wait()
    if on_bad == "stop":
        _refuse_bad([_note_of(cache, plan, source, number) for number in range(plan.num_shards)], plan, on_bad)
    with _bar("latents", plan, rank) as bar:
        for number in mine:
            note = _note_of(cache, plan, source, number)
            if note is None or note.shard is None:
                _build_shard(cache, plan, source, number, on_bad, lambda n: bar.update(n * num_processes), seconds)
            else:
                bar.update(len(plan.part(number)) * num_processes)
    wait()
    manifest = _merge(cache, plan, source, on_bad)
    wait()  # nobody tidies up while another still reads
    if rank == 0:
        _write_json(cache / MANIFEST_FILE, manifest)
        _tidy(cache, plan)
    return manifest


def _bar(what: str, plan: Plan, rank: int, delay: float = 0) -> "tqdm[NoReturn]":
    """Of the main process, over all images."""
    total = plan.num_records
    return tqdm(total=total, desc=what, unit="image", disable=rank != 0, smoothing=0.05, mininterval=0.5, delay=delay)


def _tidy(cache: Path, plan: Plan) -> None:
    for number in range(plan.num_shards):
        _note_path(cache, number).unlink(missing_ok=True)
    (cache / PLAN_FILE).unlink(missing_ok=True)


def _check_shard(cache: Path, plan: Plan, source: MomentSource, number: int, on_bad: OnBad) -> None:
    """Notes which images of a shard are bad: looks at all with `stop`, at those that were bad before in any case."""
    part = plan.part(number)
    note = _note_of(cache, plan, source, number)
    if note is None and on_bad == "skip":
        return  # they will be found while they are encoded
    positions = [position for position in part if note is None or source.records[position].key in note.bad]
    bad: dict[str, str] = {}
    for start in range(0, len(positions), CHECKED_AT_ONCE):
        bad |= source.bad(positions[start : start + CHECKED_AT_ONCE])
    if note is None or bad.keys() != note.bad.keys():
        _write_json(_note_path(cache, number), ShardNote(source_sha256=_source_sha256(source, part), bad=bad))


def _build_shard(
    cache: Path,
    plan: Plan,
    source: MomentSource,
    number: int,
    on_bad: OnBad,
    update: Callable[[int], object],
    seconds: dict[str, float] | None,
) -> None:
    part = plan.part(number)
    source_sha256 = _source_sha256(source, part)
    moments, mirrored, records, bad = [], [], [], {}
    for batch in source.batches(part.start, part.stop):
        moments.append(batch.moments)
        if batch.mirrored is not None:
            mirrored.append(batch.mirrored)
        records += [source.records[position][:2] for position in batch.positions]
        for key, reason in batch.bad.items():
            bad[key] = reason
            tqdm.write(f"bad image: {reason}")
        update(len(batch.positions) + len(batch.bad))
    whole = torch.cat(moments)
    started = time.perf_counter()
    shard = None
    if not bad or on_bad == "skip":
        mirror_images = torch.cat(mirrored) if plan.mirrored else None
        shard = write_shard(shard_path(cache, number), whole, mirror_images, records, source_sha256)
    _write_json(_note_path(cache, number), _note(source_sha256, shard, bad, whole))
    if seconds is not None:
        seconds["write"] += time.perf_counter() - started


def _note(source_sha256: str, shard: ShardRecord | None, bad: dict[str, str], moments: torch.Tensor) -> ShardNote:
    mean, std = moments.double().chunk(2, dim=1)
    return ShardNote(
        source_sha256=source_sha256,
        shard=shard,
        bad=bad,
        sums=tuple(mean.sum((0, 2, 3)).tolist()),
        squares=tuple(mean.square().sum((0, 2, 3)).tolist()),
        draws=tuple(std.square().sum((0, 2, 3)).tolist()),
        num_values=mean[:, 0].numel(),
    )


def _source_sha256(source: MomentSource, part: range) -> str:
    return listing_sha256(source.records[part.start : part.stop])


def _note_path(cache: Path, number: int) -> Path:
    return shard_path(cache, number).with_suffix(".json")


def _read_note(cache: Path, number: int) -> ShardNote | None:
    """The note of a shard that is there, or that was only checked; None for one still to come."""
    try:
        note = ShardNote.model_validate_json(_note_path(cache, number).read_text())
    except (OSError, ValueError):
        return None
    path = shard_path(cache, number)
    if note.shard is not None and (not path.is_file() or path.stat().st_size != note.shard.num_bytes):
        return None
    return note


def _note_of(cache: Path, plan: Plan, source: MomentSource, number: int) -> ShardNote | None:
    """As `_read_note`; None also where the note is of other records."""
    note = _read_note(cache, number)
    return note if note and note.source_sha256 == _source_sha256(source, plan.part(number)) else None


def _refuse_bad(notes: Iterable[ShardNote | None], plan: Plan, on_bad: OnBad) -> None:
    bad = [reason for note in notes if note for reason in note.bad.values()]
    all_bad = len(bad) == plan.num_records
    if bad and (on_bad == "stop" or all_bad):
        shown = "\n".join(bad[:20]) + (f"\nand {len(bad) - 20} more" if len(bad) > 20 else "")
        advice = "" if all_bad else ", or go on without them by --on-bad skip"
        raise ValueError(
            f"{len(bad)} of {plan.num_records} images are bad: repair or remove them{advice}; what is done is kept\n"
            f"{shown}"
        )


def _merge(cache: Path, plan: Plan, source: MomentSource, on_bad: OnBad) -> Manifest:
    notes = []
    for number in range(plan.num_shards):
        note = _note_of(cache, plan, source, number)
        if note is None:
            raise ValueError(f"{shard_path(cache, number)}: missing; run the same command again")
        notes.append(note)
    _refuse_bad(notes, plan, on_bad)
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
        count=sum(note.shard.count for note in notes if note.shard),
        skipped={key: reason for note in notes for key, reason in note.bad.items()},
        latent_mean=tuple(((mean - plan.shift) * plan.scale).tolist()),
        latent_std=tuple((np.sqrt(square - mean**2 + draw) * abs(plan.scale)).tolist()),
    )


def _write_json(path: Path, value: BaseModel) -> None:
    with disk_errors_named(path):
        write_json(path, value.model_dump(mode="json"))
