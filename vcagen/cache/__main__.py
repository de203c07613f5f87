"""Latent caches from the command line: python -m vcagen.cache build SOURCE OUT."""

import argparse
import sys
from pathlib import Path

from vcagen.commands import exit_code


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vcagen.cache", description="Encode images once, to train on their latents."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser(
        "build",
        help="encode images into a latent cache",
        description="Encode images into a latent cache. The same command goes on after any stop; torchrun "
        "--nproc-per-node N -m vcagen.cache build ... shares the work.",
        epilog="example: python -m vcagen.cache build imagenet/train caches/imagenet256 --image-size 256",
    )
    build.add_argument("source", help="folder of class folders, folder of .tar or .parquet files, or a hub id")
    build.add_argument("cache", type=Path, help="folder to write")
    build.add_argument("--kind", choices=["folder", "tar", "datasets"], help="of the source (default: it is looked at)")
    build.add_argument("--split", default="train", help="of a Hugging Face data set")
    build.add_argument("--image-size", type=int, default=256, help="side of ADM's centre crop, pixels (default: 256)")
    build.add_argument("--no-mirror", action="store_true", help="leave mirror images out; halves the size")
    build.add_argument(
        "--on-bad", choices=["stop", "skip"], default="stop", help="what bad images mean (default: stop)"
    )
    build.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the encoder")
    build.add_argument("--batch-size", type=int, default=32, help="images per encoder call")
    build.add_argument("--threads", type=int, default=4, help="that decode images, per process")
    build.add_argument("--shard-size", type=int, default=4096, help="images per shard (default: 4096)")
    verify = commands.add_parser("verify", help="hash a cache again", description="Hash every shard of a cache again.")
    verify.add_argument("cache", type=Path)
    importer = commands.add_parser(
        "import",
        help="bring latents that fast-DiT, REPA or LightningDiT cached into this format",
        description="Bring latents that other toolkits cached into this format.",
        epilog="example: python -m vcagen.cache import features caches/fast --layout fast-dit",
    )
    importer.add_argument("source", type=Path, help="their folder")
    importer.add_argument("cache", type=Path, help="folder to write")
    importer.add_argument("--layout", required=True, choices=["fast-dit", "repa", "lightningdit", "edm2"])
    importer.add_argument("--shard-size", type=int, default=4096, help="images per shard (default: 4096)")
    for command in (build, importer):
        command.add_argument(
            "--autoencoder",
            default="stabilityai/sd-vae-ft-ema",
            help="hub id or folder of an AutoencoderKL, or identity for pixels (default: stabilityai/sd-vae-ft-ema)",
        )
        command.add_argument("--class-names", type=Path, help="JSON list or a name a line, where the source has none")
        command.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    return parser.parse_args()


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason; 130 Ctrl-C."""
    arguments = parse_arguments()

    def run() -> None:
        # Imported here, so that --help does not wait for torch.
        from vcagen.cache import commands

        {"build": commands.build, "verify": commands.verify, "import": commands.import_latents}[arguments.command](
            arguments
        )

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
