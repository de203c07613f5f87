import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import tiny_vae
from tests.conversion.helpers import ORACLE_HEADS, file_of, oracle_weights, read, tiny_weights
from vcagen.conversion.export import write_pipeline
from vcagen.conversion.shapes import FINAL_WEIGHT, variant_name
from vcagen.objectives import FlowConfig


def test_everything_but_heads_and_family_is_read_off_the_official_weights(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, oracle_weights("dit")), num_heads=ORACLE_HEADS)
    assert model.settings == {
        **{"latent_size": (8, 8), "in_channels": 4, "patch_size": 2, "hidden_size": 64, "depth": 2, "num_heads": 4},
        **{"mlp_ratio": 4.0, "num_classes": 10, "has_null_label": True, "learn_sigma": True},
    }
    assert (model.config.objective.name, model.config.sampler.name) == ("diffusion", "ddpm")
    assert model.config.variant == "DiT-64x2/2"
    assert model.config.provenance["source"] == "DiT.safetensors"
    assert len(model.config.provenance["sha256"]) == 64
    assert "DiT, by the file's name" in model.config.provenance["assumed"]
    assert any("the last of 11 rows of the label table is the null label" in note for note in model.notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"latent_size": (8, 12)},
        {"latent_size": (4, 16)},  # as many tokens as 8x8
        {"latent_size": (16, 4)},
        {"patch_size": 4, "num_classes": 1000},
        {"in_channels": 3, "depth": 1, "mlp_ratio": 2.0},
        {"learn_sigma": False, "patch_size": 1},
    ],
)
def test_sizes_are_read_off_the_tensors(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = read(file_of(tmp_path, tiny_weights(**settings)), family="SiT")
    for key, value in settings.items():
        assert model.settings[key] == value
    assert model.skeleton().config.num_heads == 2


def test_published_shapes_need_no_heads() -> None:
    sizes = {"hidden_size": 1152, "depth": 28, "num_heads": 16, "patch_size": 2}
    assert variant_name("SiT", sizes) == "SiT-XL/2"
    assert variant_name("DiT", sizes | {"hidden_size": 1151}) == "DiT-1151x28/2"


def test_heads_that_cannot_be_known_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"width 32 and depth 2 are no published model's.*give --num-heads"):
        read(file_of(tmp_path, tiny_weights()), num_heads=None)


def saved(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str = "0050000.pt", **arguments: Any) -> Path:
    torch.save({"ema": tensors, "args": argparse.Namespace(**arguments)}, tmp_path / name)
    return tmp_path / name


def test_arguments_of_a_training_checkpoint_say_family_path_and_classes(tmp_path: Path) -> None:
    path = saved(
        tmp_path, tiny_weights(), model="SiT-S/2", path_type="GVP", prediction="noise", num_classes=10, epochs=3
    )
    model = read(path)
    assert model.config.objective == FlowConfig(path="GVP", prediction="noise")
    assert (model.settings["num_classes"], model.settings["has_null_label"]) == (10, True)
    assert not any("null label" in line for line in model.config.provenance["assumed"])
    unguided = read(saved(tmp_path, tiny_weights(has_null_label=False), model="SiT-S/2", num_classes=10))
    assert (unguided.settings["num_classes"], unguided.settings["has_null_label"]) == (10, False)


def test_a_class_count_that_contradicts_the_table_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, tiny_weights(), model="DiT-S/2", num_classes=1000)
    with pytest.raises(ValueError, match=r"embedding_table.weight has 11 rows, but its arguments say num_classes=1000"):
        read(path)


@pytest.mark.parametrize(
    ("name", "family"),
    [("DiT-XL-2-256x256.pt", "DiT"), ("SiT-XL-2-256.pt", "SiT"), ("my_sit_model.pt", "SiT"), ("transit.pt", None)],
)
def test_family_by_file_name_or_not_at_all(tmp_path: Path, name: str, family: str | None) -> None:
    path = saved(tmp_path, tiny_weights(), name)
    if family is None:
        with pytest.raises(ValueError, match=r"DiT and SiT have the same tensors.*--family DiT .*--family SiT"):
            read(path)
    else:
        assert read(path).config.variant.startswith(family)
    assert read(path, family="DiT").config.objective.name == "diffusion"


def test_doubled_output_of_a_sit_is_kept_and_said_to_be_unused(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, oracle_weights("sit"), "SiT.safetensors"), num_heads=ORACLE_HEADS)
    assert any("the second half is kept, and unused" in note for note in model.notes)
    assert model.config.objective == FlowConfig()


def test_every_missing_unknown_and_misshapen_tensor_is_listed_at_once(tmp_path: Path) -> None:
    tensors = tiny_weights()
    del tensors["blocks.1.attn.proj.bias"]
    tensors["blocks.0.extra"] = torch.ones(1)
    tensors["t_embedder.mlp.0.weight"] = torch.ones(32, 128)
    tensors["blocks.0.mlp.fc2.weight"] = torch.ones(32, 64)
    with pytest.raises(ValueError, match=r"tensors do not fit a DiT-32x2/2") as error:
        read(file_of(tmp_path, tensors))
    for part in [
        "missing blocks.1.attn.proj.bias",
        "unknown blocks.0.extra",
        "t_embedder.mlp.0.weight is [32, 128], expected [32, 256]",
        "blocks.0.mlp.fc2.weight is [32, 64], expected [32, 128]",
    ]:
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_transformer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a DiT or SiT; missing x_embedder.proj.weight"):
        read(file_of(tmp_path, {"conv.weight": torch.ones(1)}))
    flat = tiny_weights() | {"x_embedder.proj.weight": torch.ones(32, 16)}
    with pytest.raises(ValueError, match=r"x_embedder.proj.weight is \[32, 16\], expected 4 dimensions"):
        read(file_of(tmp_path, flat))
    odd = tiny_weights() | {FINAL_WEIGHT: torch.ones(30, 32)}
    with pytest.raises(ValueError, match=r"final_layer.linear.weight has 30 rows.*expected 16, or twice that"):
        read(file_of(tmp_path, odd))
    learned = tiny_weights() | {"pos_embed": torch.randn(1, 15, 32)}
    with pytest.raises(ValueError, match=r"pos_embed has 15 tokens and is not the sine-cosine table of any grid"):
        read(file_of(tmp_path, learned))


def test_position_codes_that_were_learned_are_taken_as_a_square(tmp_path: Path) -> None:
    model = read(file_of(tmp_path, tiny_weights() | {"pos_embed": torch.randn(1, 16, 32)}))
    assert model.settings["latent_size"] == (8, 8)
    assert any("a square grid of 4 x 4 tokens" in note for note in model.notes)


def test_class_names(tmp_path: Path) -> None:
    path = file_of(tmp_path, tiny_weights(num_classes=1000))
    model = read(path)
    assert (model.config.class_names[1], model.config.class_names[207]) == ("goldfish", "golden retriever")
    assert any("the 1000 classes of ImageNet" in note for note in model.notes)
    own = tuple(f"name {label} ${{x}}" for label in range(1000))
    assert read(path, class_names=own).config.class_names == own
    with pytest.raises(ValueError, match=r"for 1000 classes, but 3 class names were given"):
        read(path, class_names=("a", "b", "c"))


def test_autoencoders(tmp_path: Path) -> None:
    path = file_of(tmp_path, tiny_weights())
    assert read(path).config.autoencoder.model_dump() == {"name": "kl", "source": "stabilityai/sd-vae-ft-ema"}
    chosen = read(path, overrides=("autoencoder.source=me/vae", "protocol=dit-paper"))
    assert chosen.config.autoencoder.model_dump() == {"name": "kl", "source": "me/vae"}
    assert (chosen.config.protocol, chosen.config.modified()) == ("dit-paper", [])
    assert read(file_of(tmp_path, tiny_weights(in_channels=1))).config.autoencoder.name == "identity"
    wide = file_of(tmp_path, tiny_weights(in_channels=16))
    with pytest.raises(ValueError, match=r"latents of 16 channels are of no autoencoder known here"):
        read(wide)
    assert read(wide, overrides=("autoencoder.source=me/vae",)).settings["in_channels"] == 16


def test_wrong_settings_name_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, tiny_weights())
    with pytest.raises(ValueError, match=r"sampler.name=euler does not sample diffusion models"):
        read(path, overrides=("sampler.name=euler",))
    with pytest.raises(ValueError, match=r"sampler.num_stepz: unknown key; did you mean num_steps"):
        read(path, overrides=("sampler.num_stepz=3",))
    with pytest.raises(ValueError, match=r"--trained-by is for weights in diffusers' names"):
        read(path, trained_by="official")


def test_numbers_survive_as_they_are_stored(tmp_path: Path) -> None:
    half = {name: tensor.half() for name, tensor in tiny_weights().items()}
    model = read(file_of(tmp_path, half))
    assert all(tensor.dtype == torch.float16 for tensor in model.tensors.values())
    assert model.settings["latent_size"] == (8, 8)  # the position codes are recognised all the same
    json.dumps(model.config.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path_type": "cosine", "prediction": "v"}, FlowConfig(path="GVP")),
        ({"path_type": "GVP"}, FlowConfig(path="GVP")),
        ({"prediction": "noise"}, FlowConfig(prediction="noise")),
        ({}, FlowConfig()),
    ],
)
def test_what_arguments_say_of_the_objective_counts(
    tmp_path: Path, arguments: dict[str, str], expected: FlowConfig
) -> None:
    assert read(saved(tmp_path, tiny_weights(), model="SiT-S/2", **arguments)).config.objective == expected


def test_arguments_that_are_not_understood_are_not_replaced(tmp_path: Path) -> None:
    path = saved(tmp_path, tiny_weights(), model="SiT-S/2", prediction="x0")
    with pytest.raises(
        ValueError, match=r"prediction='x0', which is not known here; give objective.prediction= one of"
    ):
        read(path)
    assert read(path, overrides=("objective.prediction=noise",)).config.objective == FlowConfig(prediction="noise")


def test_choices_against_what_the_source_is(tmp_path: Path) -> None:
    path = file_of(tmp_path, tiny_weights())
    with pytest.raises(ValueError, match="--num-heads -4: must be at least 1"):
        read(path, num_heads=-4)
    repa = file_of(tmp_path, tiny_weights(learn_sigma=False) | {"projectors.0.0.bias": torch.ones(1)}, "r.safetensors")
    with pytest.raises(ValueError, match="--family DiT, but it is a SiT, since REPA's projectors are there"):
        read(repa, family="DiT")
    unguided = saved(tmp_path, tiny_weights(has_null_label=False), model="DiT-S/2", num_classes=10)
    with pytest.raises(ValueError, match=r"guidance.scale=2 needs a null label"):
        read(unguided, overrides=("guidance.scale=2",))
    with pytest.raises(ValueError, match="diffusion needs variance channels"):
        read(file_of(tmp_path, tiny_weights(learn_sigma=False)))
    with pytest.raises(ValueError, match=r"'class_names=\[a,b\]' cannot be set: it describes the model"):
        read(path, overrides=("class_names=[a,b]",))


def test_tensors_that_are_no_weights_are_listed(tmp_path: Path) -> None:
    tensors = tiny_weights()
    tensors["blocks.0.attn.proj.bias"] = torch.ones(32, dtype=torch.int64)
    tensors["blocks.1.mlp.fc1.bias"][3] = float("nan")
    with pytest.raises(
        ValueError, match=r"attn.proj.bias is torch.int64.*blocks.1.mlp.fc1.bias has values that are not"
    ):
        read(file_of(tmp_path, tensors))
    repa = tiny_weights(learn_sigma=False) | {"projectors.0.0.bias": torch.ones(1)}
    del repa["t_embedder.mlp.0.weight"]
    with pytest.raises(ValueError, match=r"missing t_embedder.mlp.0.weight"):
        read(file_of(tmp_path, repa, "r.safetensors"))


def test_a_folder_of_ours_keeps_its_autoencoder_and_says_things_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    tiny_vae(scaling_factor=0.5).save_pretrained(tmp_path / "elsewhere/vae")
    source = file_of(tmp_path, tiny_weights(), "SiT.safetensors")
    first = read(source, overrides=(f"autoencoder.source={tmp_path}/vae",))
    write_pipeline(first, tmp_path / "first", "x")
    monkeypatch.chdir(tmp_path / "elsewhere")  # where another folder has that name
    write_pipeline(read(tmp_path / "first"), tmp_path / "second", "x")
    assert json.loads((tmp_path / "second/vae/config.json").read_text())["scaling_factor"] == 0.18215
    changed = read(tmp_path / "first", overrides=("autoencoder.source=vae",))
    write_pipeline(changed, tmp_path / "third", "x")
    assert json.loads((tmp_path / "third/vae/config.json").read_text())["scaling_factor"] == 0.5
    for choice in ({"family": "DiT"}, {"num_heads": 2}, {"trained_by": "official"}):
        with pytest.raises(ValueError, match="says itself what --"):
            read(tmp_path / "first", **choice)
    with pytest.raises(ValueError, match="3 class names, but the model has 10 classes"):
        read(tmp_path / "first", class_names=("a", "b", "c"))
    path = tmp_path / "first/transformer/config.json"
    path.write_text(path.read_text().replace('"depth"', '"depths"'))
    with pytest.raises(ValueError, match=r"config.json: not the config of a model here .*depths"):
        read(tmp_path / "first")
