"""Measurements on this machine: python -m vcagen.benchmark data; counts: python -m vcagen.benchmark cost."""

import argparse
import subprocess
import sys
from pathlib import Path

from vcagen.benchmark.arguments import add_speed_commands, positive
from vcagen.commands import exit_code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vcagen.benchmark", description="Measure speed on this machine, and count cost."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser(
        "data",
        help="reading and building latent caches",
        description="Latents read per second, against one .npy file per image read in the same run; images encoded per "
        "second. Everything is made in a temporary folder.",
    )
    data.add_argument("--num-latents", type=int, default=4096, help="latents 4x32x32 in the cache that is read")
    data.add_argument("--rounds", type=int, default=7, help="interleaved repetitions; medians are printed")
    data.add_argument("--num-images", type=int, default=128, help="JPEGs of 500x375 to encode")
    data.add_argument("--image-size", type=int, default=256, help="side that they are cropped to")
    data.add_argument("--autoencoder", help="hub id or folder to encode with (default: a tiny one of random weights)")
    data.add_argument("--memory", action="store_true", help="also build caches of 1,000 and 100,000 small images")
    data.add_argument("--json", type=Path, help="write the result here")
    fid = commands.add_parser(
        "fid",
        help="features, moments and distances of scoring",
        description="Images per second through Inception (of random weights), against torch-fidelity's own loop in the "
        "same run; seconds of a Frechet distance against scipy's matrix root.",
    )
    fid.add_argument("--num-images", type=int, default=64, help="PNGs of 256x256; 0 leaves the features out")
    fid.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; medians are printed")
    fid.add_argument("--dimension", type=int, default=2048, help="features of the Frechet distance")
    fid.add_argument("--memory", action="store_true", help="also score 500, 5,000 and 500,000 images of a tiny network")
    fid.add_argument("--json", type=Path, help="write the result here")
    cost = commands.add_parser(
        "cost",
        help="parameters, multiply-adds and activation memory of every attention",
        description="Count what each attention costs in every model at 256, 512 and 1024 pixels, and in DeiT's shapes "
        "against the claims of arXiv 2511.00833. Nothing is timed and no model takes memory; some minutes.",
    )
    cost.add_argument("--json", type=Path, help="write the counts here")
    cost.add_argument("--markdown", type=Path, help="write what is printed here")
    add_speed_commands(commands)
    losses = commands.add_parser(
        "losses",
        help="whether training loses the same with every switch",
        description="Train tiny models on digits with gradient checkpointing, micro-batches, workers, compiled blocks "
        "and bf16, and compare the loss of every step with that of a run without; an error where it differs by more "
        "than it may. About ten minutes.",
    )
    losses.add_argument("--steps", type=positive, default=200, help="of each run (default: 200)")
    losses.add_argument("--json", type=Path, help="write the result here")
    soak = commands.add_parser(
        "soak",
        help="kill and restart training at random moments",
        description="Train tiny models while killing them at random moments, in one process and in two, on a disk that "
        "refuses now and then, and compare with runs that nothing stopped, bit for bit.",
    )
    soak.add_argument("--minutes", type=float, default=20, help="how long to go on starting runs (default: 20)")
    soak.add_argument("--seed", type=int, default=0, help="of the moments")
    soak.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args()


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    arguments = parse_arguments()

    def run() -> None:
        # Imported here, so that --help does not wait for torch.
        if arguments.command == "data":
            from vcagen.benchmark.data import benchmark_data

            benchmark_data(arguments)
        elif arguments.command == "fid":
            # Evaluation is the room above this one: it is started, not imported.
            names = ("num_images", "rounds", "dimension", "json")
            given = [(name, getattr(arguments, name)) for name in names if getattr(arguments, name) is not None]
            options = [text for name, value in given for text in (f"--{name.replace('_', '-')}", str(value))]
            options += ["--memory"] if arguments.memory else []
            sys.exit(subprocess.run([sys.executable, "-m", "fid.benchmark", *options], check=False).returncode)
        elif arguments.command == "cost":
            from vcagen.benchmark.cost import benchmark_cost

            benchmark_cost(arguments)
        elif arguments.command == "attention":
            from vcagen.benchmark.attention import benchmark_attention

            benchmark_attention(arguments)
        elif arguments.command == "model":
            from vcagen.benchmark.model import benchmark_model

            benchmark_model(arguments)
        elif arguments.command == "train":
            from vcagen.benchmark.training import benchmark_training

            benchmark_training(arguments)
        elif arguments.command == "sample":
            from vcagen.benchmark.sampling import benchmark_sampling

            benchmark_sampling(arguments)
        elif arguments.command == "scaling":
            from vcagen.benchmark.scaling import benchmark_scaling

            benchmark_scaling(arguments)
        elif arguments.command == "losses":
            from vcagen.benchmark.losses import benchmark_losses

            benchmark_losses(arguments)
        else:
            from vcagen.benchmark.soak import soak

            soak(arguments)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
