"""What makes training fast or small leaves it what it is: 200 steps on digits, with and without."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_runs import losses, tiny_config
from tests.training_parts import double_precision, precision_of_its_own
from vcagen.attention.lambda_weight import ScaledRMSNorm
from vcagen.attention.vca import VCA
from vcagen.benchmark import losses as benchmark
from vcagen.benchmark.__main__ import main
from vcagen.config import load_config
from vcagen.models import layers
from vcagen.models.layers import PatchEmbed
from vcagen.training import train

STEPS = 200
LONG = (
    *(f"train.max_steps={STEPS}", f"train.checkpoint_every={STEPS}", f"train.preview_every={STEPS}"),
    *("model.attention.name=vca", "train.learning_rate=3e-4"),
)
CHECKPOINTING = "model.gradient_checkpointing=true"


def trained(run_dir: Path, *overrides: str) -> Tensor:
    """The losses of all steps."""
    train(tiny_config(run_dir, *LONG, *overrides))
    found = torch.tensor(list(losses(run_dir).values()), dtype=torch.float64)
    assert len(found) == STEPS
    assert found[-20:].mean() < 0.9 * found[:20].mean()  # it learned something
    return found


def plain_norm(self: ScaledRMSNorm, x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight * self.scale


def plain_patches(self: PatchEmbed, latents: Tensor) -> Tensor:
    return self.proj(latents).flatten(2).transpose(1, 2)


def plain_pool(self: VCA, queries: Tensor) -> Tensor:
    image = queries.transpose(1, 2).unflatten(2, self.grid_size)
    return F.adaptive_avg_pool2d(image, self.contrast_grid).flatten(2).transpose(1, 2)


def plain_vca(self: VCA, x: Tensor) -> Tensor:
    """By the maps of both stages, each stored and subtracted as written in the paper."""
    maps = self.maps(x)
    values = self.qkv(x).chunk(3, dim=-1)[2]
    assert self.value_conv is not None
    heads = values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
    for stage, norm in (("stage1", self.norm1), ("stage2", self.norm2)):
        heads = norm(maps[stage].difference() @ heads)
    convolved = F.conv2d(
        values.transpose(1, 2).unflatten(2, self.grid_size),
        self.value_conv.weight,
        self.value_conv.bias,
        padding=1,
        groups=values.shape[-1],
    )
    return self.proj(heads.transpose(1, 2).flatten(2) + convolved.flatten(2).transpose(1, 2))


def with_plain_forms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers, "modulate", lambda x, shift, scale: x * (1 + scale[:, None]) + shift[:, None])
    patch.setattr(layers, "gelu", lambda x: 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()))
    patch.setattr(PatchEmbed, "forward", plain_patches)
    patch.setattr(ScaledRMSNorm, "forward", plain_norm)
    patch.setattr(VCA, "_pool", plain_pool)
    patch.setattr(VCA, "forward", plain_vca)


def test_gradient_checkpointing_changes_no_bit(tmp_path: Path) -> None:
    assert torch.equal(trained(tmp_path / "a"), trained(tmp_path / "b", CHECKPOINTING))


def test_fast_forms_and_micro_batches_train_alike(tmp_path: Path) -> None:
    # float64, so that rounding, which grows from step to step, stays far below what a wrong formula would do.
    rate = "train.learning_rate=0.02"
    with double_precision(num_samples=256):
        fast = trained(tmp_path / "fast", rate)
        split = trained(tmp_path / "split", rate, "train.gradient_accumulation_steps=2")
        with pytest.MonkeyPatch.context() as patch:
            with_plain_forms(patch)
            plain = trained(tmp_path / "plain", rate)
    for other in (split, plain):
        assert not torch.equal(other, fast)
        torch.testing.assert_close(other, fast, rtol=1e-12, atol=0)


def test_bf16_trains_alike(tmp_path: Path) -> None:
    exact = trained(tmp_path / "fp32")
    with precision_of_its_own():
        rounded = trained(tmp_path / "bf16", "train.precision=bf16")
    difference = (rounded / exact - 1).abs()
    assert 1e-4 < difference.max() < 0.1
    assert abs(rounded[-20:].mean() / exact[-20:].mean() - 1) < 0.03


@pytest.mark.parametrize(("factor", "is_within"), [(1.0, True), (1.05, False), (float("nan"), False)])
def test_losses_are_compared_step_by_step(factor: float, is_within: bool) -> None:
    without = [1.0] * 20
    found = benchmark.agreement("model", "compile", without, [*without[:18], factor, factor])
    assert found.is_within == is_within
    assert found.last == pytest.approx(factor - 1, nan_ok=True)


def test_a_single_step_is_seen() -> None:
    without = [1.0] * 20
    for switch in benchmark.SWITCHES:
        assert benchmark.agreement("model", switch, without, without).is_within
        assert not benchmark.agreement("model", switch, without, [1.2, *without[1:]]).is_within
    assert not benchmark.agreement("model", "gradient checkpointing", without, [1 + 1e-9, *without[1:]]).is_within


def losses_here(run_dir: Path, overrides: Sequence[str]) -> list[float]:
    """As `losses_of`, without a process of its own."""
    train(load_config(benchmark.CONFIG, [f"run_dir={run_dir}", *benchmark.COMMON, *overrides]))
    return list(losses(run_dir).values())


def test_the_command_trains_compares_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "MODELS", {"SiT": ("model.variant=SiT-tiny/4",)})
    switches = {"checkpointing": benchmark.Switch((CHECKPOINTING,)), "another seed": benchmark.Switch(("seed=1",))}
    monkeypatch.setattr(benchmark, "SWITCHES", switches)
    losses_of = benchmark.losses_of  # a process, which the first run has and the others do without
    monkeypatch.setattr(
        benchmark, "losses_of", lambda out, more: (losses_of if out.name == "0" else losses_here)(out, more)
    )
    out = tmp_path / "losses.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", "losses", "--steps", "2", "--json", str(out)])
    assert main() == 1
    printed = capsys.readouterr()
    assert "equal to the bit" in printed.out
    assert "error: losses differ by more than they may: SiT, another seed\n" in printed.err
    same, other = json.loads(out.read_text())["agreements"]
    assert (same["largest"], same["is_within"], other["is_within"]) == (0, True, False)
