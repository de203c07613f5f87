"""What all benchmarks share: interleaved timing, peak memory, tables."""

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from vcagen.devices import DTYPES, Dtype
from vcagen.files import write_json

# The profiler's own library talks to stderr about GPUs that it does not find.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

SHORTEST = 0.05  # seconds; shorter work is repeated within a round
PROFILED = 10  # times that long is what the profiler sees at least, as others on the machine disturb its clock


def machine(device: torch.device | None = None) -> str:
    """What was measured on, in words."""
    words = (
        f"{_processor()} with {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if device is not None and device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {words}, CUDA {torch.version.cuda}"
    return words


def _processor() -> str:
    """Its name where the system tells (Linux), else its kind."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def launcher(processes: int) -> list[str]:
    """What a command of Python's begins with, so that it runs in one process, or in several that torchrun connects."""
    if processes == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def interleaved(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    what: str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each piece of work in each round; all of them once before, so that caches are warm."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in tqdm(range(rounds), desc=what, delay=2):
        for name, work in works.items():
            started = clock()
            work()
            times[name].append(clock() - started)
    return times


@dataclass(frozen=True)
class Work:
    """Something to measure.

    Attributes:
        run: does it once.
        flops: floating-point operations of its matrix products and convolutions.
        dtype: what they are computed in.
    """

    run: Callable[[], object]
    flops: float
    dtype: Dtype


@dataclass(frozen=True)
class Row:
    """What was measured of one piece of work.

    Attributes:
        seconds: median over the rounds.
        fastest: of the rounds.
        ratio: median over the rounds of its time over the first work's in the same round.
        lowest, highest: of those ratios.
        peak_bytes: most memory that it held at a time, beyond what was there before.
        flops_per_second: by the median.
        share_of_peak: of what a large product of matrices reaches in the same rounds and dtype.
        operators: share of the time of each that has 1% or more of it, the largest first.
    """

    name: str
    seconds: float
    fastest: float
    ratio: float
    lowest: float
    highest: float
    peak_bytes: int
    flops_per_second: float
    share_of_peak: float
    operators: dict[str, float]


def measure(works: dict[str, Work], rounds: int, device: torch.device, what: str) -> list[Row]:
    """Times all works, and one large product of matrices for each of their dtypes, in turn, `rounds` times."""
    clock = clock_of(device)[0]
    peaks = {f"matmul {dtype}": _matmul(dtype, device) for dtype in sorted({work.dtype for work in works.values()})}
    everything = works | peaks
    counts = {name: _repeats(work.run, clock) for name, work in everything.items()}

    def repeated(name: str) -> Callable[[], object]:
        return lambda: [everything[name].run() for _ in range(counts[name])] and None

    times = interleaved({name: repeated(name) for name in everything}, rounds, what, clock)
    times = {name: [second / counts[name] for second in seconds] for name, seconds in times.items()}
    best = {name: work.flops / min(times[name]) for name, work in peaks.items()}
    base = next(iter(works))
    rows = []
    for name, work in works.items():
        ratios = [mine / theirs for mine, theirs in zip(times[name], times[base], strict=True)]
        seconds = statistics.median(times[name])
        peak_bytes, operators = profiled(work.run, device, math.ceil(PROFILED * SHORTEST / seconds))
        rows.append(
            Row(
                name,
                seconds,
                min(times[name]),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                peak_bytes,
                work.flops / seconds,
                work.flops / seconds / best[f"matmul {work.dtype}"],
                operators,
            )
        )
    return rows


def clock_of(device: torch.device) -> tuple[Callable[[], float], str]:
    """A clock for work on a device, and what it counts.

    With one thread it is the processor time of this process, which others on the machine disturb less.
    """
    if device.type != "cpu":

        def synchronised() -> float:
            torch.accelerator.synchronize()
            return time.perf_counter()

        return synchronised, "wall time, synchronised"
    return (time.process_time, "CPU time") if torch.get_num_threads() == 1 else (time.perf_counter, "wall time")


def _matmul(dtype: Dtype, device: torch.device) -> Work:
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    return Work(lambda: F.linear(a, b), 2 * size**3, dtype)


def _repeats(run: Callable[[], object], clock: Callable[[], float]) -> int:
    run()
    started = clock()
    run()
    return max(1, math.ceil(SHORTEST / max(clock() - started, 1e-6)))


def profiled(run: Callable[[], object], device: torch.device, repeats: int = 1) -> tuple[int, dict[str, float]]:
    """Runs a number of times under the profiler.

    Returns:
        Most bytes that tensors and kernels hold at a time, beyond what was there before; and what share of the device's
        time is each operator's own, where it is 1% or more, the largest first. All that compilation generated is one.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_cpu = device.type == "cpu"
    if not on_cpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with torch.profiler.profile(activities=activities, profile_memory=on_cpu) as profiler:
        for _ in range(repeats):
            run()
    peak_bytes = _highest_allocation(profiler) if on_cpu else torch.cuda.max_memory_allocated(device) - before
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if event.device_type == torch.autograd.DeviceType.CPU:  # the other side's are kernels, counted by operator
            name = "generated code" if "CompiledFxGraph" in event.key else event.key.removeprefix("aten::")
            own = event.self_cpu_time_total if on_cpu else event.self_device_time_total
            times[name] = times.get(name, 0) + own
    total = sum(times.values())
    largest = sorted(times.items(), key=lambda item: -item[1])
    return peak_bytes, {name: own / total for name, own in largest if own >= 0.01 * total}


def _highest_allocation(profiler: Any) -> int:  # torch does not type its memory events
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def peak_memory() -> float:
    """Largest resident set of this process so far, MB (Linux).

    Not `getrusage`, whose figure a process inherits from the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM:"))


def report(result: dict[str, Any], json: Path | None) -> None:
    """Prints a table, and writes JSON if asked."""
    for key, value in result.items():
        print(f"{key:48} {value:,.3f}" if isinstance(value, float) else f"{key:48} {value}")
    if json:
        write_json(json, result)


def report_rows(result: dict[str, Any], tables: dict[str, list[Row]], json: Path | None) -> None:
    """Prints `result`, then a Markdown table and operators for each list of rows; writes all as JSON if asked."""
    report(result, None)
    for title, rows in tables.items():
        header = [title, "ms", "fastest", "ratio", "lowest to highest", "peak MB", "GFLOP/s", "of matmul"]
        print(f"\n{markdown_table(header, map(_cells, rows))}\n\nWhere the time goes:\n")
        for row in rows:
            print(f"- {row.name}: {', '.join(f'{name} {share:.0%}' for name, share in row.operators.items())}")
    if json:
        write_json(json, result | {title: [asdict(row) for row in rows] for title, rows in tables.items()})


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        f"{1000 * row.seconds:.4g}",
        f"{1000 * row.fastest:.4g}",
        f"{row.ratio:.3f}",
        f"{row.lowest:.3f} to {row.highest:.3f}",
        f"{row.peak_bytes / 1e6:.1f}",
        f"{row.flops_per_second / 1e9:.4g}",
        f"{row.share_of_peak:.0%}",
    ]


def markdown_table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table whose columns are padded, so that it can be read in a terminal too."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])
