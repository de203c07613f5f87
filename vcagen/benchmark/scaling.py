"""mhsa and vca against tokens, batch, depth and processes, measured; and the page about it."""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch

from vcagen.benchmark.attention import attention_works, batch_of
from vcagen.benchmark.estimate import STEP_OVER_FORWARD, estimates
from vcagen.benchmark.measure import Work, clock_of, machine, measure
from vcagen.benchmark.model import ATTENTIONS, forward_flops, noisy_transformer, random_inputs
from vcagen.benchmark.processes import measure_processes
from vcagen.benchmark.scaling_page import Point, Scaling, describe, plot
from vcagen.benchmark.training import OurStep
from vcagen.devices import Dtype, usable_device
from vcagen.files import require_file_name, write_json, write_text
from vcagen.models.variants import parse_variant

WIDTH, HEADS = 384, 6  # of the attention modules: S's
DEPTH_BATCH = 4  # images in a step where depth varies


def benchmark_scaling(arguments: argparse.Namespace) -> None:
    """Measures, prints the page, and writes it, a figure and JSON if asked.

    Raises:
        ValueError: a file cannot be written, or the variant or device is not there, before anything is measured;
            training in two processes fails, or is not that in one.
    """
    for path in (arguments.json, arguments.markdown, arguments.png):
        if path:
            require_file_name(path)
    parse_variant(arguments.variant)
    device, rounds, variant = usable_device(arguments.device), arguments.rounds, arguments.variant
    processes = measure_processes(variant, rounds)  # the first, because it can find something wrong
    bf16 = _step_point(variant, "bf16", max(arguments.batches), None, rounds, device)
    result = Scaling(
        setting=_setting(variant, rounds, device),
        tokens=list(_tokens(arguments.grid, rounds, device)),
        batch=[_step_point(variant, "fp32", batch, None, rounds, device) for batch in arguments.batches],
        depth=[_step_point(variant, "fp32", DEPTH_BATCH, depth, rounds, device) for depth in arguments.depths],
        bf16=bf16,
        processes=processes,
        estimate=estimates(bf16.row("vca").ratio),
    )
    text = describe(result, arguments.png, arguments.markdown)
    print(text)
    if arguments.json:
        write_json(arguments.json, asdict(result))
    if arguments.markdown:
        write_text(arguments.markdown, text + "\n")
    if arguments.png:
        plot(result, arguments.png)


def _setting(variant: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """What the numbers depend on, in words."""
    threads = os.environ.get("OMP_NUM_THREADS")
    command = shlex.join(["python", "-m", "vcagen.benchmark", *sys.argv[1:]])
    packages = ("torch", "diffusers", "accelerate")
    return {
        "command": f"OMP_NUM_THREADS={threads} {command}" if threads else command,
        "machine": machine(device),
        "clock": clock_of(device)[1],
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]
        ),
        "attention": f"width {WIDTH}, {HEADS} heads",
        "variant": variant,
        "rounds": rounds,
    }


def _tokens(sides: list[int], rounds: int, device: torch.device) -> Iterator[Point]:
    for side in sides:
        works = attention_works(side, "fp32", "forward + backward", WIDTH, HEADS, device, ATTENTIONS)
        yield Point(side * side, batch_of(side), measure(works, rounds, device, f"N={side * side}"))


def _step_point(variant: str, dtype: Dtype, batch: int, depth: int | None, rounds: int, device: torch.device) -> Point:
    """Whole training steps at a batch, of a model with `depth` blocks where that is given."""
    latents = random_inputs(batch, device)[0]
    works = {}
    for name in ATTENTIONS:
        step = OurStep(noisy_transformer(variant, name, device, depth), variant, dtype, latents)
        works[name] = Work(step.step, STEP_OVER_FORWARD * batch * forward_flops(variant, name, depth), dtype)
    what = f"{dtype} step, batch {batch}" + (f", depth {depth}" if depth else "")
    return Point(depth or batch, batch, measure(works, rounds, device, what))
