"""Results side by side: refused where they do not compare, else with differences, their spread, and a chart."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fid.intervals import Difference, paired_difference, welch_difference
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
    "sampling.dtype",
    "sampling.step",
)
ONE_MODEL = ("sampling.variant", "sampling.attention")  # what results joined by commas share on top


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


def compare_command(arguments: argparse.Namespace) -> None:
    """Prints a table and draws a chart. See `python -m fid compare --help`."""
    if arguments.out.suffix.lower() != ".png":
        raise ValueError(f"--out {arguments.out}: the chart is a PNG; give a name that ends in .png")
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
    results = [_read_result(text) for text in argument.split(",")]
    pixels = [_at(result, "generated.pixels_sha256") for result in results]
    if len(set(pixels)) < len(pixels):
        raise ValueError(f"{argument}: the same images twice; several results of one model are of several seeds")
    for result in results:
        for place in ONE_MODEL:
            one, other = _at(results[0], place), _at(result, place)
            if one != other:
                raise ValueError(
                    f"{argument}: {place} is {_short(one)} and {_short(other)}; commas join the seeds of one model, "
                    "another model is another argument"
                )
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
    """Side minus first, with its interval where there are several seeds: paired where both have the same ones."""
    mine, theirs = side.values(name), first.values(name)
    order, other = _seeds(side), _seeds(first)
    if None in (*order, *other) or sorted(order) != sorted(other) or len(set(order)) < len(order):
        return welch_difference(mine, theirs)
    return paired_difference(mine, np.array([theirs[other.index(seed)] for seed in order]))


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
                line += f"   {difference(side, sides[0], name).describe()}"
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


def _read_result(text: str) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(Path(text).read_text())
        scores = {score["name"]: float(score["value"]) for score in result["scores"]}
        Path(result["generated"]["images"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{text}: not a result of `python -m fid score` ({error})") from error
    if not scores:
        raise ValueError(f"{text}: no scores in it")
    return result


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
