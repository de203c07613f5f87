"""Trains a run: python train.py CONFIG [key=value ...]. Running the same command again goes on with it."""

import argparse
import sys
from pathlib import Path

from vcagen.commands import exit_code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a DiT or SiT whose attention is a config value. The same command again resumes.",
        epilog="example: python train.py configs/demo.yaml run_dir=runs/mhsa model.attention.name=mhsa",
    )
    parser.add_argument("config", type=Path, help="a YAML file, such as configs/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved run, every default written out, and stop"
    )
    return parser.parse_intermixed_args()  # overrides may stand on either side of options


def run(arguments: argparse.Namespace) -> None:
    """Trains, or prints the config; ends the process with 128 + the signal's number when one stopped it."""
    # Imported here, so that --help does not wait for torch.
    from vcagen.config import dump_config, load_config

    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return
    from vcagen.signals import Interrupted
    from vcagen.training import Scorer, train

    scorer: Scorer | None = None
    if config.score is not None:
        from fid.scorer import TrainingScorer

        scorer = TrainingScorer(config.score)
    try:
        train(config, scorer)
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(interrupted.exit_code)


def main() -> int:
    """Exit codes: 0 done; 1 it cannot start or stopped being finite; 130 Ctrl-C; 138 SIGUSR1; 143 SIGTERM."""
    arguments = parse_arguments()
    return exit_code(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
