"""What all benchmarks share: interleaved timing, peak memory, the table."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vcagen.files import write_json


def machine() -> str:
    """What was measured on, in words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def interleaved(works: dict[str, Callable[[], None]], rounds: int, what: str) -> dict[str, list[float]]:
    """Seconds of each piece of work in each round; all of them once before, so that caches are warm."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in tqdm(range(rounds), desc=what, delay=2):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return times


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
