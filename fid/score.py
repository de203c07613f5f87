"""Scores a model, sampled as it is scored, or images that others have made."""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from fid.collection import Collected, Part
from fid.features import DIGITS, DIGITS_SIZES, INCEPTION, Extractor, build_extractor
from fid.images import DIGITS_REFERENCE, Images, open_images
from fid.metrics import (
    FRECHET_NAMES,
    METRICS,
    Metric,
    chosen_metrics,
    compute,
    distance,
    gaussian,
    halves_distance,
    kid_name,
    require_enough,
    wanted_of_generated,
    wanted_of_reference,
)
from fid.moments import FeatureMoments
from fid.reference import Gaussian, Reference, open_reference
from fid.result import (
    describe,
    describe_extractor,
    describe_images,
    describe_reference,
    describe_run,
    own_label_accuracy,
    warnings,
)
from fid.sampled import SampledImages, score_folder
from fid.workspace import Workspace
from vcagen.devices import usable_device
from vcagen.files import require_file_name, write_json
from vcagen.generation import LoadedModel, load_model
from vcagen.pipeline_folder import is_pipeline_folder

NUM_IMAGES = 1000


def score_command(arguments: argparse.Namespace) -> None:
    """Scores, prints the numbers and writes the result JSON. See `python -m fid score --help`."""
    if arguments.batch_size < 1:
        raise ValueError(f"--batch-size {arguments.batch_size}: must be at least 1")
    if arguments.crop is not None and arguments.crop < 1:
        raise ValueError(f"--crop {arguments.crop}: must be at least 1")
    device = usable_device(arguments.device)
    process = PartialState(cpu=device.type == "cpu")
    model = _load_if_model(arguments)
    check = process.is_main_process
    images: Images = _sampled(model, arguments) if model else open_images(arguments.source, None, check)
    height, width = images.about.size
    # A model's reference is cropped as its training images were; folders are compared as they are.
    is_digits = arguments.reference == DIGITS_REFERENCE
    crop = arguments.crop or (height if (model or is_digits) and height == width else None)
    reference = open_reference(arguments.reference, crop, arguments.reference_format, check)
    name = arguments.extractor or reference.extractor or (DIGITS if is_digits else INCEPTION)
    require_comparable(images, reference, name)
    metrics = chosen_metrics(arguments.metrics, name, reference)
    require_enough(metrics, images.about.num_images, reference, arguments.kid_subset_size)
    default_out = _default_out(Path(arguments.source), images)
    if arguments.out:
        _require_result_name(arguments.out)
    require_file_name(arguments.out or default_out)
    extractor = build_for_all(name, arguments.extractor_weights, device, process)
    require_same_weights(reference, extractor)

    scored = _identity(images, reference, extractor)
    out = arguments.out or _free_name(default_out, scored)
    before = _result_before(out, scored)
    kid = kid_name(extractor.name, images.about.num_images, arguments.kid_subset_size)
    known = [score for score in before["scores"] if score["metric"] != "kid" or score["name"] == kid] if before else []
    unsaved = isinstance(images, SampledImages) and not images.is_saved()
    missing = tuple(metric for metric in metrics if unsaved or metric not in {score["metric"] for score in known})
    if process.is_main_process and model:
        print(model.describe())
    if not missing:
        if process.is_main_process and before:
            print(describe(before, out))
        return
    workspace = Workspace(out, extractor, arguments.batch_size, process)
    with workspace.opened():
        others = [score for score in before["scores"] if score["metric"] not in missing] if before else []
        result = _score(missing, others, images, reference, workspace, arguments.kid_subset_size)
        if result is None:
            return
        result["saved"] = result["saved"] or (before and before["saved"])
        write_json(out, {**result, "scored_sha256": scored})
        workspace.remove()
    print(describe(result, out))


def _score(
    metrics: tuple[Metric, ...],
    others: list[dict[str, Any]],
    images: Images,
    reference: Reference,
    workspace: Workspace,
    kid_subset_size: int,
) -> dict[str, Any] | None:
    """Collects and computes; the result, with the scores that are there already, on the main process, else None."""
    extractor, process = workspace.extractor, workspace.process
    of_reference = wanted_of_reference(metrics, reference)
    real = None
    if of_reference is not None:
        assert reference.images is not None
        real = workspace.collect(reference.images, of_reference, "reference")
    estimate, wanted = None, wanted_of_generated(metrics)
    if isinstance(images, SampledImages):
        images.keep_rows_in(workspace.folder_of(images, wanted, "generated"))
        if process.is_main_process:
            images.prepare()
            estimate = _running_estimate(reference.pooled or gaussian(_pooled(real)), extractor)
        process.wait_for_everyone()
    generated = workspace.collect(images, wanted, "generated", estimate)
    if generated is None:
        return None
    computed = real if real is not None and reference.pooled is None else None
    saved = images.finish() if isinstance(images, SampledImages) else None
    new = [asdict(score) for score in compute(metrics, generated, reference, real, extractor, kid_subset_size)]
    scores = sorted(others + new, key=lambda score: METRICS.index(score["metric"]))
    known = {score["metric"] for score in scores}
    return {
        "scores": scores,
        "reference_halves_distance": halves_distance(computed.part) if computed else reference.halves_distance,
        "own_label_accuracy": own_label_accuracy(images, generated, extractor),
        "warnings": warnings(tuple(m for m in METRICS if m in known), images, generated, reference, extractor),
        "generated": describe_images(images, generated),
        "reference": describe_reference(reference, real),
        "extractor": describe_extractor(extractor),
        "run": describe_run(extractor, workspace.batch_size, process.num_processes),
        "saved": str(saved) if saved else None,
    }


def _load_if_model(arguments: argparse.Namespace) -> LoadedModel | None:
    source = Path(arguments.source)
    protocol = [f"protocol={arguments.protocol}"] if arguments.protocol else []
    if (source / "checkpoints").is_dir() or is_pipeline_folder(source):
        overrides = [*protocol, *arguments.overrides]
        return load_model(source, arguments.weights or "ema", overrides, arguments.device, arguments.dtype or "fp32")
    given = [arguments.num_images, arguments.seed, arguments.save, arguments.weights, arguments.dtype]
    if protocol or arguments.overrides or any(value is not None for value in given):
        raise ValueError(
            f"{source}: not a run or a model, so there is nothing to sample; leave out --protocol, --num-images, "
            "--seed, --save, --weights, --dtype and key=value"
        )
    return None


def _sampled(model: LoadedModel, arguments: argparse.Namespace) -> SampledImages:
    num_images = NUM_IMAGES if arguments.num_images is None else arguments.num_images
    seed = arguments.seed or 0
    return SampledImages(model, num_images, seed, score_folder(model, num_images, seed), arguments.save)


def build_for_all(name: str, weights: Path | None, device: torch.device, process: PartialState) -> Extractor:
    """The extractor on every process; the first of them downloads what has to be."""
    with process.main_process_first():
        return build_extractor(name, weights, device)


def require_comparable(images: Images, reference: Reference, extractor: str) -> None:
    """Proves that images, reference and network belong together.

    Raises:
        ValueError: sizes differ, or the statistics are of another network; both sides are named.
    """
    height, width = images.about.size
    if reference.size is not None and reference.size != images.about.size:
        raise ValueError(
            f"{images.about.name}: images of {width}x{height} pixels, but the reference {reference.name} "
            f"has {reference.size[1]}x{reference.size[0]}; sizes must agree, since the extractor resizes silently"
        )
    if extractor == DIGITS and images.about.size not in DIGITS_SIZES:
        raise ValueError(
            f"{images.about.name}: {DIGITS} reads 8x8 digits (or 16x16), not images of {width}x{height} pixels; "
            f"use --extractor {INCEPTION}"
        )
    if reference.extractor is not None and reference.extractor != extractor:
        raise ValueError(
            f"{reference.name}: statistics of {reference.extractor}, but --extractor is {extractor}; "
            "features of two networks cannot be compared"
        )


def require_same_weights(reference: Reference, extractor: Extractor) -> None:
    """A `ValueError` if the reference's statistics were made with other weights of the same network."""
    recorded = reference.extractor_weights_sha256
    if recorded is not None and recorded != extractor.weights_sha256:
        raise ValueError(
            f"{reference.name}: made with {extractor.name} weights of sha256 {recorded[:16]}..., but the ones given "
            f"have {extractor.weights_sha256[:16]}...; use the same file, or make the reference again"
        )


def _running_estimate(real: Gaussian, extractor: Extractor) -> Callable[[Part], str]:
    """Text for the progress bar: the distance of what the main process has seen so far."""

    def estimate(part: Part) -> str:
        moments = part.pooled()
        if moments.n < 2:
            return ""
        return f"{FRECHET_NAMES[extractor.name]}-{moments.n} {distance(gaussian(moments), real):.4g}"

    return estimate


def _pooled(real: Collected | None) -> FeatureMoments:
    assert real is not None
    return real.part.pooled()


def _identity(images: Images, reference: Reference, extractor: Extractor) -> str:
    """Of what is compared by what: scores of the same are put into one result."""
    scored = {key: value for key, value in images.identity().items() if key != "save"}
    real = reference.sha256 or (reference.images.identity() if reference.images else None)
    facts = json.dumps([scored, real, reference.notes, extractor.name, extractor.weights_sha256], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def _default_out(source: Path, images: Images) -> Path:
    if isinstance(images, SampledImages):
        return images.folder / "score.json"
    return source / "score.json" if source.is_dir() else source.with_suffix(".score.json")


def _require_result_name(out: Path) -> None:
    """A `ValueError` for a name under which something other than a result lies, or none can."""
    if out.suffix != ".json":
        raise ValueError(f"--out {out}: a result is JSON; give a name that ends in .json")
    if out.is_file():
        try:
            is_result = "scores" in json.loads(out.read_text())
        except (ValueError, TypeError):
            is_result = False
        if not is_result:
            raise ValueError(f"--out {out}: holds something else than a result; choose another name")


def _free_name(out: Path, scored: str) -> Path:
    """The default place of a result, or one beside it where that holds the score of something else."""
    return out if not out.exists() or _result_before(out, scored) else out.with_stem(f"{out.stem}-{scored[:8]}")


def _result_before(out: Path, scored: str) -> dict[str, Any] | None:
    """The result that is there already, if it is of the same images and reference."""
    try:
        result = json.loads(out.read_text())
        return result if result["scored_sha256"] == scored else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
