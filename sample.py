"""Samples images from a trained run: python sample.py RUN --labels 3,7 --grid grid.png."""

import argparse
import sys
from pathlib import Path

from vcagen.commands import exit_code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Sample a grid or a folder of images from a run folder (its newest checkpoint), a checkpoint, or a "
        "pipeline folder.",
        epilog="example: python sample.py runs/demo --labels 3,7 --per-label 8 --grid grid.png sampler.num_steps=50",
    )
    parser.add_argument("run", type=Path, help="run folder, one checkpoints/step_N folder of it, or a pipeline folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="sampler.*, guidance.* and decoding.* settings that replace the run's or the protocol's",
    )
    parser.add_argument(
        "--labels",
        default="all",
        help="class ids or names, comma-separated; id:3 or name:3 where both exist; or all",
    )
    parser.add_argument("--per-label", type=int, default=8, help="images per label (default: 8)")
    parser.add_argument("--grid", type=Path, help="write one PNG of all images (default: RUN/grid.png, without --out)")
    parser.add_argument("--columns", type=int, help="columns of the grid (default: images per label)")
    parser.add_argument("--out", type=Path, help="write the images one by one into this folder; resumable")
    parser.add_argument("--seed", type=int, default=0, help="image i depends on this, i and its label alone")
    parser.add_argument("--protocol", help="sample as a published table was made: dit-paper, sit-paper-sde, ...")
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help="EMA or raw weights")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the model; bf16 is faster")
    parser.add_argument("--batch-size", type=int, default=64, help="changes memory and speed, not the images")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    return parser.parse_intermixed_args()  # overrides may stand on either side of options


def sample(arguments: argparse.Namespace) -> None:
    """Loads, samples, writes; a `ValueError` in one line where something does not fit."""
    # Imported here, so that --help does not wait for torch.
    import numpy as np
    import torch
    from accelerate import PartialState

    from vcagen.files import require_file_name, write_grid
    from vcagen.generation import load_model, parse_labels, plan_samples
    from vcagen.sample_folder import prepare_samples, read_samples, write_samples

    columns = arguments.per_label if arguments.columns is None else arguments.columns
    if min(arguments.per_label, arguments.batch_size, columns) < 1:
        raise ValueError("--per-label, --batch-size and --columns must be at least 1")
    process = PartialState(cpu=not torch.accelerator.is_available())
    protocol = [f"protocol={arguments.protocol}"] if arguments.protocol else []
    overrides = [*protocol, *arguments.overrides]
    model = load_model(arguments.run, arguments.weights, overrides, arguments.device, arguments.dtype)
    labels = parse_labels(arguments.labels, model.class_names)
    repeated = [label for label in labels for _ in range(arguments.per_label)]
    samples = plan_samples(repeated, arguments.seed, len(model.class_names))
    grid = arguments.grid if arguments.grid or arguments.out else model.folder / "grid.png"
    if grid:
        require_file_name(grid)
    if process.is_main_process:
        print(model.describe())
    if arguments.out:
        with process.main_process_first():
            prepare_samples(model, samples, arguments.out)
        write_samples(model, samples, arguments.out, arguments.batch_size, process.process_index, process.num_processes)
        process.wait_for_everyone()
    if not process.is_main_process:
        return
    if arguments.out:
        print(f"{arguments.out}: {len(samples)} images, and samples.json, which says how they were made")
    if grid:
        if arguments.out:
            images = read_samples(samples, arguments.out)
        else:
            images = np.stack([image for _, image in model.maker.images(samples, arguments.batch_size)])
        write_grid(grid, images, columns)
        print(f"{grid}: {len(samples)} images, row by row in the order of the labels")
    if calls := model.maker.model_calls:
        print(f"model calls a batch: {min(calls)}" + (f" to {max(calls)}" if max(calls) > min(calls) else ""))


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    arguments = parse_arguments()
    return exit_code(lambda: sample(arguments))


if __name__ == "__main__":
    sys.exit(main())
