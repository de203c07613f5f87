import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny_runs import ROOT
from vcagen.attention import build_attention
from vcagen.benchmark import cost
from vcagen.benchmark.__main__ import main
from vcagen.benchmark.cost import ATTENTIONS, DEIT_ATTENTIONS, DEITS, Cost, Row, cost_of, deit_row, describe, model_row


def really_saved(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the tensors that a real forward pass keeps for backward, by their place in memory."""
    kept = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def test_of_two_linear_layers_everything_is_known() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))

    found = cost_of(build, lambda: (torch.zeros(2, 3),))
    # Kept: the input and ReLU's output, which is also the second layer's input.
    assert found == Cost(3 * 5 + 5 + 5 * 7 + 7, 2 * (3 * 5 + 5 * 7), 4 * 2 * (3 + 5))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_memory_is_that_of_a_real_pass(name: str) -> None:
    def build() -> nn.Module:
        return build_attention(ATTENTIONS[name], 32, 4, (6, 4), 1)

    x = torch.randn(1, 24, 32)
    found = cost_of(build, lambda: (torch.zeros(1, 24, 32),))
    assert found.activation_bytes == really_saved(build(), x)


def attention_multiply_adds(num_tokens: int, width: int, num_contrast: int, name: str) -> int:
    linear = 4 * num_tokens * width**2
    conv = 9 * num_tokens * width if name in ("softmax + conv", "VCA", "VCA, separate") else 0
    # The equations of differential attention have 3 N^2 C; the zeros beside its keys make it 4.
    core = {"softmax": 2 * num_tokens**2, "VCA": 8 * num_tokens * num_contrast, "differential": 4 * num_tokens**2}
    return linear + conv + core[name.split(",")[0].split(" +")[0]] * width


@pytest.mark.parametrize("name", ATTENTIONS)
def test_multiply_adds_are_those_of_the_equations(name: str) -> None:
    found = cost_of(lambda: build_attention(ATTENTIONS[name], 32, 4, (8, 8), 0), lambda: (torch.zeros(1, 64, 32),))
    assert found.multiply_adds == attention_multiply_adds(64, 32, 16, name)


@pytest.fixture(scope="module")
def models() -> list[Row]:
    return [model_row("S/2", 256, attention) for attention in ATTENTIONS]


@pytest.fixture(scope="module")
def deits() -> list[Row]:
    return [deit_row(name, attention) for name in DEITS for attention in DEIT_ATTENTIONS]


def test_models_have_their_known_figures(models: list[Row]) -> None:
    costs = {row.attention: row.cost for row in models}
    assert costs["softmax"].parameters == 32_963_360
    assert costs["softmax"].multiply_adds / 1e9 == pytest.approx(6.06, abs=0.005)  # DiT, table 4
    assert (models[0].tokens, models[0].contrast_tokens) == (256, 64)
    assert costs["VCA, no conv"].multiply_adds == costs["softmax"].multiply_adds  # n = N / 4


def test_deits_grow_as_published(deits: list[Row]) -> None:
    parameters = {(row.model, row.attention): row.cost.parameters for row in deits}
    added = {key: count - parameters[key[0], "softmax"] for key, count in parameters.items()}
    assert added["DeiT-Small", "VCA"] == 505_344
    assert f"{22.05 + added['DeiT-Small', 'VCA'] / 1e6:.1f}" == "22.6"
    assert f"{22.05 + added['DeiT-Small', 'VCA, no conv'] / 1e6:.1f}" == "22.5"
    assert 0 < added["DeiT-Tiny", "VCA"] < 300_000


def test_the_command_prints_and_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "MODELS", ("tiny/8",))
    monkeypatch.setattr(cost, "PIXELS", (256,))
    monkeypatch.setattr(cost, "DEIT_DEPTH", 1)
    table, counts = tmp_path / "cost.md", tmp_path / "cost.json"
    command = ["cost", "--markdown", str(table), "--json", str(counts)]
    monkeypatch.setattr(sys, "argv", ["benchmark", *command])
    assert main() == 0
    assert capsys.readouterr().out == table.read_text()
    rows = json.loads(counts.read_text())["rows"]
    assert len(rows) == len(ATTENTIONS) + len(DEITS) * len(DEIT_ATTENTIONS)
    assert rows[0]["cost"]["parameters"] == model_row("tiny/8", 256, "softmax").cost.parameters


def numbers_in(table: str, heading: str) -> dict[tuple[str, str], list[str]]:
    section = table.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(line[0], line[1]): line[2:] for line in lines[2:]}


def test_the_committed_table_is_what_is_counted(models: list[Row], deits: list[Row]) -> None:
    committed, fresh = (ROOT / "docs/cost.md").read_text(), describe(models, deits)
    for heading in ("Parameters", "Multiply-adds"):  # what is kept in memory may differ between versions of torch
        assert numbers_in(committed, heading)["S/2", "256"] == numbers_in(fresh, heading)["S/2", "256"]
    of_deits = [" ".join(line.split()) for line in fresh.splitlines() if line.startswith("| DeiT")]
    assert len(of_deits) == 6
    assert all(line in " ".join(committed.split()) for line in of_deits)
