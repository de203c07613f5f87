import argparse
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_model
from tests.conversion.helpers import file_of, read, tiny_weights
from vcagen.config import load_config
from vcagen.conversion.export import write_pipeline
from vcagen.conversion.grafting import graft_attention, write_fine_tuning_config
from vcagen.initial_weights import load_initial_weights
from vcagen.pipeline_folder import load_transformer


@pytest.mark.parametrize(
    ("name", "overrides", "new"),
    [
        ("mhsa", ["value_conv=true"], {"value_conv.weight", "value_conv.bias"}),
        ("differential", [], {"norm.weight", *(f"lambda_weight.{v}" for v in ("q1", "k1", "q2", "k2"))}),
        (
            "vca",
            ["value_conv=false", "stage2_differential=false"],
            {
                *("positive_embedding", "negative_embedding", "norm1.weight", "norm2.weight"),
                *(f"lambda1.{v}" for v in ("q1", "k1", "q2", "k2")),
            },
        ),
    ],
)
def test_what_both_have_is_copied_and_what_is_new_is_reported(
    tmp_path: Path, name: str, overrides: list[str], new: set[str]
) -> None:
    model = read(file_of(tmp_path, tiny_weights()))
    grafted, report = graft_attention(model, name, overrides, 0, "x")
    assert set(report.new) == new
    assert set(grafted.tensors) - set(model.tensors) == {f"blocks.{i}.attn.{n}" for i in range(2) for n in new}
    assert all(grafted.tensors[tensor] is model.tensors[tensor] for tensor in model.tensors)
    write_pipeline(grafted, tmp_path / "grafted", "x")
    assert load_transformer(tmp_path / "grafted").config.attention["name"] == name
    again, _ = graft_attention(model, name, overrides, 0, "x")
    other, _ = graft_attention(model, name, overrides, 1, "x")
    random = [tensor for tensor in new if "norm" not in tensor and "value_conv" not in tensor]
    for tensor in (f"blocks.1.attn.{n}" for n in random):
        assert torch.equal(again.tensors[tensor], grafted.tensors[tensor])
        assert not torch.equal(other.tensors[tensor], grafted.tensors[tensor])


def test_a_grafted_convolution_changes_nothing_at_first(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, tiny_weights()))
    write_pipeline(graft_attention(model, "mhsa", ["value_conv=true"], 0, "x")[0], tmp_path / "grafted", "x")
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10])
    with torch.no_grad():
        assert torch.equal(load_transformer(tmp_path / "grafted")(*inputs), tiny_model()(*inputs))


def test_what_cannot_be_grafted_is_said(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, tiny_weights()))
    with pytest.raises(ValueError, match=r"attention flash .*name: "):
        graft_attention(model, "flash", [], 0, "x")
    with pytest.raises(ValueError, match=r"attention vca .*value_convs: Extra inputs"):
        graft_attention(model, "vca", ["value_convs=1"], 0, "x")
    with pytest.raises(ValueError, match=r"contrast_grid=\[9, 9\] is larger than the token grid"):
        graft_attention(model, "vca", ["contrast_grid=[9,9]"], 0, "x")
    grafted, _ = graft_attention(model, "vca", [], 0, "x")
    with pytest.raises(ValueError, match="x: has vca attention; grafting starts from softmax attention"):
        graft_attention(grafted, "differential", [], 0, "x")


def test_the_fine_tuning_config_of_foreign_weights_loads_and_starts_from_them(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, tiny_weights(), "SiT.safetensors"))
    grafted, _ = graft_attention(model, "vca", [], 0, "x")
    write_pipeline(grafted, tmp_path / "grafted", "x")
    path = write_fine_tuning_config(grafted, tmp_path / "SiT.safetensors", tmp_path / "grafted")
    config = load_config(path)
    assert (config.model.attention.name, config.train.init_from) == ("vca", str(tmp_path / "grafted"))
    assert (config.model.hidden_size, config.data.image_size) == (32, 64)  # type: ignore[union-attr]
    assert config.autoencoder.name == "kl"


def test_what_the_new_attention_has_no_place_for_is_dropped_and_said(tmp_path: Path) -> None:
    source = read(file_of(tmp_path, tiny_weights()))
    control, _ = graft_attention(source, "mhsa", ["value_conv=true"], 0, "x")
    grafted, report = graft_attention(control, "vca", ["value_conv=false"], 0, "x")
    assert report.dropped == tuple(
        f"blocks.{i}.attn.value_conv.{kind}" for i in range(2) for kind in ("weight", "bias")
    )
    assert any("dropped, since the new attention has none" in line for line in report.lines())
    write_pipeline(grafted, tmp_path / "grafted", "x")
    load_transformer(tmp_path / "grafted")
    kept, report = graft_attention(control, "vca", [], 0, "x")
    assert "value_conv.weight" not in report.new
    name = "blocks.0.attn.value_conv.weight"
    assert kept.tensors[name] is control.tensors[name]


def test_a_model_without_null_label_and_variance_gives_a_run_of_its_kind(tmp_path: Path) -> None:
    weights = tiny_weights(learn_sigma=False, has_null_label=False)
    torch.save({"ema": weights, "args": argparse.Namespace(model="SiT-S/2", num_classes=10)}, tmp_path / "x.pt")
    grafted, _ = graft_attention(read(tmp_path / "x.pt"), "vca", [], 0, "x")
    write_pipeline(grafted, tmp_path / "grafted", "x")
    config = load_config(write_fine_tuning_config(grafted, tmp_path / "x.pt", tmp_path / "grafted"))
    assert (config.train.label_dropout, config.model.learn_sigma) == (0, False)
    model = tiny_model(**(grafted.settings | {"latent_size": (8, 8)}))
    load_initial_weights(model, config, grafted.config.class_names)
    assert torch.equal(model.state_dict()["pos_embed"], grafted.tensors["pos_embed"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["contrast_grid=[2"], "attention vca: while parsing"), (["name=differential"], "--attention vca, but name=")],
)
def test_settings_that_are_none(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        graft_attention(read(file_of(tmp_path, tiny_weights())), "vca", overrides, 0, "x")
    assert "\n" not in str(error.value)
