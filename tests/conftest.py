import os
from collections.abc import Iterator
from pathlib import Path

# One thread: the same sums in every test and process, and no contention between test processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The hub is not asked: what tests need they make.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file

from vcagen.models.transformer import DiffusionTransformer

torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"
ORACLE_SHAPE = {"latent_size": (8, 8), "hidden_size": 64, "depth": 2, "num_heads": 4, "num_classes": 10}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def fill_with_noise(model: torch.nn.Module, std: float = 0.1) -> torch.nn.Module:
    """Random values in every parameter: DiT's zero-initialised layers would hide everything."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "pos_embed":
                parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return model


def tiny_model(**settings: object) -> DiffusionTransformer:
    """A two-block model of noise: latents (4, 8, 8), 10 classes, unless `settings` say otherwise."""
    torch.manual_seed(0)
    shape = {"latent_size": (8, 8), "hidden_size": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    model = DiffusionTransformer(**(shape | settings))  # type: ignore[arg-type]
    fill_with_noise(model)
    return model.eval()


@pytest.fixture(scope="session")
def dit_oracle_model() -> DiffusionTransformer:
    model = DiffusionTransformer(**ORACLE_SHAPE)  # type: ignore[arg-type]
    model.load_state_dict(load_file(DATA / "dit_weights.safetensors"))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def sit_oracle_model() -> DiffusionTransformer:
    model = DiffusionTransformer(**ORACLE_SHAPE)  # type: ignore[arg-type]
    model.load_state_dict(load_file(DATA / "sit_weights.safetensors"))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def inception_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inception with random weights, saved the way the real ones are."""
    from torch_fidelity import feature_extractor_inceptionv3
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_extractor_inceptionv3, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(FeatureExtractorInceptionV3, "load_state_dict", lambda *_: None)
        torch.save(FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]).state_dict(), path)
    yield path
    path.unlink()


def tiny_vae(**settings: object) -> AutoencoderKL:
    """A real AutoencoderKL of random weights, with sd-vae's stride, latent channels and scale."""
    torch.manual_seed(0)
    shape = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.18215,
    }
    return AutoencoderKL(**(shape | settings)).eval()  # type: ignore[arg-type]


def pooling_vae(scale: float, shift: float) -> AutoencoderKL:
    """An AutoencoderKL whose encoder takes 8x8 means of the three channels and whose decoder spreads them again."""
    vae = tiny_vae(latent_channels=3, scaling_factor=scale, shift_factor=shift, use_quant_conv=False)
    vae.register_to_config(use_post_quant_conv=False)
    vae.quant_conv = vae.post_quant_conv = None

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dtype_marker = torch.nn.Parameter(torch.zeros(1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            mean = torch.nn.functional.avg_pool2d(images, 8)
            return torch.cat([mean, torch.full_like(mean, -30.0)], dim=1)  # log variance: no spread

    vae.encoder = Encoder()
    vae.decoder = torch.nn.Upsample(scale_factor=8)
    return vae
