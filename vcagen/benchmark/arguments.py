"""The command lines of the benchmarks of speed."""

import argparse
from pathlib import Path
from typing import Any

COMMANDS = {
    "attention": "time and memory of every attention against the number of tokens",
    "model": "the forward pass of a whole transformer",
    "train": "a training step and its parts",
    "sample": "guided SDE sampling",
}
DESCRIPTION = """\
Everything is done in turn, again and again, so that what else the machine does meets all alike: ratios are medians
over the rounds, of times within one round. Memory is what tensors and kernels hold at most, beyond what was there
before; "of matmul" is against a large product of matrices timed in the same rounds. With one thread on a CPU
(OMP_NUM_THREADS=1) times are this process's own, which other processes disturb less.
"""


def add_speed_commands(commands: Any) -> None:
    """Adds `attention`, `model`, `train`, `sample` and `scaling`."""
    for name, words in COMMANDS.items():
        parser = commands.add_parser(name, help=words, description=f"Measure {words}.\n{DESCRIPTION}")
        _add_common(parser)
        parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32"], help="one or both")
        parser.add_argument("--compile", action="store_true", help="also measure all of ours compiled; takes minutes")
        if name == "attention":
            sides = [8, 16, 32, 64]
            parser.add_argument("--grid", type=positive, nargs="+", default=sides, help="sides of the token grid")
            parser.add_argument("--hidden-size", type=positive, default=384, help="width (default: 384)")
            parser.add_argument("--num-heads", type=positive, default=6, help="heads (default: 6)")
            parser.add_argument("--png", type=Path, help="draw time and memory against the number of tokens here")
        else:
            parser.add_argument(
                "--variant", default="SiT-S/2" if name == "sample" else "DiT-S/2", help="such as SiT-B/4"
            )
            parser.add_argument("--batch", type=positive, default=4, help="images (default: 4)")
            parser.add_argument(
                "--official",
                type=Path,
                metavar="PATH",
                help="a checkout of facebookresearch/DiT (willisma/SiT for a SiT) to compare with; it needs timm",
            )
        if name == "sample":
            parser.add_argument("--num-steps", type=positive, default=9, help="SDE steps before the last (default: 9)")
    _add_scaling(commands)


def _add_scaling(commands: Any) -> None:
    words = "mhsa and vca against tokens, batch, depth and processes, on one page"
    more = "The page ends with an estimate for ImageNet on 8 GPUs, which is arithmetic and not a measurement."
    parser = commands.add_parser("scaling", help=words, description=f"Measure {words}.\n{DESCRIPTION}{more}")
    _add_common(parser)
    parser.add_argument("--variant", default="SiT-S/2", help="model of the training steps (default: SiT-S/2)")
    sizes = {
        "--grid": ([16, 32, 64, 128], "sides of the token grid"),
        "--batches": ([1, 2, 4, 8, 16], "images in a training step"),
        "--depths": ([3, 6, 12, 24], "blocks of the model, at batch 4"),
    }
    for name, (default, what) in sizes.items():
        parser.add_argument(name, type=positive, nargs="+", default=default, help=what)
    parser.add_argument("--markdown", type=Path, help="write the page here")
    parser.add_argument("--png", type=Path, help="draw the figure here; the page shows it")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="such as cuda:1 or cpu (default: the GPU, if there is one)")
    parser.add_argument("--rounds", type=positive, default=7, help="repetitions of everything (default: 7)")
    parser.add_argument("--json", type=Path, help="write the result here")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value
