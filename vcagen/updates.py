"""Optimiser steps, one after the other, without a GPU ever waiting for the host to look at a number."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from vcagen.bad_steps import BadSteps
from vcagen.data import LatentCache
from vcagen.devices import read_later, to_device
from vcagen.guidance import drop_labels
from vcagen.metrics import LossWindow
from vcagen.optimizer import learning_rate
from vcagen.run import Run
from vcagen.sharding import is_sharded, whole
from vcagen.training_samples import draw_mirror, training_generator

# Items, labels, sample indices, steps and positions of a micro-batch.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Update:
    """An update that the device has been asked for.

    Attributes:
        losses: and parts, (B,) each, of its micro-batches.
        bad_samples: (B,), those whose loss was not finite, -1 for the others.
        is_finite: reads whether it was made; one that was not finite is skipped.
    """

    step: int
    losses: list[dict[str, torch.Tensor]]
    bad_samples: torch.Tensor
    gradient_norm: torch.Tensor
    is_finite: Callable[[], torch.Tensor]


class Updates:
    """The updates of a run: gradient, optimiser, moving average, and what is noted of each.

    An update whose gradient is not finite is skipped. Where the optimiser can skip by itself, the host reads what came
    of an update only when the passes of the next have been asked for, and then averages the weights it left; else at
    once. `settle` reads it now, and must be called before weights, averages or the window are looked at.
    """

    def __init__(self, run: Run, window: LossWindow, bad_steps: BadSteps) -> None:
        self.run, self.window, self.bad_steps = run, window, bad_steps
        self.reads_late = _skips_by_itself(run)
        self._open: _Update | None = None

    def update(self, step: int, batches: Iterator[Batch]) -> None:
        """Takes the micro-batches of a step, counted from 1, and makes its update.

        Raises:
            NotFiniteError: too many updates in a row, up to the one that was read last, were not finite.
        """
        run, accelerator = self.run, self.run.accelerator
        started = time.perf_counter()
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(run.config.train, step - 1)
        losses, bad_samples = self._passes(batches)
        clip = run.config.train.gradient_clip or math.inf
        with record_function("optimiser"):
            norm = whole(accelerator.clip_grad_norm_(run.model.parameters(), clip))
        finite = torch.isfinite(norm)  # the same on every process, as the gradients are
        self._settle()
        self._open = _Update(step, losses, bad_samples, norm, read_later(finite))
        with record_function("optimiser"):
            if self.reads_late:
                setattr(run.moments.optimizer, "found_inf", (~finite).float())  # noqa: B010 - torch declares it nowhere
                run.optimizer.step()
            elif finite:
                run.optimizer.step()
            elif accelerator.scaler is not None:
                run.optimizer.zero_grad()
                run.optimizer.step()  # without gradients it only lowers the loss scale
            run.optimizer.zero_grad()
        if not self.reads_late:
            self._settle()
        self.window.seconds += time.perf_counter() - started

    def settle(self) -> None:
        """Reads what came of the last update. Raises as `update`."""
        started = time.perf_counter()
        self._settle()
        self.window.seconds += time.perf_counter() - started

    def _settle(self) -> None:
        made, self._open = self._open, None
        if made is None:
            return
        if made.is_finite():
            with record_function("EMA"):
                self.run.ema.update_parameters(self.run.raw_model)
            with record_function("logging"):
                self.window.add(made.losses, made.gradient_norm)
            self.bad_steps.good()
        else:
            self.window.add_bad_step()
            self.bad_steps.bad(made.step, made.bad_samples)

    def _passes(self, batches: Iterator[Batch]) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """Forward and backward of the micro-batches of a step: their losses, and the samples whose were not finite."""
        run, accelerator = self.run, self.run.accelerator
        parts = run.config.train.gradient_accumulation_steps
        losses: list[dict[str, torch.Tensor]] = []
        bad_samples: list[torch.Tensor] = []
        for remaining in reversed(range(parts)):
            asked = time.perf_counter()
            with record_function("data"):
                items, labels, indices, steps, positions = next(batches)
            self.window.data_seconds += time.perf_counter() - asked
            keys = zip(steps.tolist(), positions.tolist(), strict=True)
            generators = [training_generator(run.config.seed, *key) for key in keys]
            with record_function("data"):
                latents, labels = _inputs(run, items, labels, generators)
            # Gradients are averaged over processes once, with the last micro-batch.
            with record_function("passes"), accelerator.no_sync(run.model) if remaining else contextlib.nullcontext():
                with accelerator.autocast():
                    output = run.objective.loss(run.model, latents, labels, generators)
                accelerator.backward(output.loss.mean() / parts)
            losses.append({"loss": output.loss.detach(), **output.parts})
            indices = to_device(indices, latents.device)
            bad_samples.append(indices.masked_fill(output.loss.detach().isfinite(), -1))
        return losses, torch.cat(bad_samples)


def _skips_by_itself(run: Run) -> bool:
    """Whether the optimiser can be told on the device to skip: torch's fused one, of weights that are whole."""
    is_plain = run.accelerator.scaler is None and not is_sharded(run.raw_model)
    return run.accelerator.device.type == "cuda" and is_plain


def _inputs(
    run: Run, items: torch.Tensor, labels: torch.Tensor, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images uint8 or moments float16 (B, ...) and labels (B,) to latents (B, C, h, w) and labels with some dropped."""
    items, labels = (to_device(each, run.accelerator.device) for each in (items, labels))
    if run.data.can_mirror:
        for generator in generators:
            draw_mirror(generator)  # as when the item was read
    moments = items.float() if isinstance(run.data, LatentCache) else run.autoencoder.encode(items)
    latents = run.autoencoder.sample_latents(moments, generators)
    if run.config.train.label_dropout:
        labels = drop_labels(labels, run.config.train.label_dropout, run.raw_model.null_label, generators)
    return latents, labels
