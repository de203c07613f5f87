"""Settings of training beyond the papers' recipe."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_model
from tests.tiny_runs import ROOT, losses, tiny_config, train_command
from vcagen.checkpoint import list_checkpoints
from vcagen.models.layers import position_table
from vcagen.objectives import DiffusionConfig, DiffusionObjective, FlowConfig, FlowObjective
from vcagen.optimizer import build_optimizer
from vcagen.pipeline_folder import load_transformer
from vcagen.seeds import sample_generator
from vcagen.training import train


def times_of(config: FlowConfig, number: int = 4000) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def model(x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return x

    generators = [sample_generator(0, index) for index in range(number)]
    latents = torch.zeros(number, 1, 1, 1)
    FlowObjective(config).loss(model, latents, torch.zeros(number, dtype=torch.int64), generators)
    return seen[0]


def test_logit_normal_times_have_that_distribution_and_the_default_is_uniform() -> None:
    times = times_of(FlowConfig(timestep_sampling="logit_normal", logit_mean=0.5, logit_std=0.8))
    logits = torch.logit(times)
    assert logits.mean().item() == pytest.approx(0.5, abs=0.05)
    assert logits.std().item() == pytest.approx(0.8, abs=0.05)
    plain = times_of(FlowConfig())
    assert plain.mean().item() == pytest.approx(0.5, abs=0.02)
    assert plain.std().item() == pytest.approx(math.sqrt(1 / 12), abs=0.02)


def test_min_snr_weighs_as_the_paper_says_and_leaves_the_bound_alone() -> None:
    latents, noise = torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4)
    labels, timesteps = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 300, 999])

    def model(x: torch.Tensor, t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=1)

    plain = DiffusionObjective(DiffusionConfig())
    weighed = DiffusionObjective(DiffusionConfig(min_snr_gamma=5.0))
    first, second = (o.loss_at(model, latents, labels, timesteps, noise) for o in (plain, weighed))
    for row, timestep in enumerate(timesteps):
        product = math.prod(1 - (1e-4 + (0.02 - 1e-4) * i / 999) for i in range(int(timestep) + 1))
        snr = product / (1 - product)
        ratio = (second.parts["mse"] / first.parts["mse"])[row].item()
        assert ratio == pytest.approx(min(snr, 5) / snr, rel=1e-4)
    assert torch.equal(first.parts["vb"], second.parts["vb"])
    assert torch.allclose(second.loss, second.parts["mse"] + second.parts["vb"])


def test_betas_reach_the_optimizer() -> None:
    config = tiny_config(Path("x"), "train.betas=[0.8,0.95]").train
    assert all(group["betas"] == (0.8, 0.95) for group in build_optimizer(tiny_model(), config).param_groups)


def test_newest_and_every_mth_checkpoint_are_kept(tmp_path: Path) -> None:
    settings = ["train.checkpoint_every=2", "train.keep_checkpoints=2", "train.keep_every=6"]
    train(tiny_config(tmp_path, *settings, "train.max_steps=16"))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [6, 12, 14, 16]


def test_resume_must_and_never(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.resume=must, but there is no checkpoint to go on from; use auto"):
        train(tiny_config(tmp_path / "run", "train.resume=must"))
    train(tiny_config(tmp_path / "run", "train.resume=never", "train.max_steps=2"))
    with pytest.raises(ValueError, match=r"train.resume=never, but step_0000002 is there; choose another run_dir"):
        train(tiny_config(tmp_path / "run", "train.resume=never", "train.max_steps=4"))
    train(tiny_config(tmp_path / "run", "train.resume=must", "train.max_steps=4"))
    assert list_checkpoints(tmp_path / "run")[-1][0] == 4


def test_the_signal_of_schedulers_saves_and_ends(tmp_path: Path) -> None:
    command = train_command(tmp_path, "train.max_steps=100000", "train.checkpoint_every=100000")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "metrics.jsonl").exists() or not losses(tmp_path):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "stopped by SIGUSR1 after step" in errors
    assert list_checkpoints(tmp_path)


def test_rows_tell_what_a_run_is_doing(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "train.max_steps=2"))
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"loss", "learning_rate", "gradient_norm", "bad_steps", "images_per_second", "data_seconds"} <= row.keys()
    assert row["bad_steps"] == 0
    assert 0 <= row["data_seconds"] < 1 / row["steps_per_second"]
    assert row["images_per_second"] == pytest.approx(8 * row["steps_per_second"])


@pytest.mark.parametrize("how", ["recompute", "interpolate"])
def test_weights_of_another_resolution(tmp_path: Path, how: str) -> None:
    # Digits have 8x8 pixels: patches of 2 and of 1 give grids of 4x4 and 8x8, so the small model is made by hand.
    train(tiny_config(tmp_path / "small", "train.max_steps=1", "model.attention.name=mhsa"))
    folder = tmp_path / "small/checkpoints/step_0000001"
    small = load_transformer(folder)
    other = tiny_model(**(dict(small.config) | {"latent_size": (4, 6)}))
    tensors = small.state_dict() | {"pos_embed": position_table(32, (2, 3))}
    other.load_state_dict(tensors)
    other.save_pretrained(folder / "transformer")
    large = ["model.attention.name=mhsa", "train.max_steps=1", f"train.init_from={folder}", "train.learning_rate=1e-9"]
    with pytest.raises(ValueError, match=r"latent_size is \(4, 6\), here \(8, 8\)"):
        train(tiny_config(tmp_path / "large", *large))
    train(tiny_config(tmp_path / "large", *large, f"train.init_positions={how}"))
    found = load_transformer(tmp_path / "large/checkpoints/step_0000001", "raw").state_dict()
    assert torch.allclose(found["blocks.1.mlp.fc1.weight"], tensors["blocks.1.mlp.fc1.weight"], atol=1e-6)
    table = found["pos_embed"].unflatten(1, (4, 4))
    if how == "recompute":
        assert torch.equal(found["pos_embed"], position_table(32, (4, 4)))
    else:  # the corners stay where they were, and rows and columns are not swapped
        old = tensors["pos_embed"].unflatten(1, (2, 3))
        for row, column in [(0, 0), (0, -1), (-1, 0), (-1, -1)]:
            assert torch.allclose(table[0, row, column], old[0, row, column], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_stays_float32_under_half_precision(dtype: torch.dtype) -> None:
    """Timestep embedding, norms, lambda and loss; matrix products are in half precision."""
    model = tiny_model(attention={"name": "vca"}, learn_sigma=True)
    seen: dict[str, set[torch.dtype]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen.setdefault(name, set()).add(output.dtype)

        module.register_forward_hook(hook)

    for module in model.modules():
        kind = type(module).__name__
        if kind in ("LayerNorm", "LambdaWeight", "Linear"):
            watch(kind, module)
    inputs: list[torch.dtype] = []
    first = model.t_embedder.mlp[0]
    first.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].dtype))
    generators = [sample_generator(0, index) for index in range(2)]
    with torch.autocast("cpu", dtype=dtype):
        output = FlowObjective(FlowConfig()).loss(model, torch.randn(2, 4, 8, 8), torch.tensor([1, 2]), generators)
    assert seen == {"LayerNorm": {torch.float32}, "LambdaWeight": {torch.float32}, "Linear": {dtype}}
    assert inputs == [torch.float32]
    assert output.loss.dtype == torch.float32


def test_curves_of_several_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tiny_config(tmp_path / name, "train.max_steps=2"))

    def curves(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vcagen.curves", *map(str, arguments), "--out", str(tmp_path / "curves.png")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert curves(tmp_path / "a", tmp_path / "b", "--column", "gradient_norm").returncode == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for wrong, message in [
        (("c",), "c/metrics.jsonl: missing; expected a run"),
        (("a", "--column", "los"), "no column"),
    ]:
        result = curves(tmp_path / wrong[0], *wrong[1:])
        assert result.returncode == 1
        assert message in result.stderr
