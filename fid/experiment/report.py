"""The report of an experiment: tables that say what is shown and what is not, pictures, and the numbers as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fid.experiment.pictures import draw_curves, draw_grids
from fid.experiment.plan import Experiment, PlannedRun, plan_runs, read_result, result_path, run_config
from fid.intervals import Difference, paired_difference
from vcagen.config import RunConfig
from vcagen.files import write_json, write_text
from vcagen.generation import describe_sampler

ACCURACY = "own_label_accuracy"
LAST_SHARE = 0.1  # of the steps are in the loss of the tables


@dataclass(frozen=True)
class Row:
    """All seeds of one row of a family.

    Attributes:
        name: of the row.
        seeds: that have results.
        steps: at which it was scored.
        scores: (seeds, steps) of `score_name`.
        losses: one curve [[step, loss], ...] a seed.
        accuracies: (seeds,) own-label accuracy at the end, or empty.
        cost: parameters, multiply-adds, seconds of a step.
    """

    name: str
    seeds: list[int]
    steps: list[int]
    scores: NDArray[np.float64]
    losses: list[list[list[float]]]
    accuracies: NDArray[np.float64]
    cost: dict[str, float]

    @property
    def final(self) -> NDArray[np.float64]:
        """(seeds,) scores at the last step."""
        return self.scores[:, -1]

    @property
    def final_losses(self) -> NDArray[np.float64]:
        """(seeds,) mean losses of the last steps."""
        first = self.steps[-1] * (1 - LAST_SHARE)
        return np.array([np.mean([loss for step, loss in curve if step > first]) for curve in self.losses])

    def at_time_of(self, other: "Row") -> NDArray[np.float64] | None:
        """(seeds,) scores at the step reached when `other` has ended, on the line between scored steps.

        None where this row is the faster one, and was not trained on.
        """
        step = self.steps[-1] * other.cost["step_seconds"] / self.cost["step_seconds"]
        if step > self.steps[-1] or step < self.steps[0]:
            return None
        return np.array([np.interp(step, self.steps, scores) for scores in self.scores])


def write_report(path: Path, experiment: Experiment, out: Path, measured: dict[str, Any]) -> None:
    """Writes `README.md`, `report.json` and the PNGs from the results that are there.

    Args:
        path: the experiment's file.
        experiment: what it says.
        out: with results in `runs/` and grids in `grids/`.
        measured: from `fid.experiment.measure`.
    """
    planned = plan_runs(experiment, experiment.seeds)
    configs = {run.name: run_config(path, experiment, run, out) for run in planned}
    results = {run.name: read_result(result_path(out, run), configs[run.name]) for run in planned}
    found = [(run, result) for run in planned if (result := results[run.name]) is not None]
    if not found:
        raise ValueError(f"{out / 'runs'}: no results yet")
    score_name = next(name for name in found[0][1]["scores"][0] if name not in ("step", ACCURACY))
    families = {
        family: [
            _row(
                name,
                [(run, result) for run, result in found if (run.family, run.row) == (family, name)],
                score_name,
                cost,
            )
            for name, cost in measured["costs"][family].items()
        ]
        for family in experiment.families
    }
    families = {family: rows for family, rows in families.items() if any(row.seeds for row in rows)}
    lines = [
        f"# {path.stem}: what each attention buys",
        "",
        f"Made by `python -m fid compare-runs {path} --out {out}`; {len(found)} of {len(planned)} runs are in it.",
        f"The score is {score_name} of EMA weights; lower is better.",
        "",
        "Rows of one seed share data order, noise, timesteps and label drops, and are sampled from the same noise; "
        "`+-` is the standard deviation over seeds. A difference is the mean over seeds of row minus control, with its "
        "95% interval (Student's t, paired by seed); one such interval in twenty misses by chance.",
        "",
    ]
    for family, rows in families.items():
        config = next(configs[run.name] for run, _ in found if run.family == family)
        lines += [
            f"## {family}",
            "",
            _protocol(config, measured["floors"][family]),
            "",
            *_table(rows, experiment.controls, score_name),
            "",
        ]
        lines += [*_verdicts(rows, experiment.controls, score_name), ""]
    lines += [
        "## Cost",
        "",
        f"Multiply-adds of one image, and forward and backward of a batch in turns on {measured['machine']}. The last "
        "column lies on a straight line between scored steps, and a run planned shorter would have lowered its "
        "learning rate sooner: where scores still fall fast it is an upper bound.",
    ]
    for family, rows in families.items():
        lines += ["", *_cost_table(family, rows, experiment.controls[0], score_name)]
    draw_curves(families, score_name, measured["floors"], out)
    draw_grids({family: [row.name for row in rows] for family, rows in families.items()}, planned, out)
    lines += ["", "![Score against steps](scores.png)", "", "![Training loss](losses.png)", ""]
    lines += ["Samples of the first seed, one digit a row, from the same noise for all:", "", "![Samples](samples.png)"]
    write_text(out / "README.md", "\n".join(lines) + "\n")
    write_json(out / "report.json", {family: [_as_json(row) for row in rows] for family, rows in families.items()})


def _row(name: str, found: list[tuple[PlannedRun, dict[str, Any]]], score_name: str, cost: dict[str, float]) -> Row:
    results = [result for _, result in found]
    return Row(
        name=name,
        seeds=[run.seed for run, _ in found],
        steps=[int(row["step"]) for row in results[0]["scores"]] if results else [],
        scores=np.array([[row[score_name] for row in result["scores"]] for result in results]),
        losses=[result["losses"] for result in results],
        accuracies=np.array([result["scores"][-1].get(ACCURACY, np.nan) for result in results]),
        cost=cost,
    )


def _protocol(config: RunConfig, floor: float | None) -> str:
    train, data = config.train, ", ".join(f"{key} {value}" for key, value in config.data.model_dump().items())
    assert config.score is not None
    return (
        f"{config.model.variant} ({data}): {train.max_steps} steps of {train.global_batch_size} images, learning rate "
        f"{train.learning_rate:g} ({train.schedule}, {train.warmup_steps} steps of warm-up), EMA {train.ema_decay:g}, "
        f"{train.precision}; {config.score.num_images} images a score, {describe_sampler(config.sampler)}, guidance "
        f"{config.guidance.scale:g}, labels {config.label_mode}."
        + ("" if floor is None else f" Two halves of the real images are {floor:.2f} apart: the floor of the score.")
    )


def compared(row: Row, control: Row, values: Callable[[Row], NDArray[np.float64]]) -> Difference | None:
    """Row minus control over the seeds that both have; None where there are none."""
    seeds = [seed for seed in row.seeds if seed in control.seeds]
    if not seeds:
        return None
    mine, theirs = (values(one)[[one.seeds.index(seed) for seed in seeds]] for one in (row, control))
    return paired_difference(mine, theirs)


def _table(rows: list[Row], controls: Sequence[str], score_name: str) -> list[str]:
    by_name = {row.name: row for row in rows}
    heads = ["attention", "seeds", "loss", score_name, *(f"minus {control}" for control in controls), "labels followed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        if not row.seeds:
            continue
        cells = [row.name, str(len(row.seeds)), _spread(row.final_losses, 3), _spread(row.final, 1)]
        for control in controls:
            found = None if row.name == control else compared(row, by_name[control], lambda one: one.final)
            cells.append("" if found is None else _difference(found))
        cells.append("" if np.isnan(row.accuracies).any() else f"{row.accuracies.mean():.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _verdicts(rows: list[Row], controls: Sequence[str], score_name: str) -> list[str]:
    """What the table shows, in a line for each control."""
    by_name = {row.name: row for row in rows}
    lines = []
    for control in controls:
        told: dict[str, list[str]] = {"lower": [], "higher": [], "no difference shown": []}
        for row in rows:
            found = None if row.name == control else compared(row, by_name[control], lambda one: one.final)
            if found is not None:
                told[("lower" if found.value < 0 else "higher") if found.is_shown else "no difference shown"].append(
                    row.name
                )
        parts = [f"{verdict}: {'; '.join(names)}" for verdict, names in told.items() if names]
        lines.append(f"- {score_name} against **{control}**: {'. '.join(parts)}.")
    return lines


def _cost_table(family: str, rows: list[Row], control: str, score_name: str) -> list[str]:
    (base,) = [row for row in rows if row.name == control]
    heads = [family, "parameters", "multiply-adds", "time of a step", f"{score_name} in the time of {control}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        ratio = row.cost["step_seconds"] / base.cost["step_seconds"]
        at_time = row.at_time_of(base) if row.seeds else None
        cells = [
            row.name,
            f"{int(row.cost['parameters']):,}",
            f"{row.cost['multiply_adds'] / 1e6:.1f} M",
            f"{ratio:.2f}",
            "" if at_time is None else _spread(at_time, 1),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: NDArray[np.float64], digits: int) -> str:
    spread = f" +- {values.std(ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{spread}"


def _difference(found: Difference) -> str:
    if found.half_width is None:
        return f"{found.value:+.1f}"
    text = f"{found.value:+.1f} [{found.value - found.half_width:+.1f}, {found.value + found.half_width:+.1f}]"
    return f"**{text}**" if found.is_shown else text


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "seeds": row.seeds,
        "steps": row.steps,
        "scores": row.scores.tolist(),
        "final_losses": row.final_losses.tolist(),
        "cost": row.cost,
    }
