import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file, save_file

from tests.conftest import DATA, fill_with_noise, relative_error, tiny_model, tiny_vae
from tests.conversion.helpers import ORACLE_HEADS, file_of, oracle_weights, read, same, tiny_weights
from vcagen.autoencoder import KLConfig
from vcagen.conversion.export import load_diffusers, write_diffusers, write_official, write_pipeline
from vcagen.pipeline import ClassConditionalPipeline
from vcagen.pipeline_folder import load_transformer, read_index

TIMESTEPS = torch.tensor([0, 37, 500, 999])


@pytest.mark.parametrize("family", ["dit", "sit"])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_official_weights_make_the_round_trip_bit_for_bit(tmp_path: Path, family: str, suffix: str) -> None:
    source = file_of(tmp_path, oracle_weights(family), f"{family}.safetensors")
    write_pipeline(read(source, num_heads=ORACLE_HEADS), tmp_path / "model", "x")
    write_official(read(tmp_path / "model"), tmp_path / f"back{suffix}", "x")
    path = tmp_path / f"back{suffix}"
    back = load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert same(back, oracle_weights(family))


@pytest.mark.parametrize("family", ["dit", "sit"])
def test_converted_official_weights_compute_what_the_official_code_does(tmp_path: Path, family: str) -> None:
    source = file_of(tmp_path, oracle_weights(family), f"{family}.safetensors")
    write_pipeline(read(source, num_heads=ORACLE_HEADS), tmp_path / "model", "x")
    oracle = load_file(DATA / f"{family}_forward.safetensors")
    with torch.no_grad():
        output = load_transformer(tmp_path / "model")(oracle["x"], oracle["t"], oracle["y"])
    expected = oracle["forward"]
    assert relative_error(output[:, : expected.shape[1]], expected) < 1e-5


def diffusers_model(**settings: Any) -> DiTTransformer2DModel:
    """diffusers' class at 4 layers, random, with one embedder for all blocks."""
    torch.manual_seed(0)
    shape = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4, "sample_size": 8, "patch_size": 2}
    model = DiTTransformer2DModel(**(shape | {"out_channels": 8, "num_embeds_ada_norm": 10} | settings))
    fill_with_noise(model)
    for block in model.transformer_blocks:
        block.norm1.emb.load_state_dict(model.transformer_blocks[0].norm1.emb.state_dict())
    return model.eval()


def outputs(model: torch.nn.Module) -> torch.Tensor:
    x = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 2, 3, 10])
    with torch.no_grad():
        if isinstance(model, DiTTransformer2DModel):
            return model(x, timestep=TIMESTEPS, class_labels=labels).sample
        return model(x, TIMESTEPS, labels)


@pytest.mark.parametrize("settings", [{}, {"norm_eps": 1e-6}, {"norm_eps": 1e-3}, {"num_attention_heads": 2}])
def test_a_dit_of_diffusers_computes_the_same_here_and_back(tmp_path: Path, settings: dict[str, Any]) -> None:
    original = diffusers_model(**settings)
    original.save_pretrained(tmp_path / "theirs")
    model = read(tmp_path / "theirs", num_heads=None)
    assert any("need --trained-by official" in note for note in model.notes)
    write_pipeline(model, tmp_path / "ours", "x")
    expected = outputs(original)
    assert relative_error(outputs(load_transformer(tmp_path / "ours")), expected) < 1e-5
    assert write_diffusers(read(tmp_path / "ours"), tmp_path / "back", "x") == []
    assert same(read(tmp_path / "back").tensors, model.tensors)
    back = DiTTransformer2DModel.from_pretrained(tmp_path / "back")  # their own loader, unpatched
    assert relative_error(outputs(back), expected) < 1e-5
    assert same(dict(back.state_dict()), dict(original.state_dict()))


def test_our_dit_makes_the_round_trip_through_diffusers_bit_for_bit(tmp_path: Path) -> None:
    model = tiny_model(depth=4)
    source = file_of(tmp_path, dict(model.state_dict()))
    notes = write_diffusers(read(source), tmp_path / "theirs", "x")
    assert any("warning: diffusers' class computes other timestep frequencies" in note for note in notes)
    expected = outputs(model)
    assert relative_error(outputs(load_diffusers(tmp_path / "theirs")), expected) < 1e-5
    # What the warning is about: diffusers' own loader does not know the frequencies.
    plain = DiTTransformer2DModel.from_pretrained(tmp_path / "theirs")
    difference = (outputs(plain) - expected).abs().amax((1, 2, 3)) / expected.abs().max()
    assert difference[0] < 1e-5 < 1e-3 < difference[-1]
    back = read(tmp_path / "theirs", num_heads=None)
    assert same(back.tensors, dict(model.state_dict()))
    write_pipeline(back, tmp_path / "ours", "x")
    assert torch.equal(outputs(load_transformer(tmp_path / "ours")), expected)


def test_weights_that_the_official_code_trained_and_somebody_renamed(tmp_path: Path) -> None:
    model = tiny_model(depth=4)
    write_diffusers(read(file_of(tmp_path, dict(model.state_dict()))), tmp_path / "theirs", "x")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    del config["timestep_frequency_shift"]  # as on the hub
    (tmp_path / "theirs/config.json").write_text(json.dumps(config | {"norm_eps": 1e-5}))
    write_pipeline(read(tmp_path / "theirs", num_heads=None, trained_by="official"), tmp_path / "ours", "x")
    assert torch.equal(outputs(load_transformer(tmp_path / "ours")), outputs(model))


def test_a_whole_diffusers_pipeline_brings_its_class_names(tmp_path: Path) -> None:
    diffusers_model().save_pretrained(tmp_path / "transformer")
    names = {str(label): f"class {label}" for label in range(10)}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "id2label": names}))
    assert read(tmp_path, num_heads=None).config.class_names[3] == "class 3"


def test_diffusers_weights_that_no_dit_can_hold(tmp_path: Path) -> None:
    diffusers_model().save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    name = "transformer_blocks.2.norm1.emb.timestep_embedder.linear_1.bias"
    save_file(tensors | {name: tensors[name] + 1}, path)
    with pytest.raises(ValueError, match=rf"{name} differs from block 0's"):
        read(tmp_path, num_heads=None)
    del tensors[name]
    save_file(tensors | {"more": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=rf"not the tensors of a DiT of 4 blocks: missing {name}; unknown more"):
        read(tmp_path, num_heads=None)


@pytest.mark.parametrize(
    ("settings", "objective", "message"),
    [
        ({"attention": {"name": "vca"}}, "diffusion", "only a vcagen folder can hold"),
        ({"attention": {"name": "mhsa", "value_conv": True}}, "diffusion", "only a vcagen folder can hold"),
        ({}, "flow", "diffusers has DiT alone"),
        ({"latent_size": (8, 12)}, "diffusion", "needs square latents"),
    ],
)
def test_what_diffusers_cannot_hold_is_refused(
    tmp_path: Path, settings: dict[str, Any], objective: str, message: str
) -> None:
    model = pipeline_folder(tmp_path, objective, **settings)
    with pytest.raises(ValueError, match=message):
        write_diffusers(read(model), tmp_path / "target", "x")
    assert not (tmp_path / "target").exists()


def pipeline_folder(tmp_path: Path, objective: str, **settings: Any) -> Path:
    plain = {key: value for key, value in settings.items() if key != "attention"}
    model = read(file_of(tmp_path, tiny_weights(**plain)), family="DiT" if objective == "diffusion" else "SiT")
    write_pipeline(model, tmp_path / "folder", "x")
    if "attention" in settings:
        tiny_model(**settings).save_pretrained(tmp_path / "folder/transformer")
    return tmp_path / "folder"


def test_what_the_official_code_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = pipeline_folder(tmp_path, "flow", attention={"name": "vca"})
    with pytest.raises(ValueError, match="only a vcagen folder can hold"):
        write_official(read(folder), tmp_path / "x.pt", "x")
    diffusers_model().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"computes as diffusers' class does.*--trained-by official"):
        write_official(read(tmp_path / "theirs", num_heads=None), tmp_path / "x.pt", "x")
    with pytest.raises(ValueError, match=r"expected a file name that ends in .safetensors or .pt"):
        write_official(read(file_of(tmp_path, tiny_weights())), tmp_path / "x.bin", "x")


def test_a_target_that_exists_is_left_alone(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, tiny_weights()))
    (tmp_path / "target").mkdir()
    write_pipeline(model, tmp_path / "target", "x")  # empty, so free
    before = (tmp_path / "target/model_index.json").read_bytes()
    for write in (write_pipeline, write_diffusers):
        with pytest.raises(ValueError, match="target: exists already; choose another target or delete it"):
            write(model, tmp_path / "target", "x")
    assert (tmp_path / "target/model_index.json").read_bytes() == before


def test_a_local_autoencoder_is_copied_and_checked(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    tiny_vae(latent_channels=3).save_pretrained(tmp_path / "vae3")
    source = file_of(tmp_path, tiny_weights(), "SiT.safetensors")
    model = read(source, overrides=(f"autoencoder.source={tmp_path}/vae3",))
    with pytest.raises(ValueError, match=r"latents of 4 channels, but the autoencoder .*vae3 has 3"):
        write_pipeline(model, tmp_path / "target", "x")
    assert not (tmp_path / "target").exists()
    chosen = (f"autoencoder.source={tmp_path}/vae", "sampler.name=euler", "sampler.num_steps=2")
    write_pipeline(read(source, overrides=chosen), tmp_path / "target", "x")
    assert read_index(tmp_path / "target").autoencoder == KLConfig(source="vae")
    images = ClassConditionalPipeline.from_pretrained(tmp_path / "target")([1], seed=0).images
    assert images[0].size == (64, 64)


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    model = read(file_of(tmp_path, tiny_weights()))
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("vcagen.conversion.export.save_file", full_disk)
    for write, target in [(write_pipeline, "a"), (write_diffusers, "b"), (write_official, "c.safetensors")]:
        with pytest.raises(OSError, match="No space left"):
            write(model, tmp_path / target, "x")
    assert sorted(tmp_path.iterdir()) == before
