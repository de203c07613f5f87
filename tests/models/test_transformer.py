from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import DATA, relative_error, tiny_model
from vcagen.models.layers import position_table, timestep_embedding
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import parse_variant


def test_dit_forward_equals_the_official_one(dit_oracle_model: DiffusionTransformer) -> None:
    oracle = load_file(DATA / "dit_forward.safetensors")
    output = dit_oracle_model(oracle["x"], oracle["t"], oracle["y"])
    assert relative_error(output, oracle["forward"]) < 1e-5


def test_sit_forward_equals_the_official_one(sit_oracle_model: DiffusionTransformer) -> None:
    oracle = load_file(DATA / "sit_forward.safetensors")
    output = sit_oracle_model(oracle["x"], oracle["t"], oracle["y"])
    assert relative_error(output[:, :4], oracle["forward"]) < 1e-5


def test_embeddings_equal_the_official_ones() -> None:
    oracle = load_file(DATA / "dit_forward.safetensors")
    timesteps = torch.tensor([0.0, 1.0, 37.5, 999.0])
    # Angles up to 999 have a spacing of 6e-5 in float32, so processors differ by that.
    assert relative_error(timestep_embedding(timesteps, 256), oracle["timestep_embedding"]) < 6e-5
    assert relative_error(position_table(64, (4, 4)), oracle["pos_embed"]) < 1e-6


def test_position_codes_keep_rows_and_columns_apart() -> None:
    table = position_table(64, (3, 5))[0].unflatten(0, (3, 5))  # (row, column, C)
    columns, rows = table[..., :32], table[..., 32:]
    assert torch.equal(columns[0], columns[2])
    assert torch.equal(rows[:, 0], rows[:, 4])
    assert columns[0, 1, 0].item() == pytest.approx(0.8415, abs=1e-4)  # sin 1
    assert rows[0, 1, 0].item() == 0.0
    # A square grid of other sides starts with the same codes.
    assert torch.equal(position_table(64, (8, 8))[0].unflatten(0, (8, 8))[:3, :5], table)


@pytest.mark.parametrize(
    ("variant", "count"),
    [("DiT-S/2", 32_963_360), ("SiT-B/2", 130_512_416), ("DiT-L/2", 458_102_816), ("SiT-XL/2", 675_129_632)],
)
def test_parameter_counts_are_the_published_ones(variant: str, count: int) -> None:
    named = parse_variant(variant)
    with torch.device("meta"):
        model = DiffusionTransformer(patch_size=named.patch_size, **named.shape._asdict())
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("shape", ["tiny", "S", "B", "L", "XL"])
@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_every_variant_builds(shape: str, patch_size: int) -> None:
    named = parse_variant(f"SiT-{shape}/{patch_size}")
    with torch.device("meta"):
        model = DiffusionTransformer(patch_size=named.patch_size, attention={"name": "vca"}, **named.shape._asdict())
    assert model.grid_size == (32 // patch_size, 32 // patch_size)


def test_unknown_variant_lists_what_there_is() -> None:
    for name in ["DiT-H/2", "DiT-S", "DiT-S/3", "dit-s/2", ""]:
        with pytest.raises(ValueError, match="tiny, S, B, L, XL"):
            parse_variant(name)


@pytest.mark.parametrize("attention", ["mhsa", "vca", "differential"])
@pytest.mark.parametrize("latent_size", [(8, 12), (12, 8), (4, 16)])
def test_rectangular_latents_keep_their_places(latent_size: tuple[int, int], attention: str) -> None:
    model = tiny_model(latent_size=latent_size, attention={"name": attention})
    latents = torch.randn(2, 4, *latent_size)
    output = model(latents, torch.tensor([3, 900]), torch.tensor([1, 10]))
    assert output.shape == (2, 8, *latent_size)
    # Patches that leave the model hold the pixels that entered it, when every layer between is the identity.
    patches = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
    model.out_channels = 4
    assert torch.equal(model._unpatchify(patches), latents)


def test_a_fresh_model_returns_zero_and_a_noisy_one_does_not() -> None:
    arguments = (torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10]))
    fresh = DiffusionTransformer(latent_size=(8, 8), hidden_size=32, depth=1, num_heads=2, num_classes=10)
    assert fresh(*arguments).abs().max() == 0
    assert tiny_model()(*arguments).abs().max() > 0.1


def test_init_follows_dit() -> None:
    model = DiffusionTransformer(latent_size=(8, 8), hidden_size=384, depth=1, num_heads=6, num_classes=1000)
    qkv = model.blocks[0].attn.qkv.weight
    bound = (6 / (384 + 3 * 384)) ** 0.5  # Xavier of one (3C, C) matrix, not of three (C, C) ones
    assert 0.99 * bound < qkv.abs().max() <= bound
    assert model.x_embedder.proj.weight.abs().max() <= (6 / (16 + 384)) ** 0.5
    assert model.y_embedder.embedding_table.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.t_embedder.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    for module in (
        model.blocks[0].adaLN_modulation[1],
        model.final_layer.adaLN_modulation[1],
        model.final_layer.linear,
    ):
        assert module.weight.abs().max() == 0


def test_latent_size_must_fit_the_patch() -> None:
    with pytest.raises(ValueError, match=r"7x8 .* multiples of 2"):
        DiffusionTransformer(latent_size=(7, 8), hidden_size=32, depth=1, num_heads=2)


def test_latents_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 12, 12\).*built for \(4, 8, 8\)"):
        tiny_model()(torch.randn(1, 4, 12, 12), torch.tensor([1]), torch.tensor([1]))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"hidden_size=32 is not divisible by model.num_heads=5"):
        DiffusionTransformer(latent_size=(8, 8), hidden_size=32, depth=1, num_heads=5)


@pytest.mark.parametrize("attention", ["mhsa", "vca", "differential"])
def test_gradient_checkpointing_changes_no_gradient(attention: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(attention={"name": attention}).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
            assert model.is_gradient_checkpointing
        torch.manual_seed(1)
        model(torch.randn(2, 4, 8, 8), torch.tensor([3, 900]), torch.tensor([1, 10])).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def test_library_round_trip(tmp_path: Path) -> None:
    model = tiny_model(latent_size=(8, 12), attention={"name": "vca", "contrast_grid": [2, 3]})
    model.save_pretrained(tmp_path)
    again = DiffusionTransformer.from_pretrained(tmp_path)
    arguments = (torch.randn(2, 4, 8, 12), torch.tensor([3, 900]), torch.tensor([1, 10]))
    assert torch.equal(model(*arguments), again(*arguments))


def test_without_label_dropout_there_is_no_null_label() -> None:
    model = tiny_model(has_null_label=False)
    assert model.y_embedder.embedding_table.weight.shape == (10, 32)
    with pytest.raises(ValueError, match="no null label"):
        _ = model.null_label
    assert tiny_model().null_label == 10
