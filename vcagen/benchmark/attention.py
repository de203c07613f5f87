"""Time and memory of every attention against the number of tokens."""

import argparse
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vcagen.attention import AttentionConfig, DifferentialConfig, MHSAConfig, VCAConfig, build_attention
from vcagen.benchmark.cost import STEP_OVER_FORWARD, cost_of
from vcagen.benchmark.measure import Row, Work, clock_of, machine, measure, report_rows
from vcagen.devices import DTYPES, Dtype, usable_device
from vcagen.files import require_file_name, written_aside
from vcagen.models.transformer import COMPILE_OPTIONS

# The first is what the others are compared with.
ATTENTIONS: dict[str, AttentionConfig] = {
    "mhsa": MHSAConfig(),
    "vca": VCAConfig(),
    "vca separate": VCAConfig(stage2_softmax="separate"),
    "differential": DifferentialConfig(),
}
TOKENS = 2048  # of a batch, which has fewer images where an image has more tokens


def benchmark_attention(arguments: argparse.Namespace) -> None:
    """Measures, prints a table for each grid and dtype, and writes JSON and a picture if asked."""
    for path in (arguments.json, arguments.png):
        if path:
            require_file_name(path)
    device = usable_device(arguments.device)
    tables = {}
    for side in arguments.grid:
        for dtype in arguments.dtype:
            for passes in ("forward", "forward + backward"):
                title = f"N={side * side}, {dtype}, {passes}"
                if arguments.compile:  # all modules share their code, of which few compiled forms are kept
                    torch.compiler.reset()
                works = attention_works(
                    side, dtype, passes, arguments.hidden_size, arguments.num_heads, device, compiled=arguments.compile
                )
                tables[title] = measure(works, arguments.rounds, device, title)
    result = {
        "machine": machine(device),
        "clock": clock_of(device)[1],
        "width": arguments.hidden_size,
        "heads": arguments.num_heads,
        "tokens in a batch": f"{TOKENS}, or one image's if it has more",
        "contrast tokens": "half the grid a side, at most 8x8",
    }
    report_rows(result, tables, arguments.json)
    if arguments.png:
        _plot(arguments.grid, arguments.dtype[0], tables, arguments.png)


def attention_works(
    side: int,
    dtype: Dtype,
    passes: str,
    width: int,
    heads: int,
    device: torch.device,
    names: Iterable[str] = tuple(ATTENTIONS),
    compiled: bool = False,
) -> dict[str, Work]:
    """Attention modules of `ATTENTIONS` on one random batch (`batch_of(side)`, N, width), N = side x side.

    Args:
        side: of the token grid.
        dtype: what they are computed in.
        passes: `forward`, or `forward + backward`.
        width: channels of a token.
        heads: of the attention.
        device: where all of it lies.
        names: keys of `ATTENTIONS`; the first is what the others are compared with.
        compiled: whether each comes compiled too, as `NAME, compiled`.
    """
    grid, batch = (side, side), batch_of(side)
    x = torch.randn(batch, side * side, width, device=device)
    upstream = torch.randn_like(x)
    works = {}
    for name in names:

        def build(config: AttentionConfig = ATTENTIONS[name]) -> nn.Module:
            return build_attention(config, width, heads, grid, 5)

        forward_flops = 2 * batch * cost_of(build, lambda: (torch.zeros(1, side * side, width),)).multiply_adds
        module = build().to(device)
        forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {name: module}
        if compiled:
            forms[f"{name}, compiled"] = torch.compile(module, dynamic=False, options=COMPILE_OPTIONS)
        for form, function in forms.items():
            run, flops = _forward(function, x, dtype), forward_flops
            if passes != "forward":
                run, flops = _both_passes(function, module, x, upstream, dtype), STEP_OVER_FORWARD * forward_flops
            works[form] = Work(run, flops, dtype)
    return works


def batch_of(side: int) -> int:
    """Images in a batch of a grid's side."""
    return max(1, TOKENS // side**2)


def precision(dtype: Dtype, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to a dtype, which is nothing for fp32."""
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32")


def _forward(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, dtype: Dtype) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad(), precision(dtype, x.device):
            function(x)

    return run


def _both_passes(
    function: Callable[[torch.Tensor], torch.Tensor],
    module: nn.Module,
    x: torch.Tensor,
    upstream: torch.Tensor,
    dtype: Dtype,
) -> Callable[[], object]:
    inputs = [x.detach().requires_grad_(), *module.parameters()]

    def run() -> None:
        with precision(dtype, x.device):
            out = function(inputs[0])
        torch.autograd.grad(out, inputs, upstream.to(out.dtype))

    return run


def _plot(sides: list[int], dtype: Dtype, tables: dict[str, list[Row]], out: Path) -> None:
    """Time and memory of forward and backward pass for one image against N, on logarithmic axes, into one PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    quantities = {"ms per image": lambda row: 1000 * row.seconds, "MB per image": lambda row: row.peak_bytes / 1e6}
    for axes, (label, value) in zip(figure.subplots(1, 2), quantities.items(), strict=True):
        curves: dict[str, list[float]] = {}
        for side in sides:
            for row in tables[f"N={side * side}, {dtype}, forward + backward"]:
                curves.setdefault(row.name, []).append(value(row) / batch_of(side))
        for name, values in curves.items():
            axes.plot([side * side for side in sides], values, marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=label)
        axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.suptitle(f"attention, forward and backward, {dtype}")
    with written_aside(out) as aside:
        figure.savefig(aside)
