"""The command that runs an experiment and writes its report."""

import argparse

from fid.experiment.measure import measured
from fid.experiment.plan import plan_runs, read_experiment, run_config
from fid.experiment.report import write_report
from fid.experiment.train import train_all
from fid.reference import open_reference
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
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"--seeds {arguments.seeds}: one comes twice")
        experiment = experiment.model_copy(update={"seeds": seeds})
    out, runs = arguments.out, arguments.runs / arguments.experiment.stem
    require_writable(out)
    planned = plan_runs(experiment, experiment.seeds)
    configs = [run_config(arguments.experiment, experiment, run, runs) for run in planned]
    for reference in {config.score.reference for config in configs if config.score}:
        open_reference(reference, None)  # what cannot be scored is said now, not by every run
    if not arguments.report_only:
        train_all(arguments.experiment, experiment, planned, out, runs, arguments.jobs)
    write_report(arguments.experiment, experiment, out, measured(arguments.experiment, experiment, out))
    print(f"{out}/README.md: the report, with its pictures; {out}/report.json: its numbers")
