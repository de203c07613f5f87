"""The installation against published numbers: ADM's samples as ADM's own evaluator, in TensorFlow, sees them."""

import argparse
import json
from typing import Any, NamedTuple

from fid.score import score_command


class Published(NamedTuple):
    """A value of ADM's evaluator, and how far a faithful port may lie from it."""

    value: float
    tolerance: float


# 50,000 samples of ADM-G with upsampling at 256x256. Tolerances are some times what a port by the same network and
# rules has been seen to differ.
EXPECTED = {
    "FID-50K": Published(3.942, 0.005),
    "sFID-50K": Published(6.140, 0.005),
    "IS-50K": Published(215.9, 0.5),
    "precision-50K": Published(0.826, 0.002),
    "recall-50K": Published(0.530, 0.004),
}


def golden_command(arguments: argparse.Namespace) -> None:
    """Scores the published samples and compares. See `python -m fid golden --help`.

    Raises:
        ValueError: a value lies outside its tolerance; the line names all that do.
    """
    print("expected: " + ", ".join(f"{name} {value} +- {tolerance}" for name, (value, tolerance) in EXPECTED.items()))
    unused = dict.fromkeys(
        ("extractor", "reference_format", "crop", "protocol", "num_images", "seed", "save", "weights"), None
    )
    score_command(
        argparse.Namespace(
            source=str(arguments.samples),
            reference=str(arguments.reference),
            metrics="fid,sfid,is,pr",
            extractor_weights=arguments.extractor_weights,
            kid_subset_size=1000,
            batch_size=arguments.batch_size,
            device=arguments.device,
            out=arguments.out,
            overrides=[],
            **unused,
        )
    )
    if not arguments.out.exists():
        return  # another process is to write it
    found = deviations(json.loads(arguments.out.read_text())["scores"])
    if found:
        raise ValueError(f"does not agree with ADM's evaluator: {'; '.join(found)}")
    print("agrees with ADM's evaluator")


def deviations(scores: list[dict[str, Any]]) -> list[str]:
    """A line for each expected score that is missing or lies outside its tolerance."""
    values = {score["name"]: score["value"] for score in scores}
    lines = []
    for name, (value, tolerance) in EXPECTED.items():
        if name not in values:
            lines.append(f"no {name}, but {', '.join(values)}: these are not the 50,000 published samples")
        elif not abs(values[name] - value) <= tolerance:  # NaN neither
            lines.append(f"{name} is {values[name]:.4f}, expected {value} +- {tolerance}")
    return lines
