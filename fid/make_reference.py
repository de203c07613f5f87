"""Writes a reference: the statistics of real images, in ADM's keys, with where they come from."""

import argparse
import json
import zipfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from accelerate import PartialState

from fid.collection import Wanted
from fid.features import DIGITS, DIGITS_SIZES, INCEPTION, RESIZE_RULES
from fid.images import DIGITS_REFERENCE, LOSSY_SUFFIXES, Images, open_images
from fid.metrics import halves_distance
from fid.score import build_for_all
from fid.workspace import Workspace
from vcagen.devices import usable_device
from vcagen.files import require_file_name, require_writable, written_aside


def reference_command(arguments: argparse.Namespace) -> None:
    """Takes the statistics of all images of a source. See `python -m fid reference --help`."""
    out, keep = arguments.out, arguments.keep_images
    if out.suffix != ".npz":
        raise ValueError(f"--out {out}: a reference is an npz; give a name that ends in .npz")
    if out.is_file() and not _is_reference(out):
        raise ValueError(f"--out {out}: holds something else than a reference; choose another name")
    if arguments.batch_size < 1 or keep < 0:
        raise ValueError("--batch-size must be at least 1 and --keep-images at least 0")
    device = usable_device(arguments.device)
    process = PartialState(cpu=device.type == "cpu")
    images = open_images(arguments.source, arguments.crop, check=process.is_main_process)
    if arguments.crop is not None and images.about.size != (arguments.crop, arguments.crop):
        raise ValueError(f"--crop {arguments.crop}: {images.about.name} is taken as it is; leave out --crop")
    if images.about.num_images < 2:
        raise ValueError(f"{images.about.name}: 1 image; a covariance needs at least 2")
    height, width = images.about.size
    require_file_name(out)
    require_writable(out.parent, min(keep, images.about.num_images) * height * width * 3)
    name = arguments.extractor or (DIGITS if arguments.source == DIGITS_REFERENCE else INCEPTION)
    if name == DIGITS and images.about.size not in DIGITS_SIZES:
        raise ValueError(
            f"{images.about.name}: {DIGITS} reads 8x8 digits (or 16x16), not images of {width}x{height} pixels"
        )
    extractor = build_for_all(name, arguments.extractor_weights, device, process)

    workspace = Workspace(out, extractor, arguments.batch_size, process)
    with workspace.opened():
        collected = workspace.collect(images, Wanted(spatial=name == INCEPTION), "reference")
        if collected is None:
            return
        pooled, spatial = collected.part.pooled(), collected.part.spatial
        meta = {
            "source": images.about.name,
            "image_size": list(images.about.size),
            "pixels_sha256": collected.pixels_sha256,
            "lossy": sorted(images.about.suffixes & LOSSY_SUFFIXES),
            "extractor": extractor.name,
            "extractor_weights_sha256": extractor.weights_sha256,
            "resize": RESIZE_RULES[extractor.name],
            "spatial_layout": "rows, columns, channels" if spatial else None,
            "halves_distance": halves_distance(collected.part),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {package: version(package) for package in ("torch", "torch-fidelity", "numpy", "pillow")},
        }
        arrays = {"mu": pooled.mean(), "sigma": pooled.covariance(), "n": np.array(pooled.n)}
        if spatial is not None:
            arrays |= {"mu_s": spatial.mean(), "sigma_s": spatial.covariance()}
        with written_aside(out) as aside:
            np.savez(aside, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
            if keep:
                _add_images(aside, images, keep, arguments.batch_size)
        workspace.remove()
    halves = meta["halves_distance"]
    print(f"{out}: statistics of {pooled.n} images of {width}x{height} by {extractor.name}, from {images.about.name}")
    if halves is not None:
        print(f"  two halves of them are {halves:.4g} apart")
    if pooled.n <= extractor.dimension:
        print(f"  warning: {pooled.n} images for {extractor.dimension} features give a rank-deficient covariance")


def _is_reference(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return "meta.npy" in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _add_images(npz: Path, images: Images, keep: int, batch_size: int) -> None:
    """Adds `arr_0`: a fixed random choice of the images, uint8 (N, H, W, 3), for precision, recall and KID."""
    height, width = images.about.size
    num_images = images.about.num_images
    chosen = np.sort(np.random.default_rng(0).permutation(num_images)[:keep])
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(chosen), height, width, 3)}
    with (
        zipfile.ZipFile(npz, "a", zipfile.ZIP_STORED) as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as f,
    ):
        np.lib.format.write_array_header_1_0(f, header)
        for start in range(0, len(chosen), batch_size):
            batch = images.batch(chosen[start : start + batch_size].tolist())
            f.write(np.ascontiguousarray(batch.transpose(0, 2, 3, 1)).tobytes())
