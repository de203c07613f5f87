"""Images that a model makes as they are asked for, each from its seed, index and label."""

import hashlib
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fid.images import About
from vcagen.files import require_writable, write_image, written_aside
from vcagen.generation import LoadedModel, PlannedSample, plan_labels
from vcagen.sample_folder import image_path, prepare_samples

Save = Literal["png", "npz"]


class SampledImages:
    """The first N images of a model under a seed.

    Args:
        model: to sample, as its settings say.
        num_images: N.
        seed: of noise and labels.
        folder: where kept images go.
        save: keep them as a folder of PNGs, as an npz for ADM's evaluator, or not at all.

    Raises:
        ValueError: fewer than two images.
    """

    from_files = False

    def __init__(self, model: LoadedModel, num_images: int, seed: int, folder: Path, save: Save | None) -> None:
        if num_images < 2:
            raise ValueError(f"--num-images {num_images}: a covariance needs at least 2 images")
        self.model, self.seed, self.folder, self.save = model, seed, folder, save
        self.rows_path = folder / "samples.npy"
        labels = np.array(plan_labels(num_images, seed, len(model.class_names), model.config.label_mode))
        self.about = About(
            name=str(model.checkpoint),
            num_images=num_images,
            size=model.maker.autoencoder.image_size(model.maker.model.config.latent_size),
            labels=labels,
            class_names=model.class_names,
            sampling=sampling_plan(model, seed),
        )
        self.labels = labels

    def batch(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """See `fid.images.Images`. Each sample's own generator draws its noise, so any split gives the same images."""
        images = self.model.maker.batch([self._planned(index) for index in indices])  # (B, H, W, C)
        if self.save == "png":
            for index, image in zip(indices, images, strict=True):
                write_image(image_path(self._png_folder, index), image)
        images = three_channels(images)
        if self.save == "npz" and not self.is_saved():
            self._write_rows(indices, images)
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def identity(self) -> dict[str, Any]:
        """The sampling protocol, with the plan and what is kept."""
        return {
            **_without_place(sampling_plan(self.model, self.seed)),
            "num_images": len(self.labels),
            "save": self.save,
        }

    def keep_rows_in(self, folder: Path) -> None:
        """Says where rows wait for their npz: with the parts that count them, so that neither outlives the other."""
        self.rows_path = folder / "samples.npy"

    def prepare(self) -> None:
        """Makes the places where images are kept; by one process, before any `batch`.

        Raises:
            ValueError: they cannot be made or the disk is too small.
        """
        height, width = self.about.size
        if self.save == "png":
            samples = [self._planned(index) for index in range(len(self.labels))]
            prepare_samples(self.model, samples, self._png_folder, self.model.config.label_mode)
        elif self.save == "npz" and not self.is_saved():
            num_bytes = len(self.labels) * height * width * 3
            exists = self.rows_path.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            require_writable(
                self.rows_path.parent, num_bytes * (1 if exists else 2)
            )  # the rows, and the npz made of them
            if not exists:
                with written_aside(self.rows_path) as aside:
                    np.lib.format.open_memmap(aside, "w+", np.uint8, (len(self.labels), height, width, 3)).flush()

    def is_saved(self) -> bool:
        """Whether all images that are to be kept lie there."""
        if self.save == "png":
            return all(image_path(self._png_folder, index).exists() for index in range(len(self.labels)))
        return self.save is None or self._npz_path.exists()

    def finish(self) -> Path | None:
        """Where the images are kept; an npz is put together now, by one process, after all batches."""
        if self.save == "png":  # some may have been taken away since they were counted
            for index in range(len(self.labels)):
                if not image_path(self._png_folder, index).exists():
                    self.batch([index])
        if self.save == "npz" and not self.is_saved():
            write_samples_npz(self._npz_path, self.rows_path, self.labels)
            self.rows_path.unlink()
        return {None: None, "png": self._png_folder, "npz": self._npz_path}[self.save]

    def _write_rows(self, indices: Sequence[int], images: NDArray[np.uint8]) -> None:
        # Plain writes, not a shared map: processes on two machines may write rows of one page.
        with self.rows_path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            for index, image in zip(indices, images, strict=True):
                file.seek(end - (len(self.labels) - index) * image.nbytes)
                file.write(image.tobytes())

    def _planned(self, index: int) -> PlannedSample:
        return PlannedSample(index=index, seed=self.seed, label=int(self.labels[index]))

    @property
    def _npz_path(self) -> Path:
        height, width = self.about.size
        return self.folder / f"samples_{len(self.labels)}x{height}x{width}x3.npz"

    @property
    def _png_folder(self) -> Path:
        return self.folder / "images"


def three_channels(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(B, H, W, 1 or 3) to (B, H, W, 3); one grey channel thrice."""
    return images.repeat(3, axis=-1) if images.shape[-1] == 1 else images


def sampling_plan(model: LoadedModel, seed: int) -> dict[str, Any]:
    """How images come about, whole."""
    return {**model.protocol, "seed": seed, "label_mode": model.config.label_mode}


def score_folder(model: LoadedModel, num_images: int, seed: int) -> Path:
    """A folder in the run's own for a score: other weights, settings, seeds or numbers are another folder."""
    plan = json.dumps(_without_place(sampling_plan(model, seed)), sort_keys=True)
    digest, step = hashlib.sha256(plan.encode()).hexdigest()[:8], model.weights_record.step
    name = f"{num_images}-{digest}" if step is None else f"step_{step:07d}-{num_images}-{digest}"
    return model.folder / "scores" / name


def _without_place(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan less the place of the checkpoint, whose weights are there by their hash."""
    return {key: value for key, value in plan.items() if key != "checkpoint"}


def write_samples_npz(path: Path, rows: Path, labels: NDArray[np.integer]) -> None:
    """ADM's sample file, not compressed: `arr_0` uint8 (N, H, W, 3), copied from a .npy file, and int64 `arr_1`."""
    with written_aside(path) as aside, zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.write(rows, "arr_0.npy")
        with archive.open("arr_1.npy", "w") as file:
            np.lib.format.write_array(file, np.asarray(labels, dtype=np.int64))
