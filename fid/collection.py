"""All that the metrics need of a set of images, gathered by any number of processes, in any batches, across stops.

Each process adds up what it has seen and writes that down now and then, together with which images it were. What is
missing is what no such part holds, so a stopped collection goes on where it was, in another number of processes too.
"""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from fid.features import NUM_LOGITS, SPATIAL_DIMENSION, Extractor, Features
from fid.images import Images, split_positions
from fid.inception_score import InceptionScoreSums
from fid.moments import FeatureMoments
from vcagen.files import require_writable, written_aside

SAVING_SHARE = 0.05  # of the time may go into writing parts
PER_IMAGE = ("done", "pixels", "predictions", "constant")


class Process(Protocol):
    """Which of how many processes this is; accelerate's `PartialState` is one."""

    process_index: int
    num_processes: int

    @property
    def is_main_process(self) -> bool:
        """The first of all."""

    def wait_for_everyone(self) -> None:
        """Returns when all processes have come here."""


@dataclass(frozen=True)
class Wanted:
    """What to gather beside the moments of the pooled features.

    Attributes:
        spatial: moments of sFID's features.
        scores: sums for the Inception Score.
        features: the pooled features themselves, for precision, recall and KID: N x d float32 on disk.
    """

    spatial: bool = False
    scores: bool = False
    features: bool = False


class Part:
    """What is known of some images of a set: sums, and a little of each.

    Attributes:
        done: (N,) bool, which images.
        pixels: (N,) uint64, the beginning of a hash of each image done.
        predictions: (N,) int32, the class with its largest logit; 0 without logits.
        constant: (N,) bool, whether all its pixels are equal.
        halves: moments of the pooled features of images with an even index, and with an odd one.
        spatial: moments of sFID's features, or None.
        scores: sums for the Inception Score, or None.
    """

    def __init__(self, num_images: int, extractor: Extractor, wanted: Wanted) -> None:
        self.done: NDArray[np.bool_] = np.zeros(num_images, dtype=np.bool_)
        self.pixels: NDArray[np.uint64] = np.zeros(num_images, dtype=np.uint64)
        self.predictions: NDArray[np.int32] = np.zeros(num_images, dtype=np.int32)
        self.constant: NDArray[np.bool_] = np.zeros(num_images, dtype=np.bool_)
        self.halves = (FeatureMoments(extractor.dimension), FeatureMoments(extractor.dimension))
        self.spatial = FeatureMoments(SPATIAL_DIMENSION) if wanted.spatial else None
        self.scores = InceptionScoreSums(num_images, NUM_LOGITS[extractor.name]) if wanted.scores else None

    def merge(self, other: "Part") -> None:
        """Adds another part, of other images of the same set."""
        assert not (self.done & other.done).any()
        for name in PER_IMAGE:
            getattr(self, name)[other.done] = getattr(other, name)[other.done]
        for mine, others in zip(self._moments(), other._moments(), strict=True):
            mine.merge(others)
        if self.scores is not None and other.scores is not None:
            self.scores.merge(other.scores)

    def pooled(self) -> FeatureMoments:
        """Moments of the pooled features of all images."""
        moments = FeatureMoments(self.halves[0].dimension)
        for half in self.halves:
            moments.merge(half)
        return moments

    def save(self, path: Path) -> None:
        """Writes it, whole or not at all."""
        tensors: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in PER_IMAGE}
        for index, moments in enumerate(self._moments()):
            tensors |= {f"{index}.n": np.array(moments.n), f"{index}.sum": moments.sum, f"{index}.outer": moments.outer}
        if self.scores is not None:
            tensors |= {f"scores.{name}": value for name, value in vars(self.scores).items()}
        with written_aside(path) as aside:
            save_file(tensors, aside)

    def load(self, path: Path) -> None:
        """Takes over what `save` wrote; a `ValueError` that names a damaged file."""
        try:
            tensors = load_file(path)
            for name in PER_IMAGE:
                setattr(self, name, tensors[name])
            for index, moments in enumerate(self._moments()):
                moments.n = int(tensors[f"{index}.n"])
                moments.sum, moments.outer = tensors[f"{index}.sum"], tensors[f"{index}.outer"]
            for name in vars(self.scores) if self.scores is not None else ():
                setattr(self.scores, name, tensors[f"scores.{name}"])
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path}: damaged ({error}); delete it, and its images are taken again") from error

    def _moments(self) -> Iterator[FeatureMoments]:
        yield from self.halves
        if self.spatial is not None:
            yield self.spatial


@dataclass(frozen=True)
class Collected:
    """What is known of a set of images.

    Attributes:
        num_images: N.
        part: of all of them.
        features: (N, d) float32 on disk, or None if not wanted.
    """

    num_images: int
    part: Part
    features: NDArray[np.float32] | None

    @property
    def pixels_sha256(self) -> str:
        """Of the images' own hashes, in order."""
        return hashlib.sha256(self.part.pixels.tobytes()).hexdigest()

    @property
    def duplicates(self) -> int:
        """Images that equal an earlier one."""
        return self.num_images - len(np.unique(self.part.pixels))


class Collection:
    """A set of images being collected, with its place on disk.

    Args:
        images: the set.
        extractor: takes the features.
        wanted: what to gather.
        folder: for parts; other images or wishes need another folder, so it is named by `identity`.
        what: the set, on the progress bar.
    """

    def __init__(self, images: Images, extractor: Extractor, wanted: Wanted, folder: Path, what: str) -> None:
        self.images, self.extractor, self.wanted, self.folder, self.what = images, extractor, wanted, folder, what
        self.positions = split_positions(images)

    def prepare(self) -> None:
        """Makes the folder, by one process before `run`; parts of earlier runs become one.

        Raises:
            ValueError: it cannot be written, the disk is too small, or a part is damaged.
        """
        num, dimension = self.images.about.num_images, self.extractor.dimension
        need = 3 * 8 * (dimension**2 + (SPATIAL_DIMENSION**2 if self.wanted.spatial else 0))
        need += 2 * num * dimension * 4 if self.wanted.features else 0
        require_writable(self.folder, need)
        paths = self._parts()
        if len(paths) > 1:
            self._sum_of(paths).save(self._new_path("part"))
            for path in paths:
                path.unlink()

    def run(self, batch_size: int, process: Process, estimate: Callable[[Part], str] | None = None) -> None:
        """Takes the features of this process's share of what is missing. All processes call it; all return together.

        Args:
            batch_size: images at a time; changes memory and speed alone.
            process: this one.
            estimate: text for the progress bar, of what this process has seen.

        Raises:
            ValueError: an image that cannot be read, or whose features are not finite; the rest is kept.
        """
        done = [_done(path) for path in self._parts()]
        missing = np.flatnonzero(~np.any(done, axis=0)) if done else np.arange(self.images.about.num_images)
        process.wait_for_everyone()  # before any part is added, or the others would divide what is left of it
        share = missing[process.process_index :: process.num_processes]
        batches = [share[start : start + batch_size].tolist() for start in range(0, len(share), batch_size)]
        part, path = self._empty(), self._new_path("part")
        bar = tqdm(total=len(share), desc=self.what, unit="image", delay=2, disable=not process.is_main_process)
        with bar, self._new_path("features").open("wb") as kept:

            def save() -> None:
                kept.flush()
                os.fsync(kept.fileno())  # before the part that says they are there
                part.save(path)

            saver, is_whole = _Saver(save), True
            try:
                for indices, images in self._read(batches):
                    features = self._features(indices, images)
                    is_whole = False  # a stop in the middle of adding leaves sums of nobody knows which images
                    self._add(part, kept, indices, images, features)
                    is_whole = True
                    bar.update(len(indices))
                    if saver.saved_now() and estimate is not None and process.is_main_process:
                        bar.set_postfix_str(estimate(part))
            finally:
                if is_whole and part.done.any():
                    save()
        process.wait_for_everyone()

    def result(self) -> Collected:
        """What all processes gathered; after `run`, by one process."""
        whole = self._sum_of(self._parts())
        assert whole.done.all(), f"{int((~whole.done).sum())} images were left out"
        assert sum(half.n for half in whole.halves) == self.images.about.num_images
        return Collected(self.images.about.num_images, whole, self._all_features() if self.wanted.features else None)

    def _features(self, indices: list[int], images: NDArray[np.uint8]) -> Features:
        features = self.extractor(torch.from_numpy(images))
        finite = torch.isfinite(features.pooled).all(dim=1)
        if not finite.all():
            index = indices[int((~finite).nonzero()[0])]
            raise ValueError(
                f"{self.images.about.name}: the features of image {index} are NaN or inf; check the image and the "
                f"weights of {self.extractor.name}"
            )
        return features

    def _add(
        self, part: Part, kept: IO[bytes], indices: list[int], images: NDArray[np.uint8], features: Features
    ) -> None:
        for parity, half in enumerate(part.halves):
            half.update(features.pooled[[row for row, index in enumerate(indices) if index % 2 == parity]])
        if part.spatial is not None:
            assert features.spatial is not None
            part.spatial.update(features.spatial)
        if part.scores is not None:
            assert features.logits is not None
            part.scores.update(features.logits, self.positions[indices])
        if self.wanted.features:
            records = np.zeros(len(indices), self._record)
            records["index"], records["features"] = indices, features.pooled.cpu().numpy()
            kept.write(records.tobytes())
        if features.logits is not None:
            part.predictions[indices] = features.logits.argmax(dim=1).cpu().numpy()
        part.pixels[indices] = [int.from_bytes(hashlib.sha256(image.tobytes()).digest()[:8], "big") for image in images]
        part.constant[indices] = [image.min() == image.max() for image in images]
        part.done[indices] = True

    def _read(self, batches: list[list[int]]) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
        """Batches of images; those of files are read one batch ahead."""
        if not self.images.from_files:
            for indices in batches:
                yield indices, self.images.batch(indices)
            return
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.images.batch, batches[0]) if batches else None
            for indices, following in zip(batches, [*batches[1:], None], strict=False):  # none at all is fine
                assert ahead is not None
                images = ahead.result()
                ahead = pool.submit(self.images.batch, following) if following else None
                yield indices, images

    def _parts(self) -> list[Path]:
        """The files that together hold every image done, each image once.

        A stop while parts were made one leaves the sum beside them; what is in it already is left out.
        """
        found: list[Path] = []
        seen = np.zeros(self.images.about.num_images, dtype=np.bool_)
        parts = [(path, _done(path)) for path in sorted(self.folder.glob("part-*.safetensors"))]
        for path, done in sorted(parts, key=lambda item: -int(item[1].sum())):
            if not (done & seen).any():
                found.append(path)
                seen |= done
            elif (done & ~seen).any():
                raise ValueError(f"{self.folder}: parts overlap; delete the folder, and its images are taken again")
        return found

    def _sum_of(self, paths: list[Path]) -> Part:
        whole = self._empty()
        for path in paths:
            part = self._empty()
            part.load(path)
            whole.merge(part)
        return whole

    def _all_features(self) -> NDArray[np.float32]:
        """Every image's features in order, put together on disk."""
        path, shape = self.folder / "features.npy", (self.images.about.num_images, self.extractor.dimension)
        features = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        found = np.zeros(self.images.about.num_images, dtype=np.bool_)
        for file in self.folder.glob("features-*.bin"):
            count = file.stat().st_size // self._record.itemsize  # a record cut off by a kill is in no part
            if count:
                records = np.memmap(file, self._record, "r", shape=(count,))
                features[records["index"]] = records["features"]
                found[records["index"]] = True
        if not found.all():
            raise ValueError(
                f"{self.folder}: the features of {int((~found).sum())} images are gone; delete the folder, and its "
                "images are taken again"
            )
        return features

    def _empty(self) -> Part:
        return Part(self.images.about.num_images, self.extractor, self.wanted)

    def _new_path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{uuid.uuid4().hex[:12]}{'.safetensors' if kind == 'part' else '.bin'}"

    @property
    def _record(self) -> np.dtype[Any]:
        return np.dtype([("index", "<i8"), ("features", "<f4", (self.extractor.dimension,))])


def _done(path: Path) -> NDArray[np.bool_]:
    """Which images a part holds; a `ValueError` that names a damaged file."""
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor("done")
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); delete it, and its images are taken again") from error


class _Saver:
    """Saves as often as its share of the time allows: after 1 second, when a save takes no time."""

    def __init__(self, save: Callable[[], None]) -> None:
        self.save = save
        self.last_end, self.pause = time.monotonic(), 1.0

    def saved_now(self) -> bool:
        """Saves if it is time to; whether it did."""
        start = time.monotonic()
        if start - self.last_end < self.pause:
            return False
        self.save()
        self.last_end = time.monotonic()
        self.pause = max(1.0, (self.last_end - start) / SAVING_SHARE)
        return True


def identity(images: Images, extractor: Extractor, wanted: Wanted) -> str:
    """Eight hex digits that differ where parts could not be added up."""
    facts = [images.identity(), extractor.name, extractor.weights_sha256, vars(wanted)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
