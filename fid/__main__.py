"""Evaluation from the command line: python -m fid score RUN_OR_FOLDER --reference digits."""

import argparse
import sys
from pathlib import Path

from vcagen.commands import exit_code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fid", description="Score generated images.")
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser(
        "score",
        help="Frechet distance of a run or of a folder of images to real images",
        usage="python -m fid score SOURCE --reference REFERENCE [options] [key=value ...]",
        description="Frechet distance of a run (sampled first) or of a folder of images to real images. For a run, "
        "key=value replaces its sampler.*, guidance.*, decoding.* and label_mode settings.",
        epilog="example: python -m fid score runs/demo --reference digits --num-images 400 guidance.scale=1",
    )
    score.add_argument("source", type=Path, help="run, checkpoint or pipeline folder, or a folder of images")
    score.add_argument("--reference", required=True, help="`digits` (the embedded data set) or a folder of real images")
    score.add_argument("--extractor", help="inception-v3-compat or digits-classifier (default: by the reference)")
    score.add_argument("--extractor-weights", type=Path, help="file with Inception's weights, for machines offline")
    score.add_argument("--protocol", help="sample as a published table was made: dit-paper, sit-paper-sde, ...")
    score.add_argument("--num-images", type=int, help="images to sample from a run (default: 1000)")
    score.add_argument("--seed", type=int, help="seed of the images sampled from a run (default: 0)")
    score.add_argument("--batch-size", type=int, default=64, help="changes memory and speed, not the result")
    score.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    score.add_argument("--out", type=Path, help="result JSON (default: score.json beside the images)")
    # Subparsers cannot take positionals between options, so the overrides are what is left over.
    arguments, overrides = parser.parse_known_args()
    arguments.overrides = overrides
    for argument in overrides:
        if argument.startswith("-") or "=" not in argument:
            score.error(f"unrecognized argument: {argument}")
    return arguments


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    arguments = parse_arguments()

    def score() -> None:
        # Imported here, so that --help does not wait for torch.
        from fid.score import score_command

        score_command(arguments)

    return exit_code(score)


if __name__ == "__main__":
    sys.exit(main())
