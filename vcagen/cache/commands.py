"""What the command line of latent caches does."""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState

from vcagen.autoencoder import Autoencoder, DecodingConfig, IdentityConfig, KLConfig, build_autoencoder
from vcagen.cache.importers import ImportedLatents
from vcagen.cache.moments import EncodedImages, MomentSource
from vcagen.cache.records import names_for
from vcagen.cache.report import REPORT_FILE, SHEET_FILE, write_contact_sheet, write_report
from vcagen.cache.sources import open_source
from vcagen.cache.verify import verify_cache
from vcagen.cache.writer import OnBad, build_cache, prepare_cache
from vcagen.class_names import read_class_names
from vcagen.data.latent_format import Manifest, Plan, plan_for
from vcagen.devices import usable_device
from vcagen.files import locked, require_writable


def build(arguments: argparse.Namespace) -> None:
    """Encodes a source into a cache, in every process of a torchrun."""
    for name in ("image_size", "batch_size", "threads", "shard_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    _require_apart(Path(arguments.source), arguments.cache)
    process = PartialState(cpu=not torch.accelerator.is_available())
    names = None if arguments.class_names is None else read_class_names(arguments.class_names)
    source = open_source(arguments.source, arguments.kind, arguments.split, names)
    config, autoencoder = _autoencoder(arguments, process)
    size = arguments.image_size
    plan = plan_for(
        config,
        autoencoder,
        source.records,
        source.class_names,
        (3, size, size),
        mirrored=not arguments.no_mirror,
        shard_size=arguments.shard_size,
        precision=arguments.precision,
        batch_size=arguments.batch_size,
    )
    if arguments.precision == "bf16":
        autoencoder.to(torch.bfloat16)
    images = EncodedImages(source, autoencoder, size, plan.mirrored, arguments.batch_size, arguments.threads)
    manifest = _build(arguments.cache, plan, images, arguments.on_bad, process, images.seconds)
    if not process.is_main_process:
        return
    positions = {record.key: position for position, record in enumerate(source.records)}
    write_report(arguments.cache, manifest, arguments.source, source.ignored, images.seconds, images.num_encoded)
    write_contact_sheet(arguments.cache, manifest, autoencoder.float(), lambda key: images.image(positions[key]))
    print(_describe(arguments.cache, manifest))


def import_latents(arguments: argparse.Namespace) -> None:
    """Imports someone else's latents into a cache."""
    if arguments.shard_size < 1:
        raise ValueError("--shard-size must be at least 1")
    _require_apart(arguments.source, arguments.cache)
    process = PartialState(cpu=not torch.accelerator.is_available())
    config, autoencoder = _autoencoder(arguments, process)
    latents = ImportedLatents(arguments.source, arguments.layout, autoencoder)
    height, width = autoencoder.image_size(latents.latent_shape[1:])
    image_shape = (3, height, width)
    if autoencoder.latent_shape(image_shape) != latents.latent_shape:
        raise ValueError(
            f"{arguments.source}: latents are {latents.latent_shape}, but {arguments.autoencoder} makes "
            f"{autoencoder.latent_shape(image_shape)}; give the one that made them with --autoencoder"
        )
    given = None if arguments.class_names is None else read_class_names(arguments.class_names)
    plan = plan_for(
        config,
        autoencoder,
        latents.records,
        names_for(latents.records, given, str(arguments.source)),
        image_shape,
        mirrored=latents.mirrored,
        shard_size=arguments.shard_size,
        imported_from=arguments.layout,
    )
    manifest = _build(arguments.cache, plan, latents, "stop", process, None)
    if process.is_main_process:
        write_report(arguments.cache, manifest, f"{arguments.layout} at {arguments.source}", 0, {}, 0)
        write_contact_sheet(arguments.cache, manifest, autoencoder, lambda key: None)
        print("\n".join([*(f"note: {note}" for note in latents.notes), _describe(arguments.cache, manifest)]))


def verify(arguments: argparse.Namespace) -> None:
    """Hashes a cache again."""
    manifest = verify_cache(arguments.cache)
    print(
        f"{arguments.cache}: whole; {manifest.count} images in {len(manifest.shards)} shards, every sha256 as written"
    )


def _require_apart(source: Path, cache: Path) -> None:
    """A cache in the folder of its images would become one of its classes."""
    folder = source.resolve()
    if folder.is_dir() and (cache.resolve() == folder or folder in cache.resolve().parents):
        raise ValueError(f"{cache}: lies in the source {source}; choose a folder outside of it")


def _autoencoder(arguments: argparse.Namespace, process: PartialState) -> tuple[Any, Autoencoder]:
    config: Any = IdentityConfig() if arguments.autoencoder == "identity" else KLConfig(source=arguments.autoencoder)
    device = usable_device(arguments.device) if arguments.device else process.device
    return config, build_autoencoder(config, DecodingConfig()).to(device)


def _build(
    cache: Path,
    plan: Plan,
    source: MomentSource,
    on_bad: OnBad,
    process: PartialState,
    seconds: dict[str, float] | None,
) -> Manifest:
    with contextlib.ExitStack() as stack:
        if process.is_main_process:
            require_writable(cache)
            stack.enter_context(locked(cache, "another process is building this cache"))
            before = prepare_cache(cache, plan, source, on_bad)
            num_bytes = plan.num_records * plan.record_bytes
            present = sum(path.stat().st_size for path in (cache / "shards").glob("*.safetensors"))
            print(
                f"{plan.num_records:,} images in {len(plan.class_names)} classes, latents {plan.latent_shape}"
                f"{', with mirror images' if plan.mirrored else ''}: {num_bytes / 1e9:.2f} GB"
                + (f", {present / 1e9:.2f} GB of them there" if present else "")
                + (f"\n{before}" if before else ""),
                flush=True,
            )
            require_writable(cache, max(0, num_bytes - present))
        wait: Callable[[], None] = process.wait_for_everyone
        wait()
        return build_cache(cache, plan, source, on_bad, process.process_index, process.num_processes, wait, seconds)


def _describe(cache: Path, manifest: Manifest) -> str:
    mean, std = (np.round(values, 3).tolist() for values in (manifest.latent_mean, manifest.latent_std))
    skipped = f", {len(manifest.skipped)} bad ones skipped" if manifest.skipped else ""
    return (
        f"{cache}: {manifest.count} images{skipped}; latents have mean {mean} and standard deviation {std}\n"
        f"  {cache / REPORT_FILE}: counts, bad images, statistics\n"
        f"  {cache / SHEET_FILE}: originals above decoded latents"
    )
