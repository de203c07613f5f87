"""The page about scaling, and its figure."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcagen.benchmark import estimate
from vcagen.benchmark.estimate import Estimate
from vcagen.benchmark.measure import Row, markdown_table
from vcagen.benchmark.model import ATTENTIONS
from vcagen.benchmark.processes import GLOBAL_BATCH, PROCESSES, STEPS, TOLERANCE, WARM_UP, ProcessesRow
from vcagen.files import written_aside


@dataclass(frozen=True)
class Point:
    """What was measured at one place of a curve.

    Attributes:
        x: the place: tokens N, images in a batch, or blocks.
        images: that were worked on at a time.
        rows: one for each attention.
    """

    x: int
    images: int
    rows: list[Row]

    def row(self, attention: str) -> Row:
        """What was measured of an attention."""
        return next(row for row in self.rows if row.name == attention)

    def milliseconds(self, attention: str) -> float:
        """Median time for one image."""
        return 1000 * self.row(attention).seconds / self.images


@dataclass(frozen=True)
class Scaling:
    """All that is on the page.

    Attributes:
        setting: what the numbers depend on, in words.
        tokens: attention modules, forward and backward, against N.
        batch: training steps in float32 against images in a step.
        depth: training steps in float32 against blocks.
        bf16: training steps in bf16 at the largest batch.
        processes: training in one process and in two.
        estimate: for ImageNet; not measured.
    """

    setting: dict[str, Any]
    tokens: list[Point]
    batch: list[Point]
    depth: list[Point]
    bf16: Point
    processes: list[ProcessesRow]
    estimate: list[Estimate]


def describe(result: Scaling, figure: Path | None, page: Path | None) -> str:
    """The page as Markdown; the figure, if there is one, is linked from where the page is."""
    setting, variant = result.setting, result.setting["variant"]
    parts = [
        "# Time and memory against tokens, batch, depth and processes",
        f"Written by `{setting['command']}`.",
        "\n".join(f"- {key}: {setting[key]}" for key in ("machine", "clock", "versions")),
        f"float32, but where bf16 (autocast) is said. Times are medians over {setting['rounds']} rounds, in each of "
        "which mhsa and vca take turns; `ratio` is the median over the rounds of vca's time over mhsa's in the same "
        "round. MB are what tensors and kernels hold at most beyond what was there before: activations and gradients, "
        "not weights, moments and averaged weights.",
    ]
    if figure:
        parts.append(f"![time and memory](<{os.path.relpath(figure, page.parent if page else Path())}>)")
    step = f"A whole training step of {variant}: passes, AdamW and moving average."
    parts += [
        "## Tokens",
        f"The attention module alone, forward and backward, {setting['attention']}; time and memory of one image.",
        _points_table("N", result.tokens, per_image=True),
        "## Batch",
        f"{step} Time of one image, memory of the whole batch.",
        _points_table("batch", result.batch),
        "## Depth",
        f"{step} Other numbers of blocks, batch {result.depth[0].images}; time of one image, memory of the batch.",
        _points_table("blocks", result.depth),
        "## Processes",
        f"`train.py` with {variant} at a global batch of {GLOBAL_BATCH}, on noise of 32x32 pixels in place of latents: "
        "by one process, and by two that torchrun connects with gloo and that average their gradients; on the CPU, one "
        f"thread each, wall time. The last {STEPS - WARM_UP} of a run's {STEPS} steps are timed. Efficiency is "
        "the speed-up over the number of processes. The last column is the largest relative difference of a step's "
        f"loss or gradient norm between one process and two; more than {TOLERANCE:g} would have been an error, "
        "and there would be no page.",
        _processes_table(result.processes),
        *_estimate_section(result),
    ]
    return "\n\n".join(parts)


def _points_table(what: str, points: list[Point], per_image: bool = False) -> str:
    lines = []
    for point in points:
        first, last = (point.row(name) for name in ATTENTIONS)
        megabytes = [row.peak_bytes / 1e6 / (point.images if per_image else 1) for row in (first, last)]
        lines.append(
            [
                f"{point.x}",
                *(f"{point.milliseconds(name):.4g}" for name in ATTENTIONS),
                f"{last.ratio:.3f}",
                f"{last.lowest:.3f} to {last.highest:.3f}",
                *(f"{value:.4g}" for value in megabytes),
            ]
        )
    units = [f"{name}, {unit}" for unit in ("ms", "MB") for name in ATTENTIONS]
    return markdown_table([what, *units[:2], "ratio", "lowest to highest", *units[2:]], lines)


def _processes_table(rows: list[ProcessesRow]) -> str:
    lines = [
        [
            row.attention,
            *(f"{seconds:.4g}" for seconds in row.seconds),
            f"{row.speed_up:.3f}",
            f"{row.lowest:.3f} to {row.highest:.3f}",
            f"{row.efficiency:.0%}",
            f"{row.difference:.1e}",
        ]
        for row in rows
    ]
    times = ["1 process, s a step", "2 processes, s a step"]
    return markdown_table(["", *times, "speed-up", "lowest to highest", "efficiency", "difference"], lines)


def _estimate_section(result: Scaling) -> list[str]:
    variant, fp32, bf16 = result.setting["variant"], max(result.batch, key=lambda point: point.x), result.bf16
    reached = "; ".join(
        f"{row.name} in {dtype} {row.flops_per_second / 1e12:.4g} TFLOP/s ({row.share_of_peak:.0%})"
        for dtype, point in (("fp32", fp32), ("bf16", bf16))
        for row in point.rows
    )
    shares = [f"{share:.0%}" for share in estimate.SHARES]
    lines = [
        [
            row.model,
            row.attention,
            f"{row.forward_flops / 1e9:.4g}",
            f"{row.step_flops / 1e12:.4g}",
            *(f"{hours:.4g}" for hours in row.training_gpu_hours),
            *(f"{days:.3g}" for days in row.training_days),
            *(f"{hours:.3g}" for hours in row.sampling_hours),
        ]
        for row in result.estimate
    ]
    header = ["model", "attention", "GFLOP forward", "TFLOP a step"]
    header += [f"{what}, {share}" for what in ("GPU-hours", "days", "hours to sample") for share in shares]
    return [
        f"## ESTIMATE, not a measurement: ImageNet at 256 pixels on {estimate.GPUS} GPUs",
        f"Nobody ran this. It is what {estimate.STEPS:,} training steps at batch {estimate.BATCH} on latents of "
        f"32x32x4 would take, and {estimate.NUM_IMAGES:,} samples with {estimate.SAMPLING_STEPS} steps and guidance "
        f"({estimate.FORWARDS_PER_SAMPLING_STEP} forward passes a step), on {estimate.GPUS} GPUs:",
        f"- Counted: the operations of one image's forward pass (`vcagen.benchmark.cost`); a training step has "
        f"{estimate.STEP_OVER_FORWARD} times those.\n"
        f"- Assumed: a peak of {estimate.PEAK / 1e12:.0f} TFLOP/s a GPU (dense bf16 of H100 and H200), of which "
        f"{' or '.join(shares)} is kept up all the time. The share is a guess, and all of data, communication, "
        "optimiser and checkpoints is in it; decoding samples is not counted.\n"
        f"- Measured here: operations counted over time of a step of {variant} at batch {bf16.images}, and in brackets "
        f"its share of what a large product of matrices reached in the same rounds and dtype: {reached}.\n"
        f"- Measured here: vca's step in bf16 takes {bf16.row('vca').ratio:.3f} times mhsa's. vca's times below are "
        "mhsa's times that, for all models and for sampling too, and not by its counted operations, which are shown.",
        markdown_table(header, lines),
        f"Days and hours to sample are on {estimate.GPUS} GPUs.",
    ]


def plot(result: Scaling, out: Path) -> None:
    """Time (solid, left) and memory (dashed, right) against tokens, batch and depth, and time of processes: one PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), dpi=80, layout="constrained")
    tokens, batch, depth, processes = figure.subplots(2, 2).flat
    _curves(tokens, result.tokens, "tokens N", "MB per image", lambda point: point.images)
    _curves(batch, result.batch, "images in a training step", "MB", lambda _: 1)
    batch.set(yscale="linear", ylim=(0, None))
    _curves(depth, result.depth, f"blocks, at batch {result.depth[0].images}", "MB", lambda _: 1)
    for row in result.processes:
        processes.plot(PROCESSES, row.seconds, marker="o", label=row.attention)
    processes.set(xlabel=f"processes, at a global batch of {GLOBAL_BATCH}", ylabel="s a step", xticks=PROCESSES)
    processes.set_ylim(bottom=0)
    processes.grid(alpha=0.3)
    processes.legend()
    figure.suptitle(f"attention (tokens) and training steps of {result.setting['variant']}; dashed: memory")
    with written_aside(out) as aside:
        figure.savefig(aside, pil_kwargs={"optimize": True})


def _curves(axes: Any, points: list[Point], x: str, memory: str, share: Callable[[Point], int]) -> None:
    """Both attentions' time for one image and their memory over `share`, on logarithmic axes."""
    right, places = axes.twinx(), [point.x for point in points]
    for name in ATTENTIONS:
        (line,) = axes.plot(places, [point.milliseconds(name) for point in points], marker="o", label=name)
        megabytes = [point.row(name).peak_bytes / 1e6 / share(point) for point in points]
        right.plot(places, megabytes, linestyle="--", marker=".", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel="ms per image")
    axes.set_xticks(places, [str(place) for place in places], minor=False)
    axes.set_xticks([], minor=True)
    right.set(yscale="log", ylabel=memory)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
