"""Updates whose outcome the host reads one step late, as on a GPU, against those that are read at once."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_runs import assert_same_run, losses, rows, tensors_of, tiny_config
from tests.training_parts import at_losses, spoil
from vcagen import updates
from vcagen.checkpoint import list_checkpoints
from vcagen.training import train
from vcagen.updates import Updates

WINDOWS = ("train.log_every=5", "train.checkpoint_every=12")  # so that an update can be open from step to step


@pytest.fixture
def _reading_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_skips_by_itself", lambda _: True)


def train_both_ways(folder: Path, *settings: str, bad: tuple[int, ...] = ()) -> tuple[Path, Path]:
    """The same run, its updates read at once and late."""
    with pytest.MonkeyPatch.context() as patch:
        at_losses(patch, bad, spoil)
        train(tiny_config(folder / "at_once", *WINDOWS, *settings))
    with pytest.MonkeyPatch.context() as patch:
        at_losses(patch, bad, spoil)
        patch.setattr(updates, "_skips_by_itself", lambda _: True)
        train(tiny_config(folder / "late", *WINDOWS, *settings))
    return folder / "late", folder / "at_once"


def test_reading_late_changes_nothing(tmp_path: Path) -> None:
    # A preview and a checkpoint lie between two rows.
    late, at_once = train_both_ways(tmp_path, "train.preview_every=4", "train.checkpoint_every=8")
    assert_same_run(late, at_once)
    assert list(losses(late)) == [5, 8, 10, 12]
    for name in ("0000004", "0000008", "0000012"):
        previews = [(run / f"previews/step_{name}.png").read_bytes() for run in (late, at_once)]
        assert previews[0] == previews[1]


@pytest.mark.parametrize("bad", [(1,), (5,), (6, 7), (12,)])
def test_a_bad_update_is_skipped_by_the_optimiser_itself(tmp_path: Path, bad: tuple[int, ...]) -> None:
    late, at_once = train_both_ways(tmp_path, bad=bad)
    assert_same_run(late, at_once)
    for run in (late, at_once):
        tensors = tensors_of(list_checkpoints(run)[-1][1])
        assert tensors["optimizer.safetensors:step.x_embedder.proj.bias"] == 12 - len(bad)
        assert sum(row["bad_steps"] for row in rows(run).values()) == len(bad)


@pytest.mark.usefixtures("_reading_late")
def test_a_run_of_bad_updates_ends_at_the_one_that_was_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_losses(monkeypatch, range(6, 1000), spoil)
    with pytest.raises(ValueError, match="step 8: 3 updates in a row were not finite"):
        train(tiny_config(tmp_path, *WINDOWS, "train.checkpoint_every=4", "train.max_bad_steps=3"))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]


@pytest.mark.usefixtures("_reading_late")
def test_an_error_while_an_update_is_open_loses_no_step(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        at_losses(patch, {8}, fail)
        with pytest.raises(OSError, match="Input/output"):
            train(tiny_config(tmp_path / "resumed", *WINDOWS))
    assert [step for step, _ in list_checkpoints(tmp_path / "resumed")] == [7]
    train(tiny_config(tmp_path / "resumed", *WINDOWS))
    train(tiny_config(tmp_path / "straight", *WINDOWS))
    ours, theirs = (tensors_of(list_checkpoints(tmp_path / name)[-1][1]) for name in ("resumed", "straight"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Looks(TorchDispatchMode):
    """Counts the times that a number is taken out of a tensor, for which a host waits for its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_reading_late")
@pytest.mark.parametrize("variant", ["SiT-tiny/2", "DiT-tiny/2"])
def test_no_number_of_an_update_is_looked_at_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    looks = []
    passes = Updates._passes
    at_work: list[Looks] = []

    def counted(self: Updates, batches: Iterator[updates.Batch]) -> Any:
        # From the passes of a step to those of the next.
        if at_work:
            looks.append(at_work[-1].count)
            at_work.pop().__exit__(None, None, None)
        at_work.append(Looks())
        at_work[-1].__enter__()
        return passes(self, batches)

    monkeypatch.setattr(Updates, "_passes", counted)
    sampler = "sampler.name=ddim" if variant.startswith("DiT") else "sampler.name=euler"
    settings = ("train.log_every=99", "train.checkpoint_every=99", "train.preview_every=99", "sampler.num_steps=2")
    try:
        train(tiny_config(tmp_path, f"model.variant={variant}", sampler, *settings, "train.max_steps=6"))
    finally:
        while at_work:
            at_work.pop().__exit__(*sys.exc_info())
    # One look, at what came of the step before, which was copied for it. (The first look starts the data loader.)
    assert looks == [1, 1, 1, 1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for_between_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Updates.update

    def strict(self: Updates, step: int, batches: Iterator[updates.Batch]) -> None:
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")  # the first steps make what is kept
        try:
            update(self, step, batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Updates, "update", strict)
    train(tiny_config(tmp_path, "train.log_every=99", "train.checkpoint_every=99"))
