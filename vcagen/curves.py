from collections.abc import Sequence
from pathlib import Path

from vcagen.files import written_aside
from vcagen.metrics import read_metrics


def plot_losses(run_dirs: Sequence[Path], out: Path) -> None:
    """Draws the losses of runs over their steps into one PNG: every logged mean, faint, and a centred running mean."""
    # A figure of its own, not pyplot: no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for color, run_dir in enumerate(run_dirs):
        rows = read_metrics(run_dir / "metrics.jsonl")
        steps = [row["step"] for row in rows]
        losses = [row["loss"] for row in rows]
        half = min(5, len(losses) // 20)
        windows = [losses[max(0, i - half) : i + half + 1] for i in range(len(losses))]
        smooth = [sum(window) / len(window) for window in windows]
        axes.plot(steps, losses, color=f"C{color}", alpha=0.3, linewidth=1)
        axes.plot(steps, smooth, color=f"C{color}", label=f"{run_dir.name}, mean of {2 * half + 1} rows")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    with written_aside(out) as aside:
        figure.savefig(aside)
