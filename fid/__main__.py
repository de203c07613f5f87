"""Evaluation from the command line: python -m fid score RUN_OR_IMAGES --reference ref.npz."""

import argparse
import signal
import sys
from pathlib import Path

from vcagen.commands import exit_code

EXTRACTORS = "inception-v3-compat, dinov2-vit-l-14, clip-vit-l-14 or digits-classifier (default: by the reference)"
FORMS = (
    *("adm", "mar", "edm", "pytorch-fid"),
    *("clean-fid-legacy_tensorflow", "clean-fid-legacy_pytorch", "clean-fid-clean"),
)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fid", description="Score generated images.")
    commands = parser.add_subparsers(dest="command", required=True)
    score = commands.add_parser(
        "score",
        help="FID and its relatives of a model, or of images, against real ones",
        usage="python -m fid score SOURCE --reference REFERENCE [options] [key=value ...]",
        description="FID and its relatives of a model, sampled as it is scored, or of images that lie there. For a "
        "model, key=value replaces its sampler.*, guidance.*, decoding.* and label_mode settings. The same command "
        "goes on where it stopped; torchrun -m fid score ... divides the work over processes.",
        epilog="example: python -m fid score runs/demo --reference digits --num-images 400 guidance.scale=1",
    )
    score.add_argument("source", help="run, checkpoint or pipeline folder; a folder or an npz of images")
    score.add_argument(
        "--reference", required=True, help="npz, pkl or pt of statistics, a folder of real images, or `digits`"
    )
    score.add_argument("--metrics", help="of fid,sfid,is,pr,kid (default: those that need no kept features)")
    score.add_argument("--num-images", type=int, help="images to sample from a model (default: 1000)")
    score.add_argument("--protocol", help="sample as a published table was made: dit-paper, sit-paper-sde, ...")
    score.add_argument("--seed", type=int, help="seed of the images sampled from a model (default: 0)")
    score.add_argument("--weights", choices=["ema", "raw"], help="EMA (default) or raw weights of a model")
    score.add_argument("--dtype", choices=["fp32", "bf16"], help="of a model that is sampled (default: fp32)")
    score.add_argument("--save", choices=["png", "npz"], help="keep the sampled images, for people or ADM's evaluator")
    score.add_argument("--reference-format", choices=FORMS, help="which tool wrote an npz of mu and sigma alone")
    score.add_argument("--kid-subset-size", type=int, default=1000, help="images in each of KID's subsets")
    reference = commands.add_parser(
        "reference",
        help="write the statistics of real images as an npz",
        usage="python -m fid reference SOURCE --out REF.npz [options]",
        description="Statistics of all images of a source in ADM's keys (mu, sigma, mu_s, sigma_s), with their number "
        "and where they come from. The same command goes on where it stopped, in any number of processes.",
        epilog="example: python -m fid reference imagenet/train --crop 256 --out imagenet256.npz",
    )
    reference.add_argument("source", help="folder of images, tar or parquet files, an npz of images, or `digits`")
    reference.add_argument(
        "--keep-images", type=int, default=0, metavar="N", help="also keep N images, for pr and kid (ADM: 10000)"
    )
    compare = commands.add_parser(
        "compare",
        help="results side by side, with intervals over seeds and a bar chart",
        description="Differences from the first result. Each argument is one model: a result, or the results of "
        "several seeds joined by commas. Results of other references, networks or numbers of images are refused.",
        epilog="example: python -m fid compare mhsa0.json,mhsa1.json vca0.json,vca1.json --out chart.png",
    )
    compare.add_argument("results", nargs="+", metavar="A.json[,B.json...]", help="results of `python -m fid score`")
    compare.add_argument(
        "--varying",
        action="append",
        default=[],
        metavar="KEY",
        help="a setting that may differ since it is what you compare, such as sampling.guidance",
    )
    compare.add_argument("--out", type=Path, default=Path("compare.png"), help="the chart (default: compare.png)")
    runs = commands.add_parser(
        "compare-runs",
        help="train, score and report the same run under several attentions and seeds",
        description="Trains every row of an experiment with every seed, scores all alike, and writes a report: tables "
        "with intervals, curves, grids side by side from the same noise. Finished runs are not trained again.",
        epilog="example: python -m fid compare-runs configs/experiments/digits.yaml --out docs/digits",
    )
    runs.add_argument("experiment", type=Path, help="a YAML file: base, families, rows, controls, seeds")
    runs.add_argument("--out", type=Path, required=True, help="folder of the report and of each run's result")
    runs.add_argument("--seeds", help="other seeds than the file's, such as 0,1,2,3,4")
    runs.add_argument("--jobs", type=int, default=1, help="runs at a time; cores are divided among them")
    runs.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="where run folders go")
    runs.add_argument("--report-only", action="store_true", help="train nothing; report what is there")
    golden = commands.add_parser(
        "golden",
        help="check this installation against ADM's published numbers",
        description="Scores ADM's published samples against its ImageNet 256x256 reference and compares with the "
        "values of ADM's own evaluator: FID 3.942, sFID 6.140, IS 215.9, precision 0.826, recall 0.530. Hours on a "
        "CPU, minutes on a GPU; needs 12 GB for the two files.",
    )
    golden.add_argument("reference", type=Path, help="VIRTUAL_imagenet256_labeled.npz")
    golden.add_argument("samples", type=Path, help="admnet_guided_upsampled_imagenet256.npz")
    for command in (score, reference):
        command.add_argument(
            "--crop", type=int, help="side to centre-crop real images to (default: a model's own size)"
        )
        command.add_argument("--extractor", help=EXTRACTORS)
    for command in (score, reference, golden):
        command.add_argument("--extractor-weights", type=Path, help="file with the extractor's weights, when offline")
        command.add_argument("--batch-size", type=int, default=64, help="changes memory and speed, not the result")
        command.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    score.add_argument("--out", type=Path, help="result JSON (default: score.json in the run's scores/ or the folder)")
    reference.add_argument("--out", type=Path, required=True, help="the npz to write")
    golden.add_argument("--out", type=Path, default=Path("golden.json"), help="result (default: golden.json)")
    # Subparsers cannot take positionals between options, so the overrides are what is left over.
    arguments, overrides = parser.parse_known_args()
    arguments.overrides = overrides
    for argument in overrides:
        if arguments.command != "score" or argument.startswith("-") or "=" not in argument:
            parser.error(f"unrecognized argument: {argument}")
    return arguments


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C; 143 SIGTERM."""
    arguments = parse_arguments()
    # A scheduler's stop ends like Ctrl-C does: what has been collected is written down first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def run() -> None:
        # Imported here, so that --help does not wait for torch.
        if arguments.command == "score":
            from fid.score import score_command

            score_command(arguments)
        elif arguments.command == "compare":
            from fid.compare import compare_command

            compare_command(arguments)
        elif arguments.command == "compare-runs":
            from fid.experiment.commands import compare_runs_command

            compare_runs_command(arguments)
        elif arguments.command == "golden":
            from fid.golden import golden_command

            golden_command(arguments)
        else:
            from fid.make_reference import reference_command

            reference_command(arguments)

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
