"""Writing checkpoints: killed at every moment of it, and told about."""

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny_runs import assert_same_run, tiny_config
from vcagen import checkpoint
from vcagen.benchmark import soak
from vcagen.checkpoint import list_checkpoints
from vcagen.models.transformer import DiffusionTransformer
from vcagen.training import train


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    train(tiny_config(run_dir))
    return run_dir


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(original: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    original(*arguments, **settings)
    path = Path(arguments[1])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    kill()


def half_removed(original: Callable[..., Any], folder: Path, **__: Any) -> None:
    original(folder / "raw")
    kill()


def before(*_: Any, **__: Any) -> None:
    kill()


def after(original: Callable[..., Any], *arguments: Any, **settings: Any) -> None:
    original(*arguments, **settings)
    kill()


@pytest.mark.parametrize(
    ("owner", "name", "what", "where", "newest"),
    [
        (DiffusionTransformer, "save_pretrained", before, ".step_0000008/transformer", 4),
        (DiffusionTransformer, "save_pretrained", after, ".step_0000008/raw", 4),
        (checkpoint, "save_file", half_written, ".step_0000008/optimizer", 4),
        (checkpoint, "write_json", before, ".step_0000008/state", 4),
        (checkpoint.os, "replace", before, "checkpoints/step_0000008", 4),
        (checkpoint.os, "replace", after, "checkpoints/step_0000008", 8),
        (checkpoint.shutil, "rmtree", half_removed, ".step_0000004", 8),
    ],
    ids=["no file", "weights", "half a file", "all but the state", "before the rename", "after it", "old half removed"],
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_newest_whole_step(
    straight: Path, tmp_path: Path, owner: Any, name: str, what: Callable[..., Any], where: str, newest: int
) -> None:
    process = os.fork()
    if process == 0:  # a copy of this process, for the kill
        original = getattr(owner, name)

        def patched(*arguments: Any, **settings: Any) -> Any:
            if any(where in str(argument) for argument in arguments):
                return what(original, *arguments, **settings)
            return original(*arguments, **settings)

        setattr(owner, name, patched)
        try:
            train(tiny_config(tmp_path, "train.keep_checkpoints=1"))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert list_checkpoints(tmp_path)[-1][0] == newest
    train(tiny_config(tmp_path, "train.keep_checkpoints=1"))
    assert_same_run(tmp_path, straight)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0000012"]


def test_every_checkpoint_tells_its_size_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tiny_config(tmp_path))
    found = re.findall(r"step (\d+): checkpoint of ([\d.]+) MB written in ([\d.]+) s", capsys.readouterr().out)
    assert [int(step) for step, _, _ in found] == [4, 8, 12]
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoints/step_0000012").rglob("*") if path.is_file())
    assert float(found[-1][1]) == pytest.approx(size / 1e6, abs=0.06)


def test_the_soak_finds_a_difference_in_one_value(straight: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "other"
    shutil.copytree(straight, run_dir)
    assert soak.differences(straight, run_dir) == []
    path = run_dir / "checkpoints/step_0000012/optimizer.safetensors"
    tensors = load_file(path)
    tensors["exp_avg.x_embedder.proj.bias"][3] += 1e-9
    save_file(tensors, path)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:6] + lines[7:]))
    assert soak.differences(straight, run_dir) == [
        "other: optimizer.safetensors: exp_avg.x_embedder.proj.bias",
        "other: loss of step 7",
    ]
