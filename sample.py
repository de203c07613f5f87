"""Samples images from a trained run: python sample.py RUN --labels 3,7 --grid grid.png."""

import argparse
import sys
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Sample a grid or a folder of images from a run folder (its newest checkpoint) or a checkpoint.",
        epilog="example: python sample.py runs/demo --labels 3,7 --per-label 8 --grid grid.png sampler.num_steps=50",
    )
    parser.add_argument("run", type=Path, help="run folder, or one checkpoints/step_N folder of it")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="sampler.* and guidance.* settings that replace the run's"
    )
    parser.add_argument(
        "--labels", default="all", help="class ids or names, comma-separated; id:3 or name:3 where both exist; or all"
    )
    parser.add_argument("--per-label", type=int, default=8, help="images per label (default: 8)")
    parser.add_argument("--grid", type=Path, help="write one PNG of all images (default: RUN/grid.png, without --out)")
    parser.add_argument("--columns", type=int, help="columns of the grid (default: images per label)")
    parser.add_argument("--out", type=Path, help="write the images one by one into this folder; resumable")
    parser.add_argument("--seed", type=int, default=0, help="image i depends on this, i and its label alone")
    parser.add_argument("--weights", choices=["ema", "model"], default="ema", help="EMA or raw weights")
    parser.add_argument("--batch-size", type=int, default=64, help="changes memory and speed, not the images")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    return parser.parse_args()


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line."""
    arguments = parse_arguments()

    # Imported here, so that --help does not wait for torch.
    from vcagen.generation import sample

    try:
        sample(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
