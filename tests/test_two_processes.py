"""Two real processes against one: they run tests/two_processes.py once, and leave what is looked at here."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_runs import ROOT, losses, rows, tensors_of, tiny_config
from tests.training_parts import Watched, double_precision, sample_ids
from tests.two_processes import DOUBLE, EMA, EPOCHS, PRINTED, SHARDED, WATCHED
from vcagen.checkpoint import list_checkpoints
from vcagen.training import train

HALVES = ("train.gradient_accumulation_steps=2",)
KINDS = ("plain", "compiled")


@dataclass(frozen=True)
class Both:
    folder: Path
    ranks: list[dict[str, Any]]
    result: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("two")
    train(tiny_config(folder / "printed", *PRINTED, *HALVES, "train.max_steps=7"))
    train(tiny_config(folder / "sharded middle", *SHARDED, *HALVES, "train.max_steps=2"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launcher, "tests.two_processes", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    files = [folder / f"rank_{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), result.stderr[-3000:]
    return Both(folder, [json.loads(file.read_text()) for file in files], result)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, 25 steps, every loss printed."""
    run_dir = tmp_path_factory.mktemp("one") / "straight"
    train(tiny_config(run_dir, *PRINTED, "train.max_steps=25", "train.log_every=1"))
    return run_dir


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in two micro-batches, which are summed as two processes are: bit for bit."""
    run_dir = tmp_path_factory.mktemp("one") / "halves"
    train(tiny_config(run_dir, *PRINTED, *HALVES, "train.max_steps=25"))
    return run_dir


@pytest.fixture(scope="module")
def layouts(both: Both, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Five steps: plain and compiled, in one process and in two."""
    folder = tmp_path_factory.mktemp("layouts")
    for name in KINDS:
        train(tiny_config(folder / name, *EMA, *HALVES, f"train.compile={str(name == 'compiled').lower()}"))
    return {f"{name} {n}": where / name for n, where in [(1, folder), (2, both.folder / "ema")] for name in KINDS}


def assert_equal_ends(ours: Path, theirs: Path) -> None:
    """Every tensor of the last checkpoints is bit-equal."""
    first, second = (tensors_of(list_checkpoints(run_dir)[-1][1]) for run_dir in (ours, theirs))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_printed_losses_are_means_over_all_samples_in_one_process_and_in_two(
    both: Both, straight: Path, halves: Path
) -> None:
    borders = [0, 10, 20, 25]  # the last window is not whole
    every, printed = losses(straight), losses(both.folder / "printed straight")
    assert list(printed) == borders[1:]
    for start, end in pairwise(borders):
        expected = sum(every[step] for step in range(start + 1, end + 1)) / (end - start)
        assert printed[end] == pytest.approx(expected, rel=1e-6)
    assert_equal_ends(both.folder / "printed straight", halves)


def test_a_run_goes_on_with_another_number_of_processes_and_back(both: Both, straight: Path, halves: Path) -> None:
    run_dir = both.folder / "printed"  # one process to step 7, two to step 13, one to the end
    assert [step for step, _ in list_checkpoints(run_dir)] == [7, 13]
    assert "going on from step 7" in both.result.stdout
    train(tiny_config(run_dir, *PRINTED, *HALVES, "train.max_steps=25"))
    borders = [0, 7, 10, 13, 20, 25]
    every, printed = rows(straight), rows(run_dir)
    assert list(printed) == borders[1:]
    for start, end in pairwise(borders):
        expected = sum(every[step]["loss"] for step in range(start + 1, end + 1)) / (end - start)
        assert printed[end]["loss"] == pytest.approx(expected, rel=1e-6)  # nothing carried over a border
        assert printed[end]["learning_rate"] == every[end]["learning_rate"]
        assert printed[end]["gradient_norm"] == pytest.approx(every[end]["gradient_norm"], rel=1e-4)
    assert_equal_ends(run_dir, halves)


def test_every_sample_has_randomness_of_its_own(both: Both, tmp_path: Path) -> None:
    watched = [rank["watched"] for rank in both.ranks]
    for run, again, other_seed in watched:
        assert run == again
        # Mirrors are drawn when a sample is read and again with its noise: the same.
        for start in range(0, len(run["mirrors"]), 16):
            batch = run["mirrors"][start : start + 16]
            assert batch[:8] == batch[8:]
        assert len({str(t) for t in run["times"]}) == len(run["times"]) == 3
        assert run["times"] != other_seed["times"]
    (first, _, other), (second, _, second_other) = watched
    assert first["first_weights"] == second["first_weights"]
    assert first["first_weights"] != other["first_weights"] == second_other["first_weights"]
    for what in ("times", "inputs", "drops"):
        for ours, theirs in zip(first[what], second[what], strict=True):
            assert ours != theirs
    assert first["mirrors"] != second["mirrors"]
    assert {True, False} == {drop for step in first["drops"] for drop in step} == set(first["mirrors"])
    # Seed 1 of the first process is not seed 0 of the second, nor any other one's.
    values = [value for rank in (first, second, other, second_other) for step in rank["times"] for value in step]
    assert len(set(values)) == len(values) == 4 * 3 * 8
    # One process gives the same sixteen samples the same.
    with pytest.MonkeyPatch.context() as patch:
        alone = Watched(patch)
        train(tiny_config(tmp_path, *WATCHED, "seed=0"))
    for what, values in vars(alone).items():
        if what == "mirrors":  # eight of each process, then the next step's
            halves = [first[what][start::16] for start in range(8)], [second[what][start::16] for start in range(8)]
            assert [values[start::32] for start in range(16)] == [*halves[0], *halves[1]]
        else:
            assert values == [a + b for a, b in zip(first[what], second[what], strict=True)]


def test_accumulation_and_processes_change_no_update(both: Both, tmp_path: Path) -> None:
    """float64, plain SGD, a clip at every step; 24 samples of 22, so that the last batch begins the next epoch."""
    ends, norms = [tensors_of(both.folder / "double/checkpoints/step_0000003")], [both.ranks[0]["norms"]]
    for accumulation in (1, 4):
        run_dir = tmp_path / f"{accumulation}"
        with double_precision(num_samples=22) as found:
            train(tiny_config(run_dir, *DOUBLE, f"train.gradient_accumulation_steps={accumulation}"))
        ends.append(tensors_of(run_dir / "checkpoints/step_0000003"))
        norms.append(found)
        assert json.loads((run_dir / "checkpoints/step_0000003/state.json").read_text())["ema_updates"] == 3
        rates = [row["learning_rate"] for row in rows(run_dir).values()]
        assert rates == [row["learning_rate"] for row in rows(both.folder / "double").values()] == [0.05, 0.1, 0.1]
    assert both.ranks[1]["norms"] == norms[0]
    for other in norms:
        assert len(other) == 3
        assert other == pytest.approx(norms[0], rel=1e-10)
        assert min(other) > 0.05  # each was clipped
    for end in ends[1:]:
        assert end.keys() == ends[0].keys()
        for name, tensor in end.items():
            assert tensor.dtype == torch.float64
            assert torch.allclose(tensor, ends[0][name], rtol=0, atol=1e-10), name


def test_the_average_is_the_formula_in_every_layout(layouts: dict[str, Path]) -> None:
    final = []
    for folder in layouts.values():
        raw, ema = [], []
        for step in range(1, 6):
            tensors = tensors_of(folder / f"checkpoints/step_{step:07d}")
            raw.append({k.split(":")[1]: v for k, v in tensors.items() if k.startswith("raw/")})
            ema.append({k.split(":")[1]: v for k, v in tensors.items() if k.startswith("transformer/")})
        assert raw[0].keys() == ema[0].keys()
        for name in raw[0]:
            expected = ema[0][name]
            for step in range(1, 5):
                expected = 0.99 * expected + 0.01 * raw[step][name]
                assert torch.allclose(ema[step][name], expected, atol=1e-7), name
        assert (ema[4]["final_layer.linear.weight"] - ema[0]["final_layer.linear.weight"]).abs().max() > 1e-6
        assert {row["ema_decay"] for row in rows(folder).values()} == {0.99}
        final.append(ema[4])
    for other in final[1:]:
        for name, tensor in other.items():
            assert torch.allclose(tensor, final[0][name], atol=1e-5), name


def test_compiled_blocks_train_alike_and_leave_no_trace_in_names(layouts: dict[str, Path]) -> None:
    tensors = {name: tensors_of(list_checkpoints(folder)[-1][1]) for name, folder in layouts.items()}
    for name, folder in layouts.items():
        assert losses(folder) == pytest.approx(losses(layouts["plain 1"]), rel=1e-5)
        assert tensors[name].keys() == tensors["plain 1"].keys()
        assert not any("module." in key or "_orig_mod" in key for key in tensors[name])


def test_the_order_of_samples_outlives_a_stop_and_other_process_counts(both: Both, tmp_path: Path) -> None:
    def whole(first_step: int, workers: int) -> list[list[int]]:
        return sample_ids(tiny_config(tmp_path, *EPOCHS, f"train.num_workers={workers}"), first_step)

    straight = whole(0, 0)
    flat = [index for batch in straight for index in batch]
    epochs = [flat[start : start + 64] for start in (0, 64, 128)]
    assert all(sorted(epoch) == list(range(64)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert whole(21, 2) == straight[21:]  # after step 5 of the second epoch
    assert whole(16, 0) == straight[16:]  # at its beginning
    for number, first_step in enumerate([0, 21, 16]):
        shares = [rank["ids"][number] for rank in both.ranks]
        assert [a + b for a, b in zip(*shares, strict=True)] == straight[first_step:]


def test_a_signal_to_one_process_stops_both_at_the_same_step(both: Both) -> None:
    first, second = (rank["stopped"] for rank in both.ranks)
    assert first == second
    assert first["exit_code"] == 138
    assert first["message"] == "stopped by SIGUSR1 after step 5; the same command goes on from step 5"
    assert [step for step, _ in list_checkpoints(both.folder / "stopped")] == [5]


def test_a_bad_sample_of_one_process_is_skipped_and_named_by_both(both: Both) -> None:
    first, second = (rank["not finite"] for rank in both.ranks)
    assert first == second
    assert "step 7: 2 updates in a row were not finite, at last the loss of samples " in first
    assert "the last good checkpoint is " in first
    assert both.result.stderr.count("step 3: the loss of samples ") == 2  # in this run and the one that is split
    run_dir = both.folder / "not finite"
    assert list(losses(run_dir)) == [1, 2, 4, 5]
    ((step, checkpoint),) = list_checkpoints(run_dir)
    assert step == 4
    tensors = tensors_of(checkpoint)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert tensors["optimizer.safetensors:step.x_embedder.proj.bias"] == 3


def test_split_weights_train_like_whole_ones_and_are_saved_whole(both: Both, tmp_path: Path) -> None:
    """FSDP2 in two processes; another run in one process to step 2, split to step 4, in one process to the end."""
    for rank in both.ranks:
        assert all(0.3 < share < 0.7 for share in rank["sharded"]["shares"])
        assert len(rank["sharded"]["shares"]) == 6  # weights and averages of three runs
        assert rank["sharded"]["message"] == rank["not finite"].replace("not finite/", "not finite sharded/")
    train(tiny_config(tmp_path, *SHARDED, *HALVES))
    middle = both.folder / "sharded middle"
    assert [step for step, _ in list_checkpoints(middle)] == [2, 4]
    train(tiny_config(middle, *SHARDED, *HALVES))
    expected = tensors_of(tmp_path / "checkpoints/step_0000006")
    for run_dir in (middle, both.folder / "sharded straight"):
        assert losses(run_dir) == pytest.approx(losses(tmp_path), rel=1e-6)
        found = tensors_of(run_dir / "checkpoints/step_0000006")
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-5), name
        assert (run_dir / "previews/step_0000006.png").exists()
    tensors = tensors_of(list_checkpoints(both.folder / "not finite sharded")[-1][1])
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())


def test_an_error_of_one_process_ends_both_with_its_message(both: Both) -> None:
    assert both.result.returncode != 0
    assert "error: seven.png: cannot be read" in both.result.stderr
    # The other one sees the connection end, or torchrun's signal before that.
    ends = r"(error: step 5: another process of this run ended, and said why|stopped by SIGTERM after step 5); the same"
    assert re.search(ends, both.result.stderr)
    assert [step for step, _ in list_checkpoints(both.folder / "raised")] == [5]  # nothing done is lost
