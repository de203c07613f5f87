"""Real parts of a training run, watched or made simpler, for one process and for the processes of torchrun."""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from vcagen import run, training, training_samples, updates
from vcagen.config import RunConfig, TrainConfig
from vcagen.data import Digits
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import ObjectiveOutput
from vcagen.objectives.output import mean_per_sample
from vcagen.seeds import normal, uniform


def few_digits(number: int, can_mirror: bool = False) -> Digits:
    data = Digits()
    data.images, data.labels = data.images[:number], data.labels[:number]
    data.can_mirror = can_mirror
    return data


class DoubleFlow:
    """SiT's objective in float64."""

    def loss(
        self, model: Any, latents: torch.Tensor, labels: torch.Tensor, generators: list[torch.Generator]
    ) -> ObjectiveOutput:
        times = uniform(generators, latents.device).double()
        noise, latents = normal(latents, generators).double(), latents.double()
        t = times.reshape(-1, 1, 1, 1)
        output = model(t * latents + (1 - t) * noise, times, labels)[:, : latents.shape[1]]
        return ObjectiveOutput(mean_per_sample((output - (latents - noise)) ** 2))


@contextlib.contextmanager
def double_precision(num_samples: int) -> Iterator[list[float]]:
    """Runs train a float64 model on few digits with plain SGD; yields the list of norms, one a clip."""
    build = run.build_model
    norms: list[float] = []

    def build_model(*arguments: Any) -> DiffusionTransformer:
        return build(*arguments).double()

    def build_optimizer(model: DiffusionTransformer, config: TrainConfig) -> torch.optim.SGD:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate)

    with pytest.MonkeyPatch.context() as patch:
        clip = run.Accelerator.clip_grad_norm_

        def counted(self: Any, *arguments: Any) -> torch.Tensor:
            norms.append(float(clip(self, *arguments)))
            return torch.tensor(norms[-1])

        patch.setattr(run, "build_model", build_model)
        patch.setattr(run, "build_optimizer", build_optimizer)
        patch.setattr(run, "build_objective", lambda *_: DoubleFlow())
        patch.setattr(run, "build_data", lambda _: few_digits(num_samples))
        patch.setattr(run.Accelerator, "clip_grad_norm_", counted)
        yield norms


class Watched:
    """What the samples of each step were given: times, noised latents, dropped labels, mirrors."""

    def __init__(self, patch: pytest.MonkeyPatch, can_mirror: bool = True) -> None:
        self.times: list[list[float]] = []
        self.inputs: list[list[float]] = []
        self.drops: list[list[bool]] = []
        self.mirrors: list[bool] = []
        build, draw = run.build_objective, training_samples.draw_mirror

        def build_objective(*arguments: Any) -> Any:
            objective = build(*arguments)
            loss = objective.loss

            def watched(model: Any, latents: torch.Tensor, labels: torch.Tensor, generators: Any) -> ObjectiveOutput:
                def watched_model(x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                    self.times.append(t.tolist())
                    self.inputs.append(x.double().flatten(1).sum(1).tolist())
                    self.drops.append((y == 10).tolist())
                    return model(x, t, y)

                return loss(watched_model, latents, labels, generators)

            objective.loss = watched
            return objective

        def draw_mirror(generator: torch.Generator) -> bool:
            self.mirrors.append(draw(generator))
            return self.mirrors[-1]

        patch.setattr(run, "build_objective", build_objective)
        patch.setattr(run, "build_data", lambda _: few_digits(64, can_mirror))
        for module in (training_samples, updates):
            patch.setattr(module, "draw_mirror", draw_mirror)


def sample_ids(config: RunConfig, first_step: int) -> list[list[int]]:
    """The samples that this process loads in each micro-batch from `first_step` on, of 64, through the real loader."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "build_data", lambda _: few_digits(64))
        ready, _ = run.prepare_run(config, stack)
        return [batch[2].tolist() for batch in training.micro_batches(ready, first_step)]


def at_losses(patch: pytest.MonkeyPatch, updates: Container[int], act: Callable[[ObjectiveOutput], None]) -> None:
    """Has `act` meet the losses of some updates, counted from 1, before they are used."""
    build = run.build_objective
    update = 0

    def build_objective(*arguments: Any) -> Any:
        objective = build(*arguments)
        loss = objective.loss

        def met(*arguments: Any) -> ObjectiveOutput:
            nonlocal update
            update += 1
            output = loss(*arguments)
            if update in updates:
                act(output)
            return output

        objective.loss = met
        return objective

    patch.setattr(run, "build_objective", build_objective)


def spoil(output: ObjectiveOutput) -> None:
    """The third loss is NaN, and so is its gradient."""
    output.loss.data[2] = float("nan")
    output.loss.register_hook(lambda gradient: gradient * float("nan"))


def raising(error: Exception) -> Callable[[ObjectiveOutput], None]:
    def act(_: ObjectiveOutput) -> None:
        raise error

    return act


@contextlib.contextmanager
def precision_of_its_own() -> Iterator[None]:
    """Accelerate keeps one precision per process: forgets it before the block and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@contextlib.contextmanager
def fp16_on_the_cpu(**scaler: Any) -> Iterator[None]:
    """Runs train in fp16 with torch's loss scaler, which Accelerate itself offers on a GPU only."""

    def build_accelerator(_: RunConfig) -> Accelerator:
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", **scaler)
        return accelerator

    with precision_of_its_own(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_build_accelerator", build_accelerator)
        yield


@contextlib.contextmanager
def sharded_on_the_cpu(**settings: Any) -> Iterator[None]:
    """Runs train under FSDP2, which torch offers on the CPU too, but Accelerate asks for on a GPU only."""
    build = run._build_accelerator

    def build_accelerator(config: RunConfig) -> Accelerator:
        accelerator = build(config)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            **({"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"} | settings)
        )
        run._require_known_sharding(accelerator)
        return accelerator

    AcceleratorState._reset_state()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "_build_accelerator", build_accelerator)
            yield
    finally:
        AcceleratorState._reset_state()
