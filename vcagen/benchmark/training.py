"""A training step against the official code's, and where its time goes."""

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from vcagen.benchmark.attention import precision
from vcagen.benchmark.cost import STEP_OVER_FORWARD
from vcagen.benchmark.measure import Work, clock_of, machine, measure, report_rows
from vcagen.benchmark.model import ATTENTIONS, forward_flops, noisy_transformer
from vcagen.benchmark.official import import_official, official_model
from vcagen.benchmark.step_parts import shares_of_a_step
from vcagen.config import TrainConfig
from vcagen.devices import Dtype, usable_device
from vcagen.ema import ExponentialMovingAverage
from vcagen.files import require_file_name
from vcagen.guidance import drop_labels
from vcagen.models.transformer import DiffusionTransformer
from vcagen.objectives import DiffusionConfig, FlowConfig, build_objective
from vcagen.optimizer import build_optimizer
from vcagen.training_samples import training_generator


class OurStep:
    """One update as `vcagen.updates` makes it, on latents that are there already."""

    def __init__(self, model: DiffusionTransformer, variant: str, dtype: Dtype, latents: torch.Tensor) -> None:
        config = TrainConfig()
        self.model, self.dtype, self.latents = model.train(), dtype, latents
        self.labels = torch.arange(len(latents), device=latents.device)
        self.objective = build_objective(
            DiffusionConfig() if variant.startswith("DiT") else FlowConfig(), latents.device
        )
        self.optimizer = build_optimizer(model, config)
        self.ema = ExponentialMovingAverage(model, config.ema_decay)
        self.number = 0

    def step(self) -> None:
        """Does it."""
        self.number += 1
        generators = [training_generator(0, self.number, row) for row in range(len(self.latents))]
        labels = drop_labels(self.labels, 0.1, self.model.null_label, generators)
        with precision(self.dtype, self.latents.device):
            loss = self.objective.loss(self.model, self.latents, labels, generators).loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)


def _official_step(
    checkout: Path, variant: str, weights: dict[str, torch.Tensor], latents: torch.Tensor
) -> Callable[[], None]:
    """One update by the official model, loss, optimiser settings and a loop over the averaged weights."""
    model = official_model(checkout, variant, weights, latents.device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    labels = torch.arange(len(latents), device=latents.device)
    if variant.startswith("DiT"):
        diffusion = import_official(checkout, "diffusion").create_diffusion(timestep_respacing="")

        def losses() -> Any:
            timesteps = torch.randint(diffusion.num_timesteps, (len(latents),), device=latents.device)
            return diffusion.training_losses(model, latents, timesteps, {"y": labels})
    else:
        transport = import_official(checkout, "transport").create_transport()

        def losses() -> Any:
            return transport.training_losses(model, latents, {"y": labels})

    pairs = list(zip(average.parameters(), model.parameters(), strict=True))

    def step() -> None:
        optimizer.zero_grad()
        losses()["loss"].mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in pairs:
                mean.mul_(0.9999).add_(parameter, alpha=1 - 0.9999)

    return step


def benchmark_training(arguments: argparse.Namespace) -> None:
    """Measures, prints a table and writes JSON if asked. See `python -m vcagen.benchmark train --help`."""
    if arguments.json:
        require_file_name(arguments.json)
    device, variant, batch = usable_device(arguments.device), arguments.variant, arguments.batch
    latents = torch.randn(batch, 4, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    works: dict[str, Work] = {}
    if arguments.official:
        weights = noisy_transformer(variant, "mhsa", device).state_dict()
        flops = STEP_OVER_FORWARD * batch * forward_flops(variant, "mhsa")
        works["official, fp32"] = Work(_official_step(arguments.official, variant, weights, latents), flops, "fp32")
    works |= {name: Work(step.step, flops, step.dtype) for name, step, flops in _our_steps(arguments, latents)}
    title = f"{variant}, training step"
    rows = measure(works, arguments.rounds, device, title)
    result: dict[str, Any] = {"machine": machine(device), "clock": clock_of(device)[1], "batch": batch}
    if device == usable_device(None):  # where a run would be
        result |= shares_of_a_step(variant, batch, arguments.dtype[0], arguments.rounds)
    report_rows(result, {title: rows}, arguments.json)


def _our_steps(arguments: argparse.Namespace, latents: torch.Tensor) -> Iterator[tuple[str, OurStep, int]]:
    """Name, step and floating-point operations of every form that is measured."""
    variant = arguments.variant

    def form(attention: str, dtype: Dtype) -> OurStep:
        return OurStep(noisy_transformer(variant, attention, latents.device), variant, dtype, latents)

    for attention in ATTENTIONS:
        flops = STEP_OVER_FORWARD * len(latents) * forward_flops(variant, attention)
        for dtype in arguments.dtype:
            yield f"{attention}, {dtype}", form(attention, dtype), flops
            if arguments.compile:
                compiled = form(attention, dtype)
                compiled.model.compile_blocks()
                yield f"{attention}, {dtype}, compiled", compiled, flops
        checkpointed = form(attention, arguments.dtype[0])
        checkpointed.model.enable_gradient_checkpointing()
        yield f"{attention}, {arguments.dtype[0]}, gradient checkpointing", checkpointed, flops
