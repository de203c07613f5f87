"""What an experiment is: one base run, families and rows of overrides, seeds; and where each run's result lies."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from vcagen.config import RunConfig, load_config


class Experiment(BaseModel, extra="forbid", frozen=True):
    """What an experiment's file says.

    Attributes:
        base: the run, a config file beside this one.
        seeds: each row is trained with every one.
        overrides: `key=value` for all runs.
        families: more overrides, by the name of a group; rows are compared within it.
        rows: more overrides, by the name of a row.
        controls: rows that the others are compared with.
        only: rows of a family that has not all of them.
    """

    base: str
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    overrides: tuple[str, ...] = ()
    families: Annotated[dict[str, tuple[str, ...]], Field(min_length=1)]
    rows: Annotated[dict[str, tuple[str, ...]], Field(min_length=2)]
    controls: Annotated[tuple[str, ...], Field(min_length=1)]
    only: dict[str, tuple[str, ...]] = {}

    def rows_of(self, family: str) -> list[str]:
        """Names of a family's rows, in the file's order."""
        return [row for row in self.rows if row in self.only.get(family, self.rows)]


@dataclass(frozen=True)
class PlannedRun:
    """One training of an experiment.

    Attributes:
        family: of the run.
        row: of the run.
        seed: of weights, data order, noise, times and label drops.
        name: of its files.
        overrides: beside the base's own settings.
    """

    family: str
    row: str
    seed: int
    name: str
    overrides: tuple[str, ...]


def read_experiment(path: Path) -> Experiment:
    """Reads and checks an experiment's file.

    Raises:
        ValueError: it cannot be read, or names rows and families that it has not; every run's settings are checked.
    """
    try:
        experiment = Experiment(**yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not an experiment ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {place}: {first['msg']}") from error
    for control in experiment.controls:
        if control not in experiment.rows:
            raise ValueError(f"{path}: controls names {control!r}, which is no row")
    for family, rows in experiment.only.items():
        if family not in experiment.families:
            raise ValueError(f"{path}: only.{family} is no family; there are {', '.join(experiment.families)}")
        unknown = [row for row in rows if row not in experiment.rows]
        if unknown:
            raise ValueError(f"{path}: only.{family} names {unknown[0]!r}, which is no row")
        lost = [control for control in experiment.controls if control not in rows]
        if lost:
            raise ValueError(f"{path}: only.{family} leaves out the control {lost[0]!r}")
    if len(set(experiment.seeds)) < len(experiment.seeds):
        raise ValueError(f"{path}: seeds: {', '.join(map(str, experiment.seeds))} has one twice")
    planned = plan_runs(experiment, experiment.seeds[:1])
    names = [run.name for run in planned]
    for run in planned:
        if names.count(run.name) > 1:
            raise ValueError(f"{path}: row {run.row!r} of {run.family} would be called {run.name!r}, as another one")
    for run in planned:
        config = run_config(path, experiment, run, Path("unused"))
        if config.score is None:
            raise ValueError(f"{path}: no score; add overrides score.reference=... and score.every=...")
    return experiment


def plan_runs(experiment: Experiment, seeds: tuple[int, ...]) -> list[PlannedRun]:
    """All runs, seed by seed, so that a stopped experiment has whole seeds."""
    return [
        PlannedRun(
            family=family,
            row=row,
            seed=seed,
            name=f"{_slug(family)}-{_slug(row)}-{seed}",
            overrides=(*experiment.overrides, *overrides, *experiment.rows[row], f"seed={seed}"),
        )
        for seed in seeds
        for family, overrides in experiment.families.items()
        for row in experiment.rows_of(family)
    ]


def run_config(path: Path, experiment: Experiment, run: PlannedRun, runs: Path) -> RunConfig:
    """The config of a run, which lies in a folder below `runs` that no run of other settings has.

    Raises:
        ValueError: its settings are wrong; the run is named.
    """
    try:
        config = load_config(path.parent / experiment.base, [*run.overrides, "run_dir=unused"])
    except ValueError as error:
        raise ValueError(f"{path}: {run.family}, {run.row}: {error}") from error
    return config.model_copy(update={"run_dir": str(runs / f"{run.name}-{digest([config])[:8]}")})


def digest(configs: list[RunConfig]) -> str:
    """A hash of settings, of all that are not as they are by default."""
    settings = [config.model_dump(mode="json", exclude={"run_dir"}, exclude_defaults=True) for config in configs]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def result_path(out: Path, run: PlannedRun) -> Path:
    """Where a run's result is kept."""
    return out / "runs" / f"{run.name}.json"


def read_result(path: Path, config: RunConfig) -> dict[str, Any] | None:
    """The result of a finished run, or None.

    Raises:
        ValueError: it is of other settings.
    """
    if not path.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        # Through the model, so that a setting which did not exist then has its default now.
        before = RunConfig(**result["config"])
        assert result["scores"]
        assert result["losses"]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path}: not a run's result; delete it, and the run is scored or trained again") from error
    if before.model_copy(update={"run_dir": config.run_dir}) != config:
        raise ValueError(f"{path}: the result of other settings; choose another --out, or delete it to train again")
    return result


def _slug(text: str) -> str:
    return re.sub(r"[^\w.]+", "-", text.lower()).strip("-")
