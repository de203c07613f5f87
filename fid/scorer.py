"""A Frechet distance during training, on all processes of the run."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fid.collection import Collected, Collection, Wanted
from fid.features import DIGITS, build_extractor
from fid.images import About, Images
from fid.metrics import FRECHET_NAMES, count, distance, gaussian
from fid.reference import open_reference
from fid.result import own_label_accuracy
from fid.sampled import three_channels
from fid.score import require_comparable, require_same_weights
from vcagen.config import ScoreConfig
from vcagen.generation import ImageMaker, plan_labels, plan_samples
from vcagen.models.transformer import DiffusionTransformer
from vcagen.run import Run

SEED = 0
BATCH_SIZE = 64


class TrainingImages:
    """The first N images of a model in training under seed 0."""

    from_files = False

    def __init__(self, run: Run, model: DiffusionTransformer, num_images: int) -> None:
        num_classes = len(run.data.class_names)
        self.maker = ImageMaker(model, run.config, run.autoencoder)
        labels = plan_labels(num_images, SEED, num_classes, run.config.label_mode)
        self.samples = plan_samples(labels, SEED, num_classes)
        self.about = About(
            name="the model in training",
            num_images=num_images,
            size=run.autoencoder.image_size(model.config.latent_size),
            labels=np.array(labels),
            class_names=run.data.class_names,
        )

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `fid.images.Images`."""
        images = self.maker.batch([self.samples[index] for index in indices])
        return np.ascontiguousarray(three_channels(images).transpose(0, 3, 1, 2))

    def identity(self) -> dict[str, Any]:
        """Nothing outlasts a score in training, so nothing needs to be told apart."""
        return {}


@dataclass
class TrainingScorer:
    """See `vcagen.training.Scorer`.

    Attributes:
        config: what to compare with, and how many images.
    """

    config: ScoreConfig

    def prepare(self, run: Run) -> None:
        """Opens the reference and the network, and proves that they fit the run.

        Raises:
            ValueError: they do not, or the reference is a folder, which would have to be read at every start.
        """
        config = self.config
        if Path(config.reference).is_dir():
            raise ValueError(
                f"score.reference={config.reference}: is a folder; write its statistics once by "
                f"`python -m fid reference {config.reference} --crop SIZE --out ref.npz` and give that file"
            )
        images: Images = TrainingImages(run, run.ema_model, config.num_images)
        self.reference = open_reference(config.reference, images.about.size[0])  # the size matters to digits alone
        name = self.reference.extractor or DIGITS
        require_comparable(images, self.reference, name)
        weights = None if config.extractor_weights is None else Path(config.extractor_weights)
        with run.accelerator.main_process_first():
            self.extractor = build_extractor(name, weights, run.accelerator.device)
        require_same_weights(self.reference, self.extractor)
        self.real = self.reference.pooled  # of images, known to the main process after the first score
        self.is_known = self.real is not None

    def score(self, run: Run, model: DiffusionTransformer) -> dict[str, float]:
        """The distance by its name, on the main process; for digits with the fraction read as they were asked to be."""
        if not self.is_known:
            assert self.reference.images is not None
            collected = self._collect(run, self.reference.images, "reference")
            self.real = None if collected is None else gaussian(collected.part.pooled())
            self.is_known = True
        images = TrainingImages(run, model, self.config.num_images)
        generated = self._collect(run, images, "generated")
        if generated is None:
            return {}
        assert self.real is not None
        name = f"{FRECHET_NAMES[self.extractor.name]}-{count(generated.num_images)}"
        scores = {name: distance(gaussian(generated.part.pooled()), self.real)}
        accuracy = own_label_accuracy(images, generated, self.extractor)
        return scores if accuracy is None else scores | {"own_label_accuracy": accuracy}

    def _collect(self, run: Run, images: Images, what: str) -> Collected | None:
        folder, process = run.folder / "score.parts", run.accelerator
        collection = Collection(images, self.extractor, Wanted(), folder, f"{what} images")
        if process.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed process left is of other weights
            collection.prepare()
        process.wait_for_everyone()
        collection.run(BATCH_SIZE, process)
        collected = collection.result() if process.is_main_process else None
        if process.is_main_process:
            shutil.rmtree(folder)
        return collected
