"""Pictures of an experiment's report."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from fid.experiment.plan import PlannedRun
from vcagen.files import written_aside

if TYPE_CHECKING:
    from fid.experiment.report import Row

STYLES = ("-", "--", ":")


def draw_curves(families: dict[str, list["Row"]], score_name: str, floors: dict[str, float | None], out: Path) -> None:
    """`scores.png`, means and standard deviations over seeds, and `losses.png`, means of the logged rows."""
    for file, draw in (("scores.png", _draw_scores), ("losses.png", _draw_losses)):
        figure = Figure(figsize=(5.5 * len(families) + 2, 4.2), dpi=90, layout="constrained")
        axes = figure.subplots(1, len(families), squeeze=False)[0]
        for axis, (family, rows) in zip(axes, families.items(), strict=True):
            for index, row in enumerate(rows):
                if row.seeds:
                    draw(axis, row, f"C{index % 10}", STYLES[index // 10])
            axis.set(title=family, xlabel="step", ylabel=score_name if file == "scores.png" else "loss")
            axis.grid(alpha=0.3)
            floor = floors[family]
            if file == "scores.png" and floor is not None:
                axis.axhline(floor, color="k", linewidth=0.8)
        handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda found: len(found[1]))
        figure.legend(handles, labels, loc="outside right upper", fontsize="small")
        with written_aside(out / file) as aside:
            figure.savefig(aside, format="png")


def _draw_scores(axis: "object", row: "Row", color: str, style: str) -> None:
    mean = row.scores.mean(axis=0)
    spread = row.scores.std(axis=0, ddof=1) if len(row.seeds) > 1 else np.zeros_like(mean)
    axis.errorbar(row.steps, mean, spread, color=color, linestyle=style, capsize=2, label=row.name)  # type: ignore[attr-defined]
    axis.set_yscale("log")  # type: ignore[attr-defined]


def _draw_losses(axis: "object", row: "Row", color: str, style: str) -> None:
    steps = [step for step, _ in row.losses[0]]
    mean = np.array([[loss for _, loss in curve] for curve in row.losses]).mean(axis=0)
    axis.plot(steps, mean, color=color, linestyle=style, linewidth=1, label=row.name)  # type: ignore[attr-defined]
    axis.set_yscale("log")  # type: ignore[attr-defined]


def draw_grids(families: dict[str, list[str]], planned: list[PlannedRun], out: Path) -> None:
    """`samples.png`: the first seed's grids of all rows side by side, a line for each family."""
    columns = max(len(rows) for rows in families.values())
    figure = Figure(figsize=(1.5 * columns, 4.2 * len(families)), dpi=64, layout="constrained")
    axes, is_gray = figure.subplots(len(families), columns, squeeze=False), True
    for line, (family, rows) in zip(axes, families.items(), strict=True):
        for axis in line:
            axis.axis("off")
        for axis, row in zip(line, rows, strict=False):
            run = next(run for run in planned if (run.family, run.row) == (family, row))
            grid = out / "grids" / f"{run.name}.png"
            if grid.exists():
                pixels = np.asarray(Image.open(grid))
                is_gray &= pixels.ndim == 2
                axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
                axis.set_title("\n".join([family, *row.split(", ")]), fontsize=7)
    with written_aside(out / "samples.png") as aside:
        figure.savefig(aside, format="png")
        Image.open(aside).convert("L" if is_gray else "RGB").save(aside, optimize=True)  # a few hundred KB
