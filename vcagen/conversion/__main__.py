"""Published weights to a folder that samples, and back: python -m vcagen.conversion SOURCE TARGET."""

import argparse
import sys
from pathlib import Path

from vcagen.commands import exit_code


def parse_arguments(given: list[str]) -> argparse.Namespace:
    """The command line; `graft` as the first word is another command."""
    if given[:1] == ["graft"]:
        return _graft_parser().parse_intermixed_args(given[1:])
    return _convert_parser().parse_intermixed_args(given)


def _convert_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vcagen.conversion",
        description="Convert published weights of DiT, SiT, fast-DiT, REPA and diffusers' DiT to a folder that "
        "sample.py and the pipeline read, and back. `graft` starts another attention from softmax weights: see "
        "python -m vcagen.conversion graft --help.",
        epilog="example: python -m vcagen.conversion SiT-XL-2-256x256.pt models/sit-xl protocol=sit-paper-sde",
    )
    parser.add_argument("source", type=Path, help="weights file, diffusers folder, or run, checkpoint, pipeline folder")
    parser.add_argument("target", type=Path, help="folder to write; a .safetensors or .pt file with --to official")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings of the pipeline: protocol, objective.*, sampler.*, guidance.*, autoencoder.source (a folder is "
        "copied along), decoding.*",
    )
    parser.add_argument("--to", choices=["pipeline", "official", "diffusers"], default="pipeline")
    _add_choices(parser)
    parser.set_defaults(command="convert")
    return parser


def _graft_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vcagen.conversion graft",
        description="Start a model with another attention from softmax weights: what both have is copied, what is new "
        "is initialised, and a config to fine-tune it is written.",
        epilog="example: python -m vcagen.conversion graft runs/mhsa models/grafted --attention vca",
    )
    parser.add_argument("source", type=Path, help="as for conversion; a model with softmax attention")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the attention: value_conv=false")
    parser.add_argument("--attention", required=True, help="name of the attention: vca, differential, ...")
    _add_choices(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the new parameters")
    parser.set_defaults(command="graft")
    return parser


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """What a source may not say itself."""
    parser.add_argument("--weights", choices=["ema", "raw"], help="which of a training checkpoint's (default: the EMA)")
    parser.add_argument("--family", choices=["DiT", "SiT"], help="where neither arguments nor file name say it")
    parser.add_argument("--num-heads", type=int, help="where width and depth are no published model's")
    parser.add_argument(
        "--trained-by",
        choices=["diffusers", "official"],
        help="for weights in diffusers' names: compute as its class does (default), or as the official code does; "
        "outputs differ by up to several percent",
    )
    parser.add_argument("--class-names", type=Path, help="JSON list, or one name a line, in label order")


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    arguments = parse_arguments(sys.argv[1:])

    def run() -> None:
        # Imported here, so that --help does not wait for torch.
        from vcagen.conversion import commands

        (commands.convert if arguments.command == "convert" else commands.graft)(arguments)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
