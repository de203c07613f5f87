"""Guided sampling, in images per second, against the official code's."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vcagen.autoencoder import IdentityAutoencoder
from vcagen.benchmark.measure import Work, clock_of, machine, measure, report_rows
from vcagen.benchmark.model import ATTENTIONS, forward_flops, noisy_transformer
from vcagen.benchmark.official import import_official, official_model
from vcagen.devices import Dtype, usable_device
from vcagen.files import require_file_name
from vcagen.generation import ImageMaker
from vcagen.guidance import GuidanceConfig
from vcagen.objectives import FlowConfig
from vcagen.samplers import EulerMaruyamaConfig
from vcagen.sampling_config import SamplingConfig
from vcagen.seeds import sample_generator

SCALE = 4.0


def benchmark_sampling(arguments: argparse.Namespace) -> None:
    """Measures, prints a table and writes JSON if asked. See `python -m vcagen.benchmark sample --help`."""
    variant, batch, num_steps = arguments.variant, arguments.batch, arguments.num_steps
    if not variant.startswith("SiT"):
        raise ValueError(f"--variant {variant}: the sampler measured is SiT's; give a SiT")
    if arguments.json:
        require_file_name(arguments.json)
    device = usable_device(arguments.device)
    works: dict[str, Work] = {}
    flops = 2 * batch * (num_steps + 1)  # times those of one image: both halves of guidance, one call a step
    if arguments.official:
        weights = noisy_transformer(variant, "mhsa", device).state_dict()
        run = _official_sampler(arguments.official, variant, weights, batch, num_steps, device)
        works["official, fp32"] = Work(run, 2 * flops * forward_flops(variant, "mhsa"), "fp32")
    result: dict[str, Any] = {
        "machine": machine(device),
        "clock": clock_of(device)[1],
        "batch": batch,
        "sampler": f"euler_maruyama, {num_steps} steps and a last one, guidance {SCALE:g}",
    }
    for attention in ATTENTIONS:
        exact = _our_sampler(variant, attention, "fp32", batch, num_steps, device, compiled=False)()
        for dtype in arguments.dtype:
            for compiled in (False, True) if arguments.compile else (False,):
                run = _our_sampler(variant, attention, dtype, batch, num_steps, device, compiled)
                name = f"{attention}, {dtype}" + (", compiled" if compiled else "")
                works[name] = Work(run, flops * forward_flops(variant, attention), dtype)
                difference = (run() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
                result[f"{name}: difference from fp32, RMS over RMS"] = f"{difference.item():.1e}"
    title = f"{variant}, sampling"
    rows = measure(works, arguments.rounds, device, title)
    for row in rows:
        result[f"images/s: {row.name}"] = batch / row.seconds
        result[f"images/s over {rows[0].name}: {row.name}"] = 1 / row.ratio
    report_rows(result, {title: rows}, arguments.json)


def _our_sampler(
    variant: str, attention: str, dtype: Dtype, batch: int, num_steps: int, device: torch.device, compiled: bool
) -> Callable[[], torch.Tensor]:
    config = SamplingConfig(
        objective=FlowConfig(),
        sampler=EulerMaruyamaConfig(num_steps=num_steps),
        guidance=GuidanceConfig(scale=SCALE),
    )
    model = noisy_transformer(variant, attention, device)
    if dtype == "bf16":
        model.bfloat16()
    if compiled:
        model.compile_blocks()
    maker = ImageMaker(model, config, IdentityAutoencoder())

    def run() -> torch.Tensor:
        return maker.latents(range(batch), [sample_generator(0, "sample", index) for index in range(batch)])

    return run


def _official_sampler(
    checkout: Path,
    variant: str,
    weights: dict[str, torch.Tensor],
    batch: int,
    num_steps: int,
    device: torch.device,
) -> Callable[[], torch.Tensor]:
    """The official SDE sampler as its sample.py sets it up, on a batch and the same batch without labels."""
    transport = import_official(checkout, "transport")
    model = official_model(checkout, variant, weights, device)
    sample = transport.Sampler(transport.create_transport()).sample_sde(
        sampling_method="Euler",
        diffusion_form="sigma",
        diffusion_norm=1.0,
        last_step="Mean",
        last_step_size=0.04,
        num_steps=num_steps + 1,
    )
    labels = torch.cat([torch.arange(batch), torch.full((batch,), 1000)]).to(device)

    @torch.no_grad()
    def run() -> torch.Tensor:
        noise = torch.randn(batch, 4, 32, 32, device=device)
        latents = sample(noise.repeat(2, 1, 1, 1), model.forward_with_cfg, y=labels, cfg_scale=SCALE)[-1]
        return latents[:batch]

    return run
