"""Results side by side: refused where they do not compare, else with differences, their spread, and a chart."""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vcagen.files import require_file_name, written_aside

# What two results must share, by their place in the JSON: first what makes the number, then how the images came about.
MUST_AGREE = (
    "generated.num_images",
    "generated.image_size",
    "reference.file_sha256",
    "reference.pixels_sha256",
    "reference.statistics",
    "extractor.name",
    "extractor.weights_sha256",
    "extractor.resize",
)
SHOULD_AGREE = (
    "sampling.sampler",
    "sampling.guidance",
    "sampling.autoencoder",
    "sampling.decoding",
    "sampling.label_mode",
    "sampling.weights",
    "sampling.step",
)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Side:
    """A model with the results of one or several seeds.

    Attributes:
        name: on the chart and in the table.
        results: the JSONs' content.
    """

    name: str
    results: list[dict[str, Any]]

    def values(self, name: str) -> np.ndarray:
        """One value per result of the score called `name`."""
        return np.array([score["value"] for r in self.results for score in r["scores"] if score["name"] == name])


@dataclass(frozen=True)
class Difference:
    """How far a side's score lies from the first one's.

    Attributes:
        value: side minus first.
        half_width: of its 95% interval over seeds; None for one seed.
        paired: whether the interval is of differences seed by seed, which share noise and labels.
    """

    value: float
    half_width: float | None
    paired: bool


def compare_command(arguments: argparse.Namespace) -> None:
    """Prints a table and draws a chart. See `python -m fid compare --help`."""
    require_file_name(arguments.out)
    sides = [read_side(argument) for argument in arguments.results]
    if len(sides) < 2:
        raise ValueError("one result alone; give at least two, and join the seeds of one model by commas")
    require_comparable(sides, arguments.varying)
    if len({side.name for side in sides}) < len(sides):
        sides = [Side(f"{index}. {side.name}", side.results) for index, side in enumerate(sides, start=1)]
    names = shared_scores(sides)
    print(table(sides, names))
    draw(sides, names, arguments.out)
    print(f"{arguments.out}: bar chart")


def read_side(argument: str) -> Side:
    """The results that one argument names, joined by commas.

    Raises:
        ValueError: a file that is missing or is no result, or seeds that are no seeds of one model.
    """
    results = []
    for text in argument.split(","):
        try:
            result = json.loads(Path(text).read_text())
            assert result["scores"]
            results.append(result)
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(f"{text}: not a result of `python -m fid score` ({error or 'no scores'})") from error
    pixels = [_at(result, "generated.pixels_sha256") for result in results]
    if len(set(pixels)) < len(pixels):
        raise ValueError(f"{argument}: the same images twice; several results of one model are of several seeds")
    sampling = [_at(result, "generated.sampling") or {} for result in results]
    name = Path(results[0]["generated"]["images"]).name
    variant, attention = sampling[0].get("variant"), (sampling[0].get("attention") or {}).get("name")
    if variant:
        runs = Path(sampling[0]["checkpoint"]).parts
        run = runs[runs.index("checkpoints") - 1] if "checkpoints" in runs[1:] else runs[-1]
        step = "" if sampling[0]["step"] is None else f" at step {sampling[0]['step']}"
        name = f"{run} ({variant}, {attention}, {sampling[0]['weights']}{step})"
    return Side(name, results)


def require_comparable(sides: list[Side], varying: list[str]) -> None:
    """A `ValueError` that names the first thing in which the results differ, and may not.

    Args:
        sides: all results.
        varying: places that are what the comparison is about, such as `sampling.guidance`.
    """
    unknown = set(varying) - set(SHOULD_AGREE)
    if unknown:
        raise ValueError(f"--varying {', '.join(sorted(unknown))}: choose of {', '.join(SHOULD_AGREE)}")
    first = sides[0].results[0]
    for side in sides:
        for result in side.results:
            for place in (*MUST_AGREE, *(place for place in SHOULD_AGREE if place not in varying)):
                one, other = _at(first, place), _at(result, place)
                if one != other:
                    advice = f"; if that is what you compare, add --varying {place}" if place in SHOULD_AGREE else ""
                    raise ValueError(
                        f"not comparable: {place} is {_short(one)} for {sides[0].name} and {_short(other)} for "
                        f"{side.name}{advice}"
                    )


def shared_scores(sides: list[Side]) -> list[str]:
    """Names of the scores that every result has, in the first one's order; a `ValueError` if there are none."""
    every = [{score["name"] for score in result["scores"]} for side in sides for result in side.results]
    shared = set.intersection(*every)
    if not shared:
        raise ValueError(f"no score in common; the first result has {', '.join(sorted(every[0]))}")
    return [score["name"] for score in sides[0].results[0]["scores"] if score["name"] in shared]


def difference(side: Side, first: Side, name: str) -> Difference:
    """Side minus first, with its interval by Student's t where there are several seeds (Welch's unless paired)."""
    from scipy import stats

    mine, theirs = side.values(name), first.values(name)
    value = float(mine.mean() - theirs.mean())
    if min(len(mine), len(theirs)) < 2:
        return Difference(value, None, paired=False)
    order, other = _seeds(side), _seeds(first)
    if None not in order and sorted(order) == sorted(other) and len(set(order)) == len(order):
        pairs = np.array([mine[order.index(seed)] - theirs[other.index(seed)] for seed in order])
        interval = stats.t.interval(CONFIDENCE, len(pairs) - 1, scale=pairs.std(ddof=1) / math.sqrt(len(pairs)))
        return Difference(value, float(interval[1]), paired=True)
    variances = mine.var(ddof=1) / len(mine), theirs.var(ddof=1) / len(theirs)
    total = sum(variances)
    if total == 0:
        return Difference(value, 0.0, paired=False)
    freedom = total**2 / (variances[0] ** 2 / (len(mine) - 1) + variances[1] ** 2 / (len(theirs) - 1))
    return Difference(value, float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(total)), paired=False)


def table(sides: list[Side], names: list[str]) -> str:
    """Values and differences as text."""
    lines = []
    for name in names:
        lines.append(name)
        width = max(len(side.name) for side in sides)
        for side in sides:
            values = side.values(name)
            spread = f" +- {values.std(ddof=1):.2g} over {len(values)} seeds" if len(values) > 1 else ""
            line = f"  {side.name:{width}}  {values.mean():.5g}{spread}"
            if side is not sides[0]:
                line += f"   {_describe(difference(side, sides[0], name))}"
            lines.append(line)
    if any(len(side.results) < 2 for side in sides):
        lines.append("  one seed has no interval: score more by --seed 1, --seed 2, and join their results by commas")
    return "\n".join(lines)


def draw(sides: list[Side], names: list[str], out: Path) -> None:
    """A bar per side and score, each score on an axis of its own, with single seeds as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 + 3 * len(names), 1.2 + 0.4 * len(sides)), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for row, side in enumerate(sides):
            values = side.values(name)
            axis.barh(row, values.mean(), color=f"C{row}")
            axis.plot(values, [row] * len(values), "k.", markersize=4)
        axis.set_yticks(range(len(sides)), [side.name for side in sides] if axis is axes[0][0] else [])
        axis.invert_yaxis()
        axis.set_title(name)
    with written_aside(out) as aside:
        figure.savefig(aside, dpi=120, format="png")


def _describe(found: Difference) -> str:
    if found.half_width is None:
        return f"{found.value:+.4g}"
    how = "paired by seed" if found.paired else "unpaired"
    verdict = "" if abs(found.value) > found.half_width else ": no difference shown"
    return f"{found.value:+.4g} +- {found.half_width:.2g} (95%, {how}){verdict}"


def _seeds(side: Side) -> list[Any]:
    return [_at(result, "sampling.seed") for result in side.results]


def _at(result: dict[str, Any], place: str) -> Any:
    """A value by its place; `sampling.` is that of the generated images."""
    value: Any = result
    for key in place.replace("sampling.", "generated.sampling.").split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
