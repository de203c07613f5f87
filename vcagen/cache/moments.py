"""Moments to be cached: images that are decoded, cropped and encoded."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vcagen.autoencoder import Autoencoder
from vcagen.cache.records import ImageSource, Record
from vcagen.data.images import center_crop, decode_bytes


class Moments(NamedTuple):
    """Moments of some records, float16 (n, 2C, h, w), and those that could not be used, by key."""

    positions: list[int]
    moments: torch.Tensor
    mirrored: torch.Tensor | None
    bad: dict[str, str]


class MomentSource(Protocol):
    """Where moments come from: images that are encoded, or someone else's latents."""

    records: list[Record]

    def bad(self, positions: Sequence[int]) -> dict[str, str]:
        """Those of some records that cannot be used and are known before encoding: the reason by key."""

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """Moments of the records from `start` to `end`, in order."""


class EncodedImages:
    """Images of a source, decoded, cropped and encoded.

    Args:
        source: the images.
        autoencoder: encodes, on its device and in its precision.
        image_size: side of ADM's centre crop.
        mirrored: encode mirror images too.
        batch_size: images per encoder call.
        num_threads: that decode.

    Attributes:
        num_encoded: images so far.
        seconds: spent so far on `decode` (over all threads), `encode` and, by the caller, `write`.
    """

    def __init__(
        self,
        source: ImageSource,
        autoencoder: Autoencoder,
        image_size: int,
        mirrored: bool,
        batch_size: int,
        num_threads: int,
    ) -> None:
        self.source, self.autoencoder = source, autoencoder
        self.records = source.records
        self.image_size, self.mirrored = image_size, mirrored
        self.batch_size, self.num_threads = batch_size, num_threads
        self.num_encoded = 0
        self.seconds = {"decode": 0.0, "encode": 0.0, "write": 0.0}

    def image(self, position: int) -> np.ndarray:
        """uint8 (C, size, size), cropped; a `ValueError` that starts with the key."""
        image = center_crop(self._decoded(position), self.image_size)
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def bad(self, positions: Sequence[int]) -> dict[str, str]:
        """See `MomentSource`. Decodes each to its end."""
        with ThreadPoolExecutor(self.num_threads) as pool:
            reasons = list(pool.map(self._problem, positions))
        found = zip(positions, reasons, strict=True)
        return {self.records[position].key: reason for position, reason in found if reason is not None}

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """See `MomentSource`. The next batch decodes while this one is encoded."""
        starts = range(start, end, self.batch_size)
        with ThreadPoolExecutor(self.num_threads) as pool:
            ahead = []
            for first in starts:
                positions = range(first, min(first + self.batch_size, end))
                ahead.append((positions, [pool.submit(self._cropped, position) for position in positions]))
                if len(ahead) == 2:
                    yield self._encode(*ahead.pop(0))
            for positions, futures in ahead:
                yield self._encode(positions, futures)

    def _decoded(self, position: int) -> np.ndarray:
        key = self.records[position].key
        try:
            content = self.source.read(position)
        except OSError as error:
            raise ValueError(f"{key}: {error.strerror or error}") from error
        return decode_bytes(content, key)

    def _problem(self, position: int) -> str | None:
        try:
            self._decoded(position)
        except ValueError as error:
            return str(error)
        return None

    def _cropped(self, position: int) -> np.ndarray | str:
        started = time.thread_time()
        try:
            return self.image(position)
        except ValueError as error:
            return str(error)
        finally:
            self.seconds["decode"] += time.thread_time() - started

    def _encode(self, positions: range, futures: list[Any]) -> Moments:
        found = {position: future.result() for position, future in zip(positions, futures, strict=True)}
        good = [position for position, image in found.items() if not isinstance(image, str)]
        bad = {self.records[position].key: image for position, image in found.items() if isinstance(image, str)}
        shape = self.autoencoder.latent_shape((3, self.image_size, self.image_size))
        empty = torch.empty(0, 2 * shape[0], *shape[1:], dtype=torch.float16)
        if not good:
            return Moments([], empty, empty if self.mirrored else None, bad)
        started = time.perf_counter()
        device = next(self.autoencoder.parameters(), torch.empty(0)).device
        images = torch.from_numpy(np.stack([found[position] for position in good])).to(device)
        moments = self._half(images, good)
        mirrored = self._half(images.flip(-1), good) if self.mirrored else None
        self.num_encoded += len(good)
        self.seconds["encode"] += time.perf_counter() - started
        return Moments(good, moments, mirrored, bad)

    def _half(self, images: torch.Tensor, positions: list[int]) -> torch.Tensor:
        moments = self.autoencoder.encode(images).to(torch.float16).cpu()
        finite = torch.isfinite(moments).flatten(1).all(1)
        if not finite.all():
            keys = [self.records[position].key for position, good in zip(positions, finite, strict=True) if not good]
            raise ValueError(
                f"{', '.join(keys[:5])}: the autoencoder's moments are not finite in float16; use precision fp32, or "
                "look at the image"
            )
        return moments
