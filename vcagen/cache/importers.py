"""Latents that other toolkits have cached, brought into our format."""

import functools
import json
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vcagen.autoencoder import Autoencoder
from vcagen.cache.sources import Record, whole_label
from vcagen.cache.writer import Moments

Layout = Literal["fast-dit", "repa", "lightningdit", "edm2"]

BATCH = 256

# Per-channel means of raw latents of sd-vae that was fed pixels in [0, 1], as EDM2 publishes them for its whitening.
EDM2_MEANS = np.array([5.81, 3.25, 0.12, -2.15])

EDM2_REASON = (
    "EDM2 feeds its autoencoder pixels in [0, 1], where sd-vae expects [-1, 1]; a model trained on such latents cannot "
    "be sampled or compared here. Build the cache from the images"
)


class ImportedLatents:
    """Someone else's latents as moments.

    Args:
        root: folder of the layout.
        layout: `fast-dit`, `NAME_features/I.npy` with `NAME_labels/I.npy`: one scaled draw per image, some of them
            mirrored for good; `repa`, `vae-sd/*/img-mean-std-*.npy` with `dataset.json`: mean and deviation;
            `lightningdit`, safetensors shards of one unscaled draw of image and mirror image.
        autoencoder: the one that made them, whose scale and shift undo theirs.

    Attributes:
        records: in our order.
        mirrored: whether there are mirror images.
        notes: what was lost before the import, for people.

    Raises:
        ValueError: files are missing, lack their partner, or have other shapes; the layout is EDM2's.
    """

    def __init__(self, root: Path, layout: Layout, autoencoder: Autoencoder) -> None:
        if not root.is_dir():
            raise ValueError(f"{root}: no such folder")
        if layout == "edm2":
            raise ValueError(f"{root}: {EDM2_REASON}")
        self.scale, self.shift = autoencoder.scale, autoencoder.shift
        self.mirrored = layout == "lightningdit"
        find = {"fast-dit": _fast_dit, "repa": _repa, "lightningdit": _lightningdit}[layout]
        found, self.notes = find(root)
        order = sorted(found, key=lambda item: item[0])
        self.records: list[Record] = [record for record, _ in order]
        if len({record.key for record in self.records}) != len(self.records):
            raise ValueError(f"{root}: a name comes twice; names must be unique")
        self._read: list[Callable[[], list[np.ndarray]]] = [read for _, read in order]
        self.layout = layout
        channels, *sides = self._item(0)[0].shape
        self.latent_shape = (channels // 2, *sides)
        if layout == "repa":
            _refuse_edm2(root, [self._item(i)[0] for i in range(0, len(order), -(-len(order) // 64))])

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """See `MomentSource`."""
        for first in range(start, end, BATCH):
            positions = list(range(first, min(first + BATCH, end)))
            items = [self._item(position) for position in positions]
            for position, item in zip(positions, items, strict=True):
                if any(part.shape != (2 * self.latent_shape[0], *self.latent_shape[1:]) for part in item):
                    raise ValueError(
                        f"{self.records[position].key}: latents of {item[0].shape[0] // 2}x{item[0].shape[1:]}, others "
                        f"are {self.latent_shape}"
                    )
            parts = [torch.from_numpy(np.stack(part)).half() for part in zip(*items, strict=True)]
            for part in parts:
                bad = [positions[i] for i in range(len(part)) if not torch.isfinite(part[i]).all()]
                if bad:
                    raise ValueError(f"{self.records[bad[0]].key}: latents are not finite in float16")
            yield Moments(positions, parts[0], parts[1] if self.mirrored else None, {})

    def _item(self, position: int) -> list[np.ndarray]:
        """Moments float32 (2C, h, w), and those of the mirror image where there are."""
        try:
            arrays = self._read[position]()
        except (OSError, ValueError, SafetensorError, EOFError) as error:
            raise ValueError(f"{self.records[position].key}: cannot be read ({error})") from error
        if self.layout == "repa":
            return [arrays[0].astype(np.float32)]
        drawn = [array.astype(np.float32) for array in arrays]
        if self.layout == "fast-dit":
            drawn = [array.reshape(array.shape[-3:]) / self.scale + self.shift for array in drawn]
        return [np.concatenate([array, np.zeros_like(array)]) for array in drawn]


Read = Callable[[], list[np.ndarray]]
Found = tuple[list[tuple[Record, Read]], list[str]]


def _fast_dit(root: Path) -> Found:
    features = sorted(root.glob("*_features"))
    if len(features) != 1 or not (labels := root / features[0].name.replace("_features", "_labels")).is_dir():
        raise ValueError(
            f"{root}: expected one folder NAME_features and NAME_labels beside it, as fast-DiT writes them"
        )
    images = {path.name: path for path in features[0].glob("*.npy") if not path.name.startswith(".")}
    named = {path.name: path for path in labels.glob("*.npy") if not path.name.startswith(".")}
    _require_partners(images.keys(), named.keys(), features[0], labels)
    found: list[tuple[Record, Read]] = [
        (Record(_label_in(named[name]), name), functools.partial(_load_one, path)) for name, path in images.items()
    ]
    return found, ["each image has one draw of its posterior and one random flip, for good"]


def _repa(root: Path) -> Found:
    folder = root / "vae-sd" if (root / "vae-sd").is_dir() else root
    try:
        pairs = json.loads((folder / "dataset.json").read_text())["labels"]
        labels = {str(name): whole_label(label, f"{folder / 'dataset.json'}: {name}") for name, label in pairs}
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'dataset.json'}: no list of names and labels can be read from it") from error
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.npy") if path.name[0] != "."}
    _require_partners(paths.keys(), labels.keys(), folder, folder / "dataset.json")
    found: list[tuple[Record, Read]] = [
        (Record(labels[name], name), functools.partial(_load_one, path)) for name, path in paths.items()
    ]
    return found, ["there are no mirror images"]


def _lightningdit(root: Path) -> Found:
    found: list[tuple[Record, Read]] = []
    for path in sorted(root.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                names = set(file.keys())
                if not {"latents", "latents_flip", "labels"} <= names:
                    raise ValueError(f"{path}: has {', '.join(sorted(names))}; expected latents, latents_flip, labels")
                labels = file.get_tensor("labels").reshape(-1).tolist()
                counts = [file.get_slice(name).get_shape()[0] for name in ("latents", "latents_flip")]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
        if counts != [len(labels)] * 2:
            raise ValueError(f"{path}: {counts[0]} latents, {counts[1]} mirrored, {len(labels)} labels; must be equal")
        found += [
            (
                Record(whole_label(label, f"{path}: labels"), f"{path.name}:{row:06d}"),
                functools.partial(_rows, path, row),
            )
            for row, label in enumerate(labels)
        ]
    if not found:
        raise ValueError(f"{root}: no *.safetensors in it, as LightningDiT writes them")
    return found, ["each image has one draw of its posterior, for good; latents_stats.pt is not used"]


def _rows(path: Path, row: int) -> list[np.ndarray]:
    with safe_open(path, "np") as file:
        return [file.get_slice(name)[row] for name in ("latents", "latents_flip")]


def _label_in(path: Path) -> int:
    values = _load(path)
    if not isinstance(values, np.ndarray) or values.size != 1:
        raise ValueError(f"{path}: expected one label")
    return whole_label(values.reshape(-1)[0].item(), str(path))


def _load_one(path: Path) -> list[np.ndarray]:
    return [_load(path)]


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a whole .npy file") from error


def _require_partners(images: Set[str], labels: Set[str], where: Path, label_place: Path) -> None:
    for lone, place, what in [(images - labels, label_place, "label"), (labels - images, where, "latents")]:
        if lone:
            more = f" and {len(lone) - 1} more" if len(lone) > 1 else ""
            raise ValueError(f"{place}: no {what} for {min(lone)}{more}")
    if not images:
        raise ValueError(f"{where}: no .npy files in it")


def _refuse_edm2(root: Path, sample: list[np.ndarray]) -> None:
    means = np.mean([moments[: len(moments) // 2].mean((1, 2)) for moments in sample], axis=0)
    if means.shape == EDM2_MEANS.shape and np.abs(means - EDM2_MEANS).max() < 1.0:
        raise ValueError(f"{root}: channel means {means.round(2).tolist()} are those of EDM2's latents. {EDM2_REASON}")
