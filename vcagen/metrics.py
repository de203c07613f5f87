import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from vcagen.files import write_text


class LossWindow:
    """Means over all samples, of all processes, since the last `close`.

    Attributes:
        seconds: that updates took, for whoever makes them to add to.
        data_seconds: those of them that were waited for data.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._start()

    def _start(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.num_samples = 0
        self.num_steps = 0
        self.num_bad_steps = 0
        self.seconds = self.data_seconds = 0.0
        self.gradient_norm = torch.zeros(())

    def add_bad_step(self) -> None:
        """Counts an update that was skipped because it was not finite."""
        self.num_bad_steps += 1

    def add(self, micro_batches: list[dict[str, torch.Tensor]], gradient_norm: torch.Tensor) -> None:
        """Adds one update: losses and parts, (B,) each, of its micro-batches."""
        for parts in micro_batches:
            for name, values in parts.items():
                total = values.detach().double().sum()
                self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.num_samples += len(parts["loss"])
        self.num_steps += 1
        self.gradient_norm = gradient_norm.detach()

    def close(self, step: int, learning_rate: float, ema_decay: float) -> dict[str, Any]:
        """The row for `step`, and a new window; call it on every process.

        Losses are means over the window, `gradient_norm` is the last update's, before clipping; `bad_steps` were
        skipped in the window; times are this process's, per step.
        """
        names = sorted(self.sums)
        device = self.accelerator.device
        local = torch.stack([*(self.sums[name] for name in names), torch.tensor(self.num_samples, device=device)])
        *totals, count = self.accelerator.reduce(local, reduction="sum").tolist()
        row = {
            "step": step,
            **{name: total / count for name, total in zip(names, totals, strict=True)},
            "learning_rate": learning_rate,
            "ema_decay": ema_decay,
            "gradient_norm": float(self.gradient_norm),
            "bad_steps": self.num_bad_steps,
            "steps_per_second": self.num_steps / self.seconds,
            "images_per_second": count / self.seconds,
            "data_seconds": self.data_seconds / self.num_steps,
        }
        if device.type == "cuda":
            row["memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        self._start()
        return row


class MetricsFile:
    """`metrics.jsonl`, one row a line, and the same numbers to the trackers.

    Rows past `first_step` are dropped at the start: a killed run wrote them after the checkpoint it resumes from.
    """

    def __init__(self, path: Path, first_step: int, accelerator: Accelerator) -> None:
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            rows = read_metrics(path) if path.exists() else []
            kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= first_step]
            write_text(path, "".join(kept))

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row, on the main process."""
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        self.accelerator.log({key: value for key, value in row.items() if key != "step"}, step=row["step"])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; what follows a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows
