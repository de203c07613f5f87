import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import pooling_vae, tiny_vae
from vcagen.autoencoder import (
    DecodingConfig,
    IdentityAutoencoder,
    KLAutoencoder,
    KLConfig,
    build_autoencoder,
    to_numpy,
)
from vcagen.files import write_grid, write_image


def test_all_grey_levels_survive_the_round_trip() -> None:
    autoencoder = IdentityAutoencoder()
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    moments = autoencoder.encode(images)
    assert moments.shape == (1, 2, 16, 16)
    latents = autoencoder.sample_latents(moments, [])
    assert (latents.min(), latents.max()) == (-1, 1)
    assert torch.equal(autoencoder.decode(latents), images)


def test_values_outside_the_range_are_clamped_in_files_and_grids(tmp_path) -> None:
    levels = torch.tensor([-1.3, -1.0, 0.0, 1.0, 1.3]).reshape(5, 1, 1, 1).expand(5, 3, 8, 8)
    images = to_numpy(IdentityAutoencoder().decode(levels))
    assert images[:, 0, 0, 0].tolist() == [0, 0, 128, 255, 255]
    write_grid(tmp_path / "grid.png", images, columns=3)  # five images do not fill two rows
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    for index, image in enumerate(images):
        write_image(tmp_path / "one.png", image)
        assert np.array_equal(np.asarray(Image.open(tmp_path / "one.png")), image)
        top, left = 2 + (index // 3) * 50, 2 + (index % 3) * 50
        tile = grid[top : top + 48, left : left + 48]
        assert np.array_equal(tile[::6, ::6], image)  # enlarged six times, in its own grey levels


def test_nan_is_an_error_and_not_a_black_picture() -> None:
    latents = torch.zeros(3, 1, 2, 2)
    latents[1, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"\[1\] .* not finite"):
        IdentityAutoencoder().decode(latents)


def test_truncation_is_darker_than_rounding() -> None:
    latents = torch.tensor([0.6 / 127.5 - 1, 100.4 / 127.5 - 1, 1.2]).reshape(3, 1, 1, 1)
    assert IdentityAutoencoder("nearest").decode(latents).flatten().tolist() == [1, 100, 255]
    assert IdentityAutoencoder("truncate").decode(latents).flatten().tolist() == [0, 100, 255]


def test_scale_and_shift_come_from_the_autoencoder_and_are_undone() -> None:
    vae = pooling_vae(scale=0.25, shift=1.5)
    autoencoder = KLAutoencoder(vae, vae)
    flat = torch.tensor([[0, 128, 255], [10, 20, 30]], dtype=torch.uint8)[:, :, None, None].expand(2, 3, 16, 24)
    moments = autoencoder.encode(flat)
    latents = autoencoder.sample_latents(moments, [torch.Generator(), torch.Generator()])
    assert autoencoder.latent_shape((3, 16, 24)) == (3, 2, 3) == tuple(latents.shape[1:])
    assert autoencoder.image_size((2, 3)) == (16, 24)
    assert torch.allclose(latents[0, :, 0, 0], (torch.tensor([-1.0, 128 / 127.5 - 1, 1.0]) - 1.5) * 0.25)
    assert torch.equal(autoencoder.decode(latents), flat)


def test_each_generator_draws_its_own_posterior_sample() -> None:
    vae = tiny_vae()
    autoencoder = KLAutoencoder(vae, vae)
    images = torch.randint(256, (1, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte().expand(2, -1, -1, -1)
    moments = autoencoder.encode(images)

    def draw(*seeds: int) -> torch.Tensor:
        return autoencoder.sample_latents(moments[: len(seeds)], [torch.Generator().manual_seed(s) for s in seeds])

    both = draw(1, 2)
    assert torch.equal(both[:1], draw(1))
    assert not torch.equal(both[0], both[1])
    with torch.no_grad():
        expected = vae.encode(images[:1].float() / 127.5 - 1).latent_dist
    draws = torch.cat([draw(seed, seed + 1000) for seed in range(400)])
    assert torch.allclose(draws.mean(0), 0.18215 * expected.mean[0], atol=0.03)
    assert torch.allclose(draws.std(0), 0.18215 * expected.std[0], rtol=0.15)


def test_images_an_autoencoder_cannot_take_are_refused() -> None:
    autoencoder = KLAutoencoder(tiny_vae(), tiny_vae())
    with pytest.raises(ValueError, match="images of 1 channels, but the autoencoder encodes 3"):
        autoencoder.latent_shape((1, 16, 16))
    with pytest.raises(ValueError, match="images of 12x16 pixels; the autoencoder needs multiples of 8"):
        autoencoder.latent_shape((3, 12, 16))


def test_an_autoencoder_must_give_back_images_of_its_own_kind(tmp_path: Path) -> None:
    tiny_vae(out_channels=1).save_pretrained(tmp_path / "grey")
    tiny_vae().save_pretrained(tmp_path / "colour")
    for source, decoder in (("grey", None), ("colour", str(tmp_path / "grey"))):
        with pytest.raises(ValueError, match=r"grey: images of 3 channels are encoded, but decoded ones have 1"):
            build_autoencoder(KLConfig(source=str(tmp_path / source)), DecodingConfig(decoder=decoder))


def test_an_autoencoder_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"autoencoder.source={tmp_path}: no AutoencoderKL can be loaded"):
        build_autoencoder(KLConfig(source=str(tmp_path)), DecodingConfig())
    for damage in ({"_class_name": "UNet2DModel"}, {"scaling_factor": 0}, {"scaling_factor": None}):
        tiny_vae().save_pretrained(tmp_path / "damaged")
        path = tmp_path / "damaged/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | damage))
        with pytest.raises(ValueError, match="no AutoencoderKL can be loaded from there"):
            build_autoencoder(KLConfig(source=str(tmp_path / "damaged")), DecodingConfig())
    weights = tmp_path / "damaged/diffusion_pytorch_model.safetensors"
    tiny_vae().save_pretrained(tmp_path / "damaged")
    tensors = load_file(weights)
    del tensors["decoder.conv_out.bias"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensors missing or unknown: decoder\.conv_out\.bias"):
        build_autoencoder(KLConfig(source=str(tmp_path / "damaged")), DecodingConfig())
    tiny_vae().save_pretrained(tmp_path / "pipeline/vae")
    built = build_autoencoder(KLConfig(source=str(tmp_path / "pipeline")), DecodingConfig())
    assert isinstance(built, KLAutoencoder)
