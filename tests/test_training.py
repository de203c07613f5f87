import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.tiny_runs import ROOT, assert_same_run, losses, run_train, tensors_of, tiny_config, train_command
from tests.training_parts import at_losses, precision_of_its_own, spoil
from vcagen import run, training
from vcagen.checkpoint import list_checkpoints
from vcagen.data.order import TrainingOrder
from vcagen.files import locked
from vcagen.pipeline_folder import WEIGHTS_FILE
from vcagen.training import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_config(run_dir))
    return run_dir


def test_a_run_leaves_everything_behind(finished: Path) -> None:
    assert sorted(losses(finished)) == list(range(1, 13))
    assert [step for step, _ in list_checkpoints(finished)] == [8, 12]  # keep_checkpoints=2
    assert (finished / "run.yaml").read_text() == (finished / "checkpoints/step_0000012/run.yaml").read_text()
    for picture in ["loss.png", "previews/step_0000012.png"]:
        assert Image.open(finished / picture).size[0] > 50
    assert not [path for path in finished.rglob("*") if path.suffix in (".pkl", ".bin", ".pt")]
    assert not list((finished / "checkpoints").glob(".*"))


def test_weights_ema_and_optimiser_all_move(finished: Path) -> None:
    tensors = tensors_of(finished / "checkpoints/step_0000012")
    name = "blocks.1.attn.qkv.weight"
    raw = tensors[f"raw/diffusion_pytorch_model.safetensors:{name}"]
    ema = tensors[f"transformer/diffusion_pytorch_model.safetensors:{name}"]
    assert 0 < (raw - ema).abs().max() < 0.1
    assert tensors[f"optimizer.safetensors:exp_avg.{name}"].abs().max() > 0
    assert tensors[f"optimizer.safetensors:step.{name}"] == 12


@pytest.mark.parametrize(
    "overrides",
    [(), ("train.num_workers=2", "train.gradient_accumulation_steps=4")],
    ids=["plain", "two workers, four micro-batches"],
)
def test_a_run_resumed_in_a_new_process_equals_an_uninterrupted_one(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    settings = ("train.max_steps=20", "train.warmup_steps=15", "train.gradient_clip=0.5", *overrides)
    train(tiny_config(tmp_path / "straight", *settings))
    train(tiny_config(tmp_path / "resumed", *settings, "train.max_steps=10"))
    result = run_train(tmp_path / "resumed", *settings)
    assert "going on from step 10\nchanged since then: train.max_steps was 10, now 20\n" in result.stdout
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


def test_the_average_goes_on_from_its_own_place(tmp_path: Path) -> None:
    """One weight takes given values for 50 updates; a new process adds the 51st."""
    name = "final_layer.linear.weight"
    with contextlib.ExitStack() as stack:
        ready, _ = run.prepare_run(tiny_config(tmp_path), stack)
        parameters = dict(ready.raw_model.named_parameters())
        assert not any(p.requires_grad for p in ready.ema.parameters())
        optimised = {p.data_ptr() for group in ready.optimizer.param_groups for p in group["params"]}
        assert optimised == {p.data_ptr() for p in parameters.values() if p.requires_grad}
        assert not optimised & {p.data_ptr() for p in ready.ema.parameters()}
        expected = torch.zeros(8, 32)  # DiT's initial value
        for update in range(1, 51):
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            ready.optimizer.step()
            parameters[name].data.fill_(math.sin(update))
            ready.ema.update_parameters(ready.raw_model)
            expected += 0.01 * 0.99 ** (50 - update) * math.sin(update)
        assert training._save(ready, 50)
    assert run_train(tmp_path, "train.max_steps=51").returncode == 0
    tensors = tensors_of(tmp_path / "checkpoints/step_0000051")
    raw = tensors[f"raw/{WEIGHTS_FILE}:{name}"]
    assert torch.allclose(raw, torch.tensor(math.sin(50)), atol=0.01)  # within a step of the optimiser
    assert torch.allclose(tensors[f"transformer/{WEIGHTS_FILE}:{name}"], 0.99 * expected + 0.01 * raw, atol=1e-6)
    assert json.loads((tmp_path / "checkpoints/step_0000051/state.json").read_text())["ema_updates"] == 51


def test_resume_crosses_the_end_of_an_epoch(tmp_path: Path) -> None:
    # 1,797 digits in batches of 599: epochs end after steps 3, 6, ...
    settings = ("train.global_batch_size=599", "train.max_steps=7", "train.checkpoint_every=1")
    train(tiny_config(tmp_path / "straight", *settings))
    for max_steps in (2, 3, 5, 7):
        train(tiny_config(tmp_path / "resumed", *settings, f"train.max_steps={max_steps}"))
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")


def test_kill_minus_nine_loses_only_what_came_after_the_checkpoint(finished: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(train_command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "checkpoints/step_0000004").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    # As if the kill had come in the middle of a line and of a checkpoint.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    (tmp_path / "checkpoints/.step_0000008").mkdir(exist_ok=True)
    assert run_train(tmp_path).returncode == 0
    assert_same_run(tmp_path, finished)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_write_a_checkpoint_and_the_run_goes_on(
    tmp_path: Path, number: int, exit_code: int, num_workers: int
) -> None:
    settings = ("train.max_steps=4000", "train.checkpoint_every=4000", "train.preview_every=4000")
    process = subprocess.Popen(
        train_command(tmp_path, *settings, f"train.num_workers={num_workers}"),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number)  # as a terminal does: the data workers get it too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == exit_code
    (step, _), *more = list_checkpoints(tmp_path)
    assert not more
    name = signal.Signals(number).name
    assert f"stopped by {name} after step {step}; the same command goes on from step {step}" in errors
    train(tiny_config(tmp_path, f"train.max_steps={step + 2}"))
    assert sorted(losses(tmp_path)) == list(range(1, step + 3))


def test_accumulation_changes_no_update(finished: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "train.gradient_accumulation_steps=4"))
    plain, accumulated = losses(finished), losses(tmp_path)
    assert accumulated.keys() == plain.keys()
    for step in plain:
        assert accumulated[step] == pytest.approx(plain[step], rel=1e-5)


def test_a_launchers_accumulation_changes_nothing(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    train(tiny_config(tmp_path))
    assert_same_run(tmp_path, finished)


def test_printed_loss_is_the_mean_since_the_last_print(finished: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "train.log_every=5"))
    every = losses(finished)
    rows = losses(tmp_path)
    borders = [0, 4, 5, 8, 10, 12]  # a checkpoint closes a window too
    assert list(rows) == borders[1:]
    for start, end in pairwise(borders):
        expected = sum(every[step] for step in range(start + 1, end + 1)) / (end - start)
        assert rows[end] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("attention", ["mhsa", "vca", "differential"])
@pytest.mark.parametrize("variant", ["DiT-tiny/2", "SiT-tiny/2"])
def test_every_attention_and_objective_learns(tmp_path: Path, variant: str, attention: str) -> None:
    sampler = "ddim" if variant.startswith("DiT") else "euler"
    overrides = (
        *(f"model.variant={variant}", f"sampler.name={sampler}", f"model.attention.name={attention}"),
        *("sampler.num_steps=2", "train.max_steps=60", "train.global_batch_size=16", "train.learning_rate=3e-3"),
        *("train.checkpoint_every=60", "train.preview_every=60"),
    )
    train(tiny_config(tmp_path, *overrides))
    values = list(losses(tmp_path).values())
    assert sum(values[-10:]) < 0.75 * sum(values[:10])


def test_bf16_trains_and_keeps_float32_weights(finished: Path, tmp_path: Path) -> None:
    with precision_of_its_own():
        train(tiny_config(tmp_path, "train.precision=bf16", "train.max_steps=3"))
    assert losses(tmp_path)[3] != losses(finished)[3]
    assert losses(tmp_path)[3] == pytest.approx(losses(finished)[3], rel=0.02)
    tensors = tensors_of(list_checkpoints(tmp_path)[-1][1])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny_config(tmp_path, "train.trackers=[tensorboard]", "train.max_steps=3"))
    (folder,) = (path.parent for path in (tmp_path / "vcagen").rglob("events*") if path.parent.name == "vcagen")
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert logged == pytest.approx(losses(tmp_path), rel=1e-6)


def test_gradient_checkpointing_changes_no_loss(finished: Path, tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "model.gradient_checkpointing=true"))
    assert losses(tmp_path) == losses(finished)


def test_lasting_nan_stops_the_run_with_the_last_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_losses(monkeypatch, range(6, 1000), spoil)
    with pytest.raises(ValueError, match=r"step 8: 3 updates in a row were not finite, .*step_0000004") as error:
        train(tiny_config(tmp_path, "train.max_bad_steps=3"))
    third = TrainingOrder(1797, 0, 8, 8, 0, 1, first_step=5, max_steps=8)
    named = [batch[2][0] for batch in third]  # of steps 6, 7, 8
    assert f"step 6: the loss of samples {named[0]} is not finite; update skipped" in capsys.readouterr().err
    assert f"at last the loss of samples {named[2]};" in str(error.value)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]
    for tensor in tensors_of(tmp_path / "checkpoints/step_0000004").values():
        assert torch.isfinite(tensor).all()


def test_one_bad_batch_costs_one_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_losses(monkeypatch, {6}, spoil)
    train(tiny_config(tmp_path))
    tensors = tensors_of(tmp_path / "checkpoints/step_0000012")
    assert tensors["optimizer.safetensors:step.x_embedder.proj.bias"] == 11
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]


def test_a_preview_that_fails_is_only_missed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write_grid", broken)
    train(tiny_config(tmp_path, "train.preview_every=3"))
    assert "step 6: no preview ([Errno 28] No space left on device)" in capsys.readouterr().err
    assert_same_run(tmp_path, finished)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(ValueError, match=r"step 12: trained to the end, but not saved; there is no checkpoint"):
        train(tiny_config(tmp_path))


def test_an_error_between_checkpoints_loses_no_step(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = training.MetricsFile.write

    def broken(self: training.MetricsFile, row: dict[str, float]) -> None:
        if row["step"] == 7:
            raise OSError(28, "No space left on device")
        write(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(training.MetricsFile, "write", broken)
        with pytest.raises(OSError, match="No space left"):
            train(tiny_config(tmp_path))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4, 7]
    train(tiny_config(tmp_path))
    missed = {step: loss for step, loss in losses(finished).items() if step != 7}
    assert losses(tmp_path) == missed


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ValueError, match="another process is training here"):
        train(tiny_config(tmp_path))
    train(tiny_config(tmp_path, "train.max_steps=1"))


def test_a_full_disk_during_a_save_keeps_the_one_before(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file = training.checkpoints.save_file
    calls = 0

    def full(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(28, "No space left on device")
        save_file(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(training.checkpoints, "save_file", full)
    train(tiny_config(tmp_path))
    assert "step 8: no checkpoint written" in capsys.readouterr().err
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4, 12]
    assert_same_run(tmp_path, finished)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.num_heads=5"], "hidden_size=32 is not divisible by model.num_heads=5"),
        (["model.attention.contrast_grid=[5,2]"], "contrast_grid=[5, 2] is larger than the token grid [4, 4]"),
        (["model.patch_size=3"], "8x8 do not divide into patches of 3x3"),
        (["train.gradient_accumulation_steps=3"], "does not divide into 1 processes times"),
        (["train.trackers=[wandb9]"], "'wandb9' is not installed or not known"),
        (["train.precision=fp16"], "fp16 needs a GPU"),
        (
            ["train.label_dropout=0"],
            "guidance.scale=1.5 needs a null label, which train.label_dropout=0 does not train",
        ),
        (["train.learning_rate=.inf"], "train.learning_rate"),
    ],
)
def test_what_cannot_work_is_said_before_the_run_folder_is_made(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(ValueError, match=r".") as error:
        train(tiny_config(run_dir, *overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not run_dir.exists()


def test_unwritable_run_folder_is_one_line_and_exit_code_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run_train(tmp_path / "file/run")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert f"error: {tmp_path}/file/run: cannot be written" in result.stderr


def test_a_disk_without_room_is_seen_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.statvfs(tmp_path)
    fields = [*status]
    fields[4] = 2  # two free blocks
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(ValueError, match=r"GB free on this disk, but .* GB are needed"):
        train(tiny_config(tmp_path))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.attention.name=mhsa", "model.attention.name was 'vca', now 'mhsa'"),
        ("seed=5", "seed was 0, now 5"),
        ("train.learning_rate=1e-3", "train.learning_rate was 0.003, now 0.001"),
    ],
)
def test_other_settings_do_not_resume(finished: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match="trained with other settings") as error:
        train(tiny_config(finished, "train.max_steps=20", override))
    assert message in str(error.value)


def test_settings_are_compared_key_by_key_and_what_may_change_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(tmp_path, "train.max_steps=1"))
    changes = ("train.log_every=2", "sampler.name=heun", "train.max_steps=3")
    with pytest.raises(ValueError, match="trained with other settings") as error:
        train(tiny_config(tmp_path, *changes, "train.ema_decay=0.5", "train.betas=[0.5,0.9]"))
    refused = "(train.betas was (0.9, 0.999), now (0.5, 0.9); train.ema_decay was 0.99, now 0.5)"
    assert refused in str(error.value)
    capsys.readouterr()
    train(tiny_config(tmp_path, *changes))
    allowed = "sampler.name was 'euler', now 'heun'; train.log_every was 1, now 2; train.max_steps was 1, now 3"
    assert f"going on from step 1\nchanged since then: {allowed}\n" in capsys.readouterr().out


def test_a_finished_run_has_nothing_to_do(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "metrics.jsonl").read_text()
    train(tiny_config(finished))
    assert "trained to step 12 already" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_text() == before


def test_other_classes_do_not_resume(finished: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    path = run_dir / "checkpoints/step_0000012/state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"class_names": [*"012", "three", *"456789"]}))
    with pytest.raises(ValueError, match="class 3 was 'three' in training, but is '3' in the data now"):
        train(tiny_config(run_dir, "train.max_steps=20"))


@pytest.mark.parametrize("damage", ["missing", "truncated", "renamed key"])
@pytest.mark.parametrize("part", [f"raw/{WEIGHTS_FILE}", f"transformer/{WEIGHTS_FILE}", "optimizer.safetensors"])
def test_a_damaged_checkpoint_does_not_resume(finished: Path, tmp_path: Path, part: str, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    path = run_dir / "checkpoints/step_0000012" / part
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        tensors = load_file(path)
        name = next(name for name in tensors if "qkv.weight" in name)
        tensors[f"{name}_old"] = tensors.pop(name)
        save_file(tensors, path)
    with pytest.raises(ValueError, match=r".") as error:
        train(tiny_config(run_dir, "train.max_steps=20"))
    assert str(path) in str(error.value)
    if damage == "renamed key":
        assert f"missing {name}" in str(error.value)
        assert f"unknown {name}_old" in str(error.value)
