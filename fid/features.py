"""From uint8 images to the features whose distributions the metrics compare."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_clip import MODEL_METADATA as CLIP_METADATA
from torch_fidelity.feature_extractor_clip import MODEL_URLS as CLIP_URLS
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor
from torch_fidelity.utils import create_feature_extractor

from fid import digits_classifier
from vcagen.files import file_sha256

INCEPTION = "inception-v3-compat"
DIGITS = "digits-classifier"
DINO = "dinov2-vit-l-14"
CLIP = "clip-vit-l-14"
# Names torch-fidelity gives the pooled features and the logits. ADM's Inception score leaves the bias out.
FEATURE_NAMES = {INCEPTION: ["2048", "logits_unbiased"], DIGITS: ["64", "logits"], DINO: ["dinov2"], CLIP: ["clip"]}
DIMENSIONS = {INCEPTION: 2048, DIGITS: 64, DINO: 1024, CLIP: 768}
NUM_LOGITS = {INCEPTION: 1008, DIGITS: 10}
RESIZE_RULES = {
    INCEPTION: "TensorFlow 1 bilinear to 299 without antialiasing, in the network, from uint8",
    DIGITS: "none for 8x8; means of 2x2 pixels for 16x16",
    DINO: "TensorFlow 1 bilinear to 224 without antialiasing, in the network, from uint8",
    CLIP: "TensorFlow 1 bilinear to 224 without antialiasing, in the network, from uint8",
}
INCEPTION_FILE = URL_INCEPTION_V3.rsplit("/", 1)[1]
INCEPTION_SHA256_PREFIX = "6726825d"  # torch.hub's convention puts it into the file's name
DIGITS_BATCH = 64
DIGITS_SIZES = ((8, 8), (16, 16))
DINO_FILE = "dinov2_vitl14_pretrain.pth"

# sFID: the first 7 channels of ADM's mixed_6/conv, which is this branch after its ReLU, on a grid of 17x17.
SPATIAL_CHANNELS = 7
SPATIAL_DIMENSION = 17 * 17 * SPATIAL_CHANNELS


@dataclass(frozen=True)
class Features:
    """What an extractor says of B images.

    Attributes:
        pooled: (B, d) float32, for the Frechet distance, precision, recall and KID.
        logits: (B, K) float32, for the Inception score; None if the extractor has no classes.
        spatial: (B, 2023) float32, for sFID, flattened in ADM's order (row, column, channel); Inception alone.
    """

    pooled: Tensor
    logits: Tensor | None
    spatial: Tensor | None = None


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
            images: (B, 3, H, W) uint8 on any device; 8x8 or 16x16 for digits, any size for the others, which resize.

        Raises:
            ValueError: another type or shape.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(
                f"images are {images.dtype} {tuple(images.shape)}; expected uint8 (B, 3, H, W): "
                "quantise to 0..255 and repeat a single channel three times"
            )
        spatial: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Tensor) -> None:
            spatial.append(output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1))  # (B, 17 * 17 * 7)

        # The whole branch, as its batch norm alone would give the values before the ReLU or after, by accident.
        hook = _spatial_layer(self.network).register_forward_hook(keep) if self.name == INCEPTION else None
        try:
            with _without_tf32():
                outputs = self.network(images.to(self.device))
        finally:
            if hook:
                hook.remove()
        logits = outputs[1] if len(outputs) > 1 else None
        return Features(outputs[0], logits, spatial[0] if spatial else None)


def _spatial_layer(network: nn.Module) -> nn.Module:
    return network.get_submodule("Mixed_6d.branch1x1")


class DigitsFeatureExtractor(FeatureExtractorBase):
    """The digits classifier as torch-fidelity wants it; `register` makes it known there by name."""

    def __init__(self, name: str, features_list: list[str], **kwargs: object) -> None:
        """Loads the shipped weights; `kwargs` are torch-fidelity's settings for other extractors."""
        super().__init__(name, features_list)
        self.classifier = digits_classifier.load_digits_classifier()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """The requested features of `images` (B, 3, 8, 8) uint8; a `ValueError` for another type or size."""
        # Matrix products of other sizes round differently. In batches of one size, an image's features do not depend
        # on its neighbours, to the bit; Inception's are so anyway, its layers working image by image.
        padded = torch.cat([images, images.new_zeros(-len(images) % DIGITS_BATCH, *images.shape[1:])])
        outputs = [self.classifier(batch) for batch in padded.split(DIGITS_BATCH)]
        features = {
            "64": torch.cat([output.features for output in outputs])[: len(images)],
            "logits": torch.cat([output.logits for output in outputs])[: len(images)],
        }
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
        name: "inception-v3-compat" (2048 features, 1008 logits), "digits-classifier" (64 and 10), "dinov2-vit-l-14"
            (1024) or "clip-vit-l-14" (768).
        weights_path: the weights; None takes them from torch.hub's cache, after a download if needed. For DINOv2,
            whose code comes from torch.hub too, a torch.hub folder.
        device: where to run it.

    Raises:
        ValueError: an unknown name, or weights that are missing, unreadable, changed or out of reach.
    """
    if name not in FEATURE_NAMES:
        raise ValueError(f"unknown feature extractor {name!r}; known: {', '.join(FEATURE_NAMES)}")
    given = None if weights_path is None else Path(weights_path)
    if name == DIGITS:
        if given is not None:
            raise ValueError(f"{DIGITS} brings its own weights; leave out --extractor-weights {weights_path}")
        register()
        path = Path(digits_classifier.__file__).with_name(digits_classifier.WEIGHTS_NAME)
        network = create_feature_extractor(name, FEATURE_NAMES[name], cuda=False, verbose=False)
    elif name == INCEPTION:
        path = given or _downloaded(INCEPTION_FILE, URL_INCEPTION_V3, INCEPTION_SHA256_PREFIX, "Inception")
        network = _load_inception(path)
    elif name == CLIP:
        sha256 = CLIP_METADATA[CLIP]["hash"]
        path = given or _downloaded(f"{CLIP}-{sha256}.pt", CLIP_URLS[CLIP], sha256, "CLIP")
        network = _load(CLIP, path)
    else:
        path, network = _load_dino(given)
    return Extractor(
        name=name,
        dimension=DIMENSIONS[name],
        weights_sha256=file_sha256(path),
        # Channels last takes two thirds of the time for Inception on CPUs; features move by 4e-7 of their size.
        network=network.to(device, memory_format=torch.channels_last),
        device=torch.device(device),
    )


def _load_inception(path: Path) -> nn.Module:
    """torch-fidelity's Inception v3 with the weights of `path`, on CPU."""

    def refuse_code() -> None:
        # torch-fidelity unpickles whatever it is given; this refuses anything but tensors beforehand.
        torch.load(path, map_location="cpu", weights_only=True)

    return _load(INCEPTION, path, refuse_code)


def _load(name: str, path: Path, check: Callable[[], None] = lambda: None) -> nn.Module:
    """torch-fidelity's network called `name` with the weights of `path`, on CPU."""
    what, file = {INCEPTION: ("Inception", INCEPTION_FILE), CLIP: ("CLIP", CLIP_URLS[CLIP])}[name]
    if not path.is_file():
        raise ValueError(f"no {what} weights at {path}; pass --extractor-weights PATH to {file}")
    try:
        check()
        return create_feature_extractor(
            name, FEATURE_NAMES[name], cuda=False, verbose=False, feature_extractor_weights_path=str(path)
        )
    except Exception as error:  # damaged files make the unpickler raise anything
        raise ValueError(f"{path} does not hold {what} weights; expected {file}") from error


def _load_dino(hub_folder: Path | None) -> tuple[Path, nn.Module]:
    """DINOv2 by its own code, which torch.hub fetches together with the weights, or finds in `hub_folder`."""
    before = torch.hub.get_dir()
    folder = Path(before) if hub_folder is None else hub_folder
    if hub_folder is not None and not (folder / "checkpoints" / DINO_FILE).is_file():
        raise ValueError(
            f"{folder}: no checkpoints/{DINO_FILE} in it; give a torch.hub folder that holds DINOv2's code and weights"
        )
    try:
        torch.hub.set_dir(str(folder))
        network = create_feature_extractor(DINO, FEATURE_NAMES[DINO], cuda=False, verbose=False)
    except Exception as error:  # the code is not ours: anything may come
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"cannot load DINOv2 through torch.hub ({reason}); copy the torch.hub folder of a machine that has it and "
            "pass --extractor-weights FOLDER"
        ) from error
    finally:
        torch.hub.set_dir(before)
    return folder / "checkpoints" / DINO_FILE, network


def _downloaded(file_name: str, url: str, sha256_prefix: str, what: str) -> Path:
    """Where torch-fidelity itself keeps the weights; downloaded and checked if they are not there."""
    path = Path(torch.hub.get_dir(), "checkpoints", file_name)
    if not path.exists():
        print(f"downloading the {what} weights to {path}", file=sys.stderr)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256_prefix)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"cannot download the {what} weights ({error}); fetch {url} elsewhere "
                f"and pass --extractor-weights PATH to {file_name}"
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
