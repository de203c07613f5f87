"""From uint8 images to the features whose distributions the Frechet distance compares."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor
from torch_fidelity.utils import create_feature_extractor

from fid import digits_classifier
from vcagen.files import file_sha256

INCEPTION = "inception-v3-compat"
DIGITS = "digits-classifier"
# Names torch-fidelity gives the pooled features and the logits. ADM's Inception score leaves the bias out.
FEATURE_NAMES = {INCEPTION: ["2048", "logits_unbiased"], DIGITS: ["64", "logits"]}
INCEPTION_FILE = URL_INCEPTION_V3.rsplit("/", 1)[1]
INCEPTION_SHA256_PREFIX = "6726825d"  # torch.hub's convention puts it into the file's name


@dataclass(frozen=True)
class Features:
    """What an extractor says of B images.

    Attributes:
        pooled: (B, d) float32, for the Frechet distance.
        logits: (B, K) float32, for the Inception score; None if the extractor has no classes.
    """

    pooled: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Extractor:
    """A frozen network and what identifies it beside a score; built by `build_extractor`.

    Attributes:
        name: one of `FEATURE_NAMES`.
        dimension: d, the length of the pooled features.
        weights_sha256: of the file the weights came from; two scores compare only if it is the same.
        network: torch-fidelity's module, in eval mode.
        device: where it runs.
    """

    name: str
    dimension: int
    weights_sha256: str
    network: nn.Module
    device: torch.device

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Features:
        """Features of a batch, on the extractor's device.

        Args:
            images: (B, 3, H, W) uint8 on any device; 8x8 for digits, any size for Inception, which resizes.

        Raises:
            ValueError: another type or shape.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"images are {images.dtype} {tuple(images.shape)}; expected uint8 (B, 3, H, W): "
                "quantise to 0..255 and repeat a single channel three times"
            )
        with _without_tf32():
            pooled, logits = self.network(images.to(self.device))
        return Features(pooled, logits)


class DigitsFeatureExtractor(FeatureExtractorBase):
    """The digits classifier as torch-fidelity wants it; `register` makes it known there by name."""

    def __init__(self, name: str, features_list: list[str], **kwargs: object) -> None:
        """Loads the shipped weights; `kwargs` are torch-fidelity's settings for other extractors."""
        super().__init__(name, features_list)
        self.classifier = digits_classifier.load_digits_classifier()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The requested features of `images` (B, 3, 8, 8) uint8; a `ValueError` for another type or size."""
        output = self.classifier(images)
        features = {"64": output.features, "logits": output.logits}
        return tuple(features[name] for name in self.features_list)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        """All feature names."""
        return "64", "logits"

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        """The feature that `metric` (isc, fid, kid or prc) uses."""
        return {"isc": "logits", "fid": "64", "kid": "64", "prc": "64"}[metric]

    @staticmethod
    def can_be_compiled() -> bool:
        """No: compiling takes longer than the network saves."""
        return False

    @staticmethod
    def get_dummy_input_for_compile() -> Tensor:
        """One black image."""
        return torch.zeros(1, 3, 8, 8, dtype=torch.uint8)


def register() -> None:
    """Makes "digits-classifier" a feature extractor of torch-fidelity; again is fine."""
    if DIGITS not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(DIGITS, DigitsFeatureExtractor)


def build_extractor(name: str, weights_path: str | Path | None = None, device: str | torch.device = "cpu") -> Extractor:
    """The extractor called `name`, ready to run.

    Args:
        name: "inception-v3-compat" (2048 features, 1008 logits) or "digits-classifier" (64 and 10).
        weights_path: Inception's weights; None takes them from torch.hub's cache, after a download if needed.
        device: where to run it.

    Raises:
        ValueError: an unknown name, or weights that are missing, unreadable, changed or out of reach.
    """
    if name not in FEATURE_NAMES:
        raise ValueError(f"unknown feature extractor {name!r}; known: {', '.join(FEATURE_NAMES)}")
    if name == DIGITS:
        if weights_path is not None:
            raise ValueError(f"{DIGITS} brings its own weights; leave out --extractor-weights {weights_path}")
        register()
        path = Path(digits_classifier.__file__).with_name(digits_classifier.WEIGHTS_NAME)
        network = create_feature_extractor(name, FEATURE_NAMES[name], cuda=False, verbose=False)
    else:
        path = _downloaded_inception_weights() if weights_path is None else Path(weights_path)
        network = _load_inception(path)
    return Extractor(
        name=name,
        dimension=int(FEATURE_NAMES[name][0]),
        weights_sha256=file_sha256(path),
        network=network.to(device),
        device=torch.device(device),
    )


def _load_inception(path: Path) -> nn.Module:
    """torch-fidelity's Inception v3 with the weights of `path`, on CPU."""
    if not path.is_file():
        raise ValueError(f"no Inception weights at {path}; pass --extractor-weights PATH to {INCEPTION_FILE}")
    try:
        # torch-fidelity unpickles whatever it is given; this refuses anything but tensors beforehand.
        torch.load(path, map_location="cpu", weights_only=True)
        return create_feature_extractor(
            INCEPTION,
            FEATURE_NAMES[INCEPTION],
            cuda=False,
            verbose=False,
            feature_extractor_weights_path=str(path),
        )
    except (RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} does not hold Inception weights; expected {INCEPTION_FILE}") from error


def _downloaded_inception_weights() -> Path:
    """Where torch-fidelity itself keeps the weights; downloaded and checked if they are not there."""
    path = Path(torch.hub.get_dir(), "checkpoints", INCEPTION_FILE)
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(URL_INCEPTION_V3, str(path), hash_prefix=INCEPTION_SHA256_PREFIX)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"cannot download the Inception weights ({error}); fetch {URL_INCEPTION_V3} elsewhere "
                f"and pass --extractor-weights PATH to {INCEPTION_FILE}"
            ) from error
    return path


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Full float32 on GPUs: TF32, cuDNN's default, moves the features by 5e-4 of their size."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)
