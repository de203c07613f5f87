"""The forward pass of a whole transformer, against the official code's."""

import argparse
import functools
from collections.abc import Callable

import torch

from vcagen.benchmark.attention import precision
from vcagen.benchmark.cost import cost_of
from vcagen.benchmark.measure import Work, clock_of, machine, measure, report_rows
from vcagen.benchmark.official import official_model
from vcagen.devices import Dtype, usable_device
from vcagen.files import require_file_name
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant

ATTENTIONS = ("mhsa", "vca")


def build_transformer(variant: str, attention: str, depth: int | None = None) -> DiffusionTransformer:
    """A fresh transformer on 32x32 latents; `depth` blocks where that is given."""
    named = parse_variant(variant)
    shape = named.shape._replace(depth=depth or named.shape.depth)
    return DiffusionTransformer(patch_size=named.patch_size, attention={"name": attention}, **shape._asdict())


def noisy_transformer(
    variant: str, attention: str, device: torch.device, depth: int | None = None
) -> DiffusionTransformer:
    """The same in eval mode, with noise in the weights that start at 0, so that there is something to compute."""
    torch.manual_seed(0)
    model = build_transformer(variant, attention, depth).eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(device)


def random_inputs(batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, times within [0, 1] and labels."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(batch, 4, 32, 32, generator=generator)
    labels = torch.randint(1000, (batch,), generator=generator)
    return latents.to(device), torch.rand(batch, generator=generator).to(device), labels.to(device)


@functools.cache
def forward_flops(variant: str, attention: str, depth: int | None = None) -> int:
    """Floating-point operations of one forward pass of one image."""

    def inputs() -> tuple[torch.Tensor, ...]:
        return torch.zeros(1, 4, 32, 32), torch.zeros(1), torch.zeros(1, dtype=torch.long)

    return 2 * cost_of(lambda: build_transformer(variant, attention, depth), inputs).multiply_adds


def benchmark_model(arguments: argparse.Namespace) -> None:
    """Measures, prints a table and writes JSON if asked. See `python -m vcagen.benchmark model --help`."""
    if arguments.json:
        require_file_name(arguments.json)
    device = usable_device(arguments.device)
    inputs = random_inputs(arguments.batch, device)
    works: dict[str, Work] = {}
    result: dict[str, object] = {"machine": machine(device), "clock": clock_of(device)[1], "batch": arguments.batch}

    def forward(model: Callable[..., torch.Tensor], dtype: Dtype) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with torch.no_grad(), precision(dtype, device):
                return model(*inputs)

        return run

    if arguments.official:
        flops = arguments.batch * forward_flops(arguments.variant, "mhsa")
        ours = noisy_transformer(arguments.variant, "mhsa", device)
        official = official_model(arguments.official, arguments.variant, ours.state_dict(), device)
        works |= {f"official, {dtype}": Work(forward(official, dtype), flops, dtype) for dtype in arguments.dtype}
        theirs = forward(official, "fp32")()
        difference = (forward(ours, "fp32")()[:, : theirs.shape[1]] - theirs).abs().max() / theirs.abs().max()
        result["largest difference from official, fp32, of the largest value"] = f"{difference.item():.1e}"
    for attention in ATTENTIONS:
        flops = arguments.batch * forward_flops(arguments.variant, attention)
        model = noisy_transformer(arguments.variant, attention, device)
        works |= {f"{attention}, {dtype}": Work(forward(model, dtype), flops, dtype) for dtype in arguments.dtype}
        if arguments.compile:
            compiled = noisy_transformer(arguments.variant, attention, device)
            compiled.compile_blocks()
            works |= {
                f"{attention}, {dtype}, compiled": Work(forward(compiled, dtype), flops, dtype)
                for dtype in arguments.dtype
            }
    title = f"{arguments.variant}, forward"
    report_rows(result, {title: measure(works, arguments.rounds, device, title)}, arguments.json)
