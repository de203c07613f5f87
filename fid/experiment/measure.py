"""What an experiment's report needs beside the runs: the cost of each row, and the floor of the score."""

import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from fid.collection import Collection, Wanted
from fid.experiment.plan import Experiment, PlannedRun, digest, plan_runs, run_config
from fid.features import DIGITS, build_extractor
from fid.metrics import halves_distance
from fid.reference import open_reference
from vcagen.autoencoder import build_autoencoder
from vcagen.benchmark.cost import cost_of
from vcagen.benchmark.measure import interleaved, machine
from vcagen.config import RunConfig
from vcagen.data import build_data
from vcagen.files import write_json
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import Objective, build_objective
from vcagen.run import build_model
from vcagen.training_samples import training_generator

ROUNDS = 9


def measured(path: Path, experiment: Experiment, out: Path) -> dict[str, Any]:
    """Costs of all rows and the floor by family, and the machine; measured once and kept in `measured.json`.

    Args:
        path: the experiment's file.
        experiment: what it says.
        out: the report's folder.
    """
    file = out / "measured.json"
    runs = plan_runs(experiment, (0,))  # the seed changes nothing here
    settings = digest([run_config(path, experiment, run, out) for run in runs])
    try:
        known: dict[str, Any] = json.loads(file.read_text())
        if known["settings_sha256"] == settings:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass  # measured again
    costs = {}
    for family in experiment.families:
        ours = [run for run in runs if run.family == family]
        costs[family] = _costs([(run, run_config(path, experiment, run, out)) for run in ours])
    floors = {
        family: _floor(run_config(path, experiment, next(run for run in runs if run.family == family), out))
        for family in experiment.families
    }
    result = {"settings_sha256": settings, "machine": machine(), "floors": floors, "costs": costs}
    write_json(file, result)
    return result


def _costs(runs: list[tuple[PlannedRun, RunConfig]]) -> dict[str, dict[str, float]]:
    """Parameters, multiply-adds of an image and seconds of forward and backward, by row, timed in turns."""
    models: dict[str, DiffusionTransformer] = {}
    works: dict[str, Callable[[], None]] = {}
    for run, config in runs:
        data = build_data(config.data)
        autoencoder = build_autoencoder(config.autoencoder, config.decoding)
        model = build_model(config, data, autoencoder)
        objective = build_objective(config.objective)
        batch = config.train.global_batch_size
        latents = torch.randn(batch, model.config.in_channels, *model.config.latent_size)
        labels = torch.zeros(batch, dtype=torch.long)
        generators = [training_generator(0, 1, position) for position in range(batch)]
        models[run.row] = model
        works[run.row] = partial(_step, model, objective, latents, labels, generators)
    times = interleaved(works, ROUNDS, "cost of a step")
    return {
        row: {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "multiply_adds": _multiply_adds(model),
            "step_seconds": statistics.median(times[row]),
        }
        for row, model in models.items()
    }


def _step(
    model: DiffusionTransformer,
    objective: Objective,
    latents: torch.Tensor,
    labels: torch.Tensor,
    generators: list[torch.Generator],
) -> None:
    objective.loss(model, latents, labels, generators).loss.mean().backward()
    model.zero_grad()


def _multiply_adds(model: DiffusionTransformer) -> int:
    """Of one image's forward pass, counted operator by operator."""

    def inputs() -> tuple[torch.Tensor, ...]:
        image = torch.zeros(1, model.config.in_channels, *model.config.latent_size)
        return image, torch.zeros(1), torch.zeros(1, dtype=torch.long)

    return cost_of(lambda: DiffusionTransformer(**model.config), inputs).multiply_adds


def _floor(config: RunConfig) -> float | None:
    """Distance between two halves of the reference, where it holds images or says so."""
    assert config.score is not None
    reference = open_reference(config.score.reference, build_data(config.data).image_shape[1])
    if reference.images is None or reference.pooled is not None:
        return reference.halves_distance
    extractor = build_extractor(reference.extractor or DIGITS, config.score.extractor_weights)
    with tempfile.TemporaryDirectory() as folder:
        collection = Collection(reference.images, extractor, Wanted(), Path(folder), "reference images")
        collection.prepare()
        collection.run(64, PartialState())
        return halves_distance(collection.result().part)
