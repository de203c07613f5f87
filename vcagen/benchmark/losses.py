"""Whether the switches that make training fast or small leave it what it is: losses on digits, step by step."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from vcagen.benchmark.measure import machine, markdown_table
from vcagen.files import require_file_name, write_json
from vcagen.metrics import read_metrics

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/demo.yaml"
# The papers' rate from the first step on: no warm-up to hide what a first step does. At the demo's rate, thirty times
# theirs, rounding alone grows to a tenth of the loss.
LEARNING_RATE = 1e-4
COMMON = (
    *(f"train.learning_rate={LEARNING_RATE!r}", "train.warmup_steps=0", "train.schedule=constant"),
    *("train.log_every=1", "train.trackers=[]", "train.preview_images=10", "sampler.num_steps=2"),
)
MODELS = {
    "SiT with vca": ("model.variant=SiT-tiny/1", "model.attention.name=vca"),
    "SiT with mhsa": ("model.variant=SiT-tiny/1", "model.attention.name=mhsa"),
    "DiT with vca": ("model.variant=DiT-tiny/1", "model.attention.name=vca", "sampler.name=ddim"),
}


@dataclass(frozen=True)
class Switch:
    """Something that may be turned on.

    Attributes:
        overrides: of the config.
        largest: how far the loss of any step may be from that without it, as a share of it; at 0, not a bit.
        last: the same for the mean over the last tenth of the steps.
    """

    overrides: tuple[str, ...]
    largest: float = 0.0
    last: float = 0.0


# What rounds otherwise may differ as far as what changes as little and has no fault: rounding grows from step to step,
# and the second of these rows shows how far.
SWITCHES = {
    "nothing, once more": Switch(()),
    "learning rate larger by a millionth": Switch((f"train.learning_rate={LEARNING_RATE * (1 + 1e-6)!r}",), 0.1, 0.02),
    "gradient checkpointing": Switch(("model.gradient_checkpointing=true",)),
    "two data workers": Switch(("train.num_workers=2",)),
    "two micro-batches": Switch(("train.gradient_accumulation_steps=2",), 0.1, 0.02),
    "compile": Switch(("train.compile=true",), 0.1, 0.02),
    "bf16": Switch(("train.precision=bf16",), 0.15, 0.03),
}


@dataclass(frozen=True)
class Agreement:
    """How near the losses with a switch are to those without.

    Attributes:
        largest: difference in a step, as a share of the loss without.
        last: mean loss of the last tenth of the steps, as a share of that without, less 1.
        is_within: whether both are as small as the switch's may be.
    """

    model: str
    switch: str
    largest: float
    last: float
    is_within: bool


def benchmark_losses(arguments: argparse.Namespace) -> None:
    """Trains, prints a table and writes JSON if asked; a `ValueError` where losses differ by more than they may."""
    if arguments.json:
        require_file_name(arguments.json)
    found = []
    with tempfile.TemporaryDirectory(prefix="vcagen-benchmark-") as name:
        total = len(MODELS) * (1 + len(SWITCHES))
        with tqdm(total=total, desc="training", unit="run", delay=2) as bar:
            for model, overrides in MODELS.items():
                runs = []
                for number, more in enumerate([(), *(switch.overrides for switch in SWITCHES.values())]):
                    folder = Path(name) / model.replace(" ", "-") / str(number)
                    runs.append(losses_of(folder, [*overrides, *more, f"train.max_steps={arguments.steps}"]))
                    bar.update()
                found += [
                    agreement(model, switch, runs[0], run) for switch, run in zip(SWITCHES, runs[1:], strict=True)
                ]
    header = ["model", "switch", "largest difference of a step", "allowed", "of the last tenth's mean", "allowed"]
    rows = [[each.model, each.switch, *_cells(each)] for each in found]
    print(f"{arguments.steps} steps on digits, {machine()}\n\n{markdown_table(header, rows)}")
    if arguments.json:
        rows_as_json = [asdict(each) for each in found]
        write_json(arguments.json, {"machine": machine(), "steps": arguments.steps, "agreements": rows_as_json})
    broken = [f"{each.model}, {each.switch}" for each in found if not each.is_within]
    if broken:
        raise ValueError(f"losses differ by more than they may: {'; '.join(broken)}")


def agreement(model: str, switch: str, without: Sequence[float], with_it: Sequence[float]) -> Agreement:
    """Compares the losses of every step, (steps,) each."""
    largest = max(abs(b - a) / a for a, b in zip(without, with_it, strict=True))
    tenth = max(1, len(without) // 10)
    last = sum(with_it[-tenth:]) / sum(without[-tenth:]) - 1
    allowed = SWITCHES[switch]
    return Agreement(model, switch, largest, last, largest <= allowed.largest and abs(last) <= allowed.last)


def _cells(found: Agreement) -> list[str]:
    allowed = SWITCHES[found.switch]
    if found.largest == 0:
        return ["equal to the bit", f"{allowed.largest:.0%}", "0", f"{allowed.last:.0%}"]
    return [f"{found.largest:.1e}", f"{allowed.largest:.0%}", f"{found.last:+.1e}", f"{allowed.last:.0%}"]


def losses_of(run_dir: Path, overrides: Sequence[str]) -> list[float]:
    """The loss of every step of a run in a process of its own."""
    command = [sys.executable, "train.py", str(CONFIG), f"run_dir={run_dir}", *COMMON, *overrides]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{' '.join(command[1:])}: failed: {result.stderr.strip().splitlines()[-1]}")
    return [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl")]
