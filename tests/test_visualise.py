import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.attention.helpers import relative_error
from tests.attention.test_maps import output_from_maps
from tests.conftest import tiny_model
from vcagen.attention import BACKENDS
from vcagen.generation import LoadedModel, labels_and_generators, load_model, plan_samples
from vcagen.pipeline_folder import write_index
from vcagen.sampling_config import PipelineConfig, WeightsRecord
from vcagen.seeds import normal
from vcagen.visualise import Captured, capture, main, tiles_of, visualise

FLOW = {"objective": {"name": "flow"}, "sampler": {"name": "euler", "num_steps": 2}}
DIFFUSION = {"objective": {"name": "diffusion"}, "sampler": {"name": "ddim", "num_steps": 2}}
ATTENTIONS: list[dict[str, Any]] = [
    *({"name": kind().name} for kind in BACKENDS),
    {"name": "vca", "stage2_softmax": "separate", "contrast_grid": [2, 3]},
    {"name": "vca", "stage1_differential": False},
]


def write_model(folder: Path, attention: dict[str, Any], settings: dict[str, Any] = FLOW) -> Path:
    """A pipeline folder of random weights: 8x8 grey pixels, 4x4 patches."""
    tiny_model(in_channels=1, attention=attention).save_pretrained(folder / "transformer")
    names = tuple(map(str, range(10)))
    config = PipelineConfig(
        **settings, variant="tiny", class_names=names, weights=WeightsRecord(kind="ema"), provenance={}
    )
    write_index(folder, config, has_vae=False)
    return folder


def model_with(folder: Path, attention: dict[str, Any], settings: dict[str, Any] = FLOW) -> LoadedModel:
    return load_model(write_model(folder, attention, settings), device="cpu")


@pytest.mark.parametrize("attention", ATTENTIONS, ids=lambda attention: "-".join(map(str, attention.values())))
def test_the_maps_are_those_of_the_layer_in_the_model(tmp_path: Path, attention: dict[str, Any]) -> None:
    model = model_with(tmp_path, attention)
    layer: Any = model.maker.model.blocks[1].attn
    calls = []
    layer.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    captured = capture(model, label=3, timestep=0.5, layer=1, seed=7)
    tokens, output = calls[-1]
    assert relative_error(output_from_maps(layer, tokens).detach(), output.double()) < 1e-5
    expected = layer.maps(tokens)
    assert captured.maps.keys() == expected.keys()
    for name, maps in captured.maps.items():
        assert torch.equal(maps.difference(), expected[name].difference())
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize(("settings", "clean", "noisy"), [(FLOW, 1, 0), (DIFFUSION, 0, 999)])
def test_the_model_sees_the_sample_noised_by_the_noise_it_began_with(
    tmp_path: Path, settings: dict[str, Any], clean: float, noisy: float
) -> None:
    model = model_with(tmp_path, {"name": "mhsa"}, settings)
    seen = []
    model.maker.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    captured = capture(model, label=3, timestep=clean, layer=0, seed=7)
    (image,) = model.maker.batch(plan_samples([3], 7, 10))
    assert np.array_equal(captured.image, image)
    assert np.abs(captured.noised_image.astype(int) - image).max() <= 5  # diffusion's timestep 0 has a little noise
    capture(model, label=3, timestep=noisy, layer=0, seed=7)
    latents, timesteps, labels = seen[-1]
    noise = normal(latents, labels_and_generators(plan_samples([3], 7, 10))[1])
    assert (latents - noise).abs().max() < 0.02
    assert (timesteps.tolist(), labels.tolist()) == ([noisy], [3])
    assert timesteps.is_floating_point() == (settings is FLOW)


def test_tiles_lie_as_their_tokens_do() -> None:
    blank = np.zeros((2, 2, 1), np.uint8)
    maps = torch.zeros(6, 20)  # 2x3 contrast tokens over 4x5 patches
    maps[4, 13] = 1.0  # token (1, 1), patch (2, 3)
    captured = Captured(blank, blank, {}, (4, 5), (2, 3))
    for tiles in (tiles_of(maps, "stage1", captured), tiles_of(maps.T, "stage2", captured)):
        assert tiles.shape == (2, 3, 4, 5)
        assert np.argwhere(tiles).tolist() == [[1, 1, 2, 3]]


def test_of_many_queries_the_middle_of_each_cell_is_shown() -> None:
    blank = np.zeros((2, 2, 1), np.uint8)
    maps = torch.arange(16 * 4.0)[:, None].expand(-1, 64)  # each row holds its own number
    tiles = tiles_of(maps, "attention", Captured(blank, blank, {}, (16, 4), None))
    assert tiles.shape == (8, 4, 16, 4)
    assert tiles[:, 0, 0, 0].tolist() == [4.0 * row for row in range(1, 16, 2)]
    assert tiles[0, :, 0, 0].tolist() == [4.0, 5.0, 6.0, 7.0]


def arguments(checkpoint: Path, out: Path, **changed: Any) -> Namespace:
    given = {"overrides": [], "label": "3", "timestep": None, "layer": None, "head": 0, "seed": 0, "weights": "ema"}
    return Namespace(checkpoint=checkpoint, out=out, **(given | changed))


@pytest.mark.parametrize("attention", ATTENTIONS[:3] + ATTENTIONS[4:], ids=lambda attention: str(attention["name"]))
def test_a_picture_is_written_and_depends_on_what_is_asked(tmp_path: Path, attention: dict[str, Any]) -> None:
    folder, paths = write_model(tmp_path / "model", attention), [tmp_path / f"{i}.png" for i in range(3)]
    visualise(arguments(folder, paths[0]))
    visualise(arguments(folder, paths[1]))
    visualise(arguments(folder, paths[2], layer=0))
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    with Image.open(paths[0]) as image:
        assert image.format == "PNG"
        assert min(image.size) > 400


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        (FLOW, {"layer": 2}, r"--layer 2 does not exist; this model has layers 0 to 1"),
        (FLOW, {"layer": -1}, r"--layer -1 does not exist"),
        (FLOW, {"head": 1}, r"--head 1 does not exist; its attention has heads 0 to 0"),
        (FLOW, {"label": "10"}, r"labels \[10\] do not exist"),
        (FLOW, {"timestep": 1.5}, r"--timestep 1.5: times of flow models lie within \[0, 1\]"),
        (DIFFUSION, {"timestep": 1000}, r"--timestep 1000: diffusion has whole timesteps 0 to 999"),
        (DIFFUSION, {"timestep": 0.5}, r"--timestep 0.5: diffusion has whole timesteps"),
    ],
)
def test_what_does_not_exist_is_said_in_one_line(
    tmp_path: Path, settings: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path / "model", {"name": "differential"}, settings)
    with pytest.raises(ValueError, match=message) as error:
        visualise(arguments(folder, tmp_path / "maps.png", **changed))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "maps.png").exists()


def test_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_model(tmp_path / "model", {"name": "vca"}), tmp_path / "maps.png"
    command = ["visualise", str(folder), "sampler.num_steps=1", "--label", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    assert "lambda of stage2" in capsys.readouterr().out
    assert out.is_file()
    monkeypatch.setattr(sys, "argv", [*command, "--layer", "9"])
    assert main() == 1
    assert capsys.readouterr().err == "error: --layer 9 does not exist; this model has layers 0 to 1\n"
