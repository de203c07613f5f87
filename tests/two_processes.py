"""What tests want to know of two processes: `torchrun -m tests.two_processes FOLDER`, once for all of them.

Every process writes FOLDER/rank_0.json or rank_1.json. The last thing it does is to raise an error on one of them.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_runs import tiny_config
from tests.training_parts import (
    Watched,
    at_losses,
    double_precision,
    raising,
    sample_ids,
    sharded_on_the_cpu,
    spoil,
)
from vcagen import run, training
from vcagen.bad_steps import NotFiniteError
from vcagen.signals import Interrupted
from vcagen.training import train

PRINTED = ("train.log_every=10", "train.checkpoint_every=99", "train.preview_every=99", "train.warmup_steps=20")
WATCHED = ("train.max_steps=3", "train.label_dropout=0.5", "train.global_batch_size=16")
DOUBLE = ("train.max_steps=3", "train.gradient_clip=0.05", "train.learning_rate=0.1", "train.warmup_steps=2")
EMA = ("model.attention.name=mhsa", "train.max_steps=5", "train.checkpoint_every=1", "train.keep_checkpoints=9")
SHARDED = ("train.max_steps=6", "train.checkpoint_every=99", "train.gradient_clip=0.5", "train.preview_every=6")
EPOCHS = ("train.global_batch_size=4", "train.max_steps=48")  # 3 epochs of 64 samples


def watched(run_dir: Path, *overrides: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        seen = Watched(patch)
        first_weights: list[float] = []

        def prepare(*arguments: Any) -> Any:
            ready, first_step = run.prepare_run(*arguments)
            first_weights.append(sum(float(p.double().abs().sum()) for p in ready.raw_model.parameters()))
            return ready, first_step

        patch.setattr(training, "prepare_run", prepare)
        train(tiny_config(run_dir, *WATCHED, *overrides))
    return vars(seen) | {"first_weights": first_weights}


def stopped(run_dir: Path, rank: int) -> dict[str, int | str]:
    """The second process gets a signal in step 5."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            at_losses(patch, {5}, lambda _: os.kill(os.getpid(), signal.SIGUSR1))
        try:
            train(tiny_config(run_dir, "train.checkpoint_every=99"))
        except Interrupted as interrupted:
            return {"exit_code": interrupted.exit_code, "message": str(interrupted)}
    raise AssertionError("the signal did not stop the run")


def not_finite(run_dir: Path, rank: int) -> str:
    """A sample of the second process has no finite loss in step 3, and from step 6 on."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            at_losses(patch, {3, *range(6, 20)}, spoil)
        try:
            train(tiny_config(run_dir, "train.max_bad_steps=2", "train.checkpoint_every=4"))
        except NotFiniteError as error:
            return str(error)
    raise AssertionError("nothing stopped the run")


def sharded(folder: Path, rank: int) -> dict[str, Any]:
    """FSDP2: a run of its own, the middle of a run of one process, and a run that goes wrong."""
    shares: list[float] = []

    def prepare(*arguments: Any) -> Any:
        ready, first_step = run.prepare_run(*arguments)
        for parameters in (ready.raw_model.parameters(), ready.ema.module.parameters()):
            sizes = [(p.to_local().numel(), p.numel()) for p in parameters]
            shares.append(sum(local for local, _ in sizes) / sum(whole for _, whole in sizes))
        return ready, first_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "prepare_run", prepare)
        with sharded_on_the_cpu():
            train(tiny_config(folder / "sharded straight", *SHARDED))
            message = not_finite(folder / "not finite sharded", rank)
        with sharded_on_the_cpu(cpu_ram_efficient_loading=True):
            halves = ("train.gradient_accumulation_steps=2", "model.gradient_checkpointing=true")
            train(tiny_config(folder / "sharded middle", *SHARDED, *halves, "train.max_steps=4"))
    return {"shares": shares, "message": message}


def found_out(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    train(tiny_config(folder / "printed", *PRINTED, "train.max_steps=13"))  # one process trained it to step 7
    train(tiny_config(folder / "printed straight", *PRINTED, "train.max_steps=25"))
    found["watched"] = [watched(folder / f"watched {n}", f"seed={seed}") for n, seed in enumerate([0, 0, 1])]
    with double_precision(num_samples=22) as norms:
        train(tiny_config(folder / "double", *DOUBLE, "train.gradient_accumulation_steps=2"))
    found["norms"] = norms
    for name in ("plain", "compiled"):
        train(tiny_config(folder / "ema" / name, *EMA, f"train.compile={str(name == 'compiled').lower()}"))
    found["ids"] = [
        sample_ids(tiny_config(folder / "ids", *EPOCHS, f"train.num_workers={workers}"), first_step)
        for workers, first_step in [(0, 0), (0, 21), (2, 16)]
    ]
    found["stopped"] = stopped(folder / "stopped", rank)
    found["sharded"] = sharded(folder, rank)
    found["not finite"] = not_finite(folder / "not finite", rank)
    return found


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Accelerator, "end_training", lambda _: None)  # it would end what connects the processes
        (folder / f"rank_{rank}.json").write_text(json.dumps(found_out(folder, rank)))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            at_losses(patch, {6}, raising(ValueError("seven.png: cannot be read")))
        try:
            train(tiny_config(folder / "raised", "train.checkpoint_every=99"))
        except Interrupted as interrupted:
            sys.exit(str(interrupted))


if __name__ == "__main__":
    from vcagen.commands import exit_code

    sys.exit(exit_code(lambda: main(Path(sys.argv[1]))))
