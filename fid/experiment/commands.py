"""The command that runs an experiment and writes its report."""

import argparse

from fid.experiment.measure import measured
from fid.experiment.plan import plan_runs, read_experiment
from fid.experiment.report import write_report
from fid.experiment.train import train_all
from vcagen.files import require_writable


def compare_runs_command(arguments: argparse.Namespace) -> None:
    """Trains what is missing, measures costs once, writes the report. See `python -m fid compare-runs --help`."""
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs}: must be at least 1")
    experiment = read_experiment(arguments.experiment)
    if arguments.seeds:
        try:
            seeds = tuple(int(seed) for seed in arguments.seeds.split(","))
        except ValueError as error:
            raise ValueError(f"--seeds {arguments.seeds}: expected whole numbers joined by commas") from error
        experiment = experiment.model_copy(update={"seeds": seeds})
    out, runs = arguments.out, arguments.runs / arguments.experiment.stem
    require_writable(out)
    if not arguments.report_only:
        train_all(arguments.experiment, experiment, plan_runs(experiment, experiment.seeds), out, runs, arguments.jobs)
    write_report(arguments.experiment, experiment, out, measured(arguments.experiment, experiment, out))
    print(f"{out}/README.md: the report, with its pictures; {out}/report.json: its numbers")
