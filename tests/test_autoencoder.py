import numpy as np
import pytest
import torch
from PIL import Image

from vcagen.autoencoder import IdentityAutoencoder, to_numpy
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
