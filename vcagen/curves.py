"""Loss curves of runs in one picture: python -m vcagen.curves runs/a runs/b --out curves.png."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vcagen.commands import exit_code


def plot_losses(run_dirs: Sequence[Path], out: Path, column: str = "loss") -> None:
    """Draws a column of runs over their steps into one PNG: every logged value, faint, and a centred running mean.

    Raises:
        ValueError: a run has no metrics, or no such column.
    """
    # Imported here, so that --help does not wait; a figure of its own, not pyplot: no display and no global state.
    from matplotlib.figure import Figure

    from vcagen.files import written_aside

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for color, run_dir in enumerate(run_dirs):
        rows = _rows_with(run_dir, column)
        steps = [row["step"] for row in rows]
        values = [row[column] for row in rows]
        half = min(5, len(values) // 20)
        windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
        smooth = [sum(window) / len(window) for window in windows]
        axes.plot(steps, values, color=f"C{color % 10}", alpha=0.3, linewidth=1)
        axes.plot(steps, smooth, color=f"C{color % 10}", label=f"{run_dir.name}, mean of {2 * half + 1} rows")
    axes.set(xlabel="step", ylabel=column)
    axes.grid(alpha=0.3)
    axes.legend()
    with written_aside(out) as aside:
        figure.savefig(aside)


def _rows_with(run_dir: Path, column: str) -> list[dict[str, Any]]:
    """The rows of a run's metrics, or of its scores, that have the column."""
    from vcagen.metrics import read_metrics

    path, columns = run_dir / "metrics.jsonl", []
    if not path.is_file():
        raise ValueError(f"{path}: missing; expected a run folder")
    for file in (path, run_dir / "scores.jsonl"):
        rows = read_metrics(file) if file.is_file() else []
        found = [row for row in rows if column in row]
        if found or (not rows and file == path):
            return found
        columns += sorted({name for row in rows for name in row})
    raise ValueError(f"{run_dir}: no column {column!r}; there are {', '.join(columns)}")


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m vcagen.curves", description="Draw curves of runs in one PNG.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--column",
        default="loss",
        help="loss, gradient_norm, ... of metrics.jsonl, or a score of scores.jsonl (default: loss)",
    )
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="PNG to write (default: curves.png)")
    arguments = parser.parse_args()

    def run() -> None:
        from vcagen.files import require_file_name

        require_file_name(arguments.out)
        plot_losses(arguments.runs, arguments.out, arguments.column)
        print(f"{arguments.out}: {arguments.column} of {len(arguments.runs)} runs")

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
