"""Latents that other toolkits have cached, brought into our format."""

import functools
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vcagen.autoencoder import Autoencoder
from vcagen.cache.moments import Moments
from vcagen.cache.records import Record, file_size, whole_label

Layout = Literal["fast-dit", "repa", "lightningdit", "edm2"]

BATCH = 256
LATENTS = ("latents", "latents_flip")  # LightningDiT's names
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them

# Per-channel means of raw latents of sd-vae that was fed pixels in [0, 1], as EDM2 publishes them for its whitening.
EDM2_MEANS = np.array([5.81, 3.25, 0.12, -2.15])

EDM2_REASON = (
    "EDM2 feeds its autoencoder pixels in [0, 1], where sd-vae expects [-1, 1]; a model trained on such latents cannot "
    "be sampled or compared here. Build the cache from the images"
)


Read = Callable[[], list[np.ndarray]]  # float32 latents or moments of an image, and of its mirror image
Found = tuple[list[tuple[Record, Read]], list[str]]


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
        self._read: list[Read] = [read for _, read in order]
        self.layout = layout
        channels, height, width = self._moments(0)[0].shape
        self.latent_shape = (channels // 2, height, width)
        if layout == "repa":
            _refuse_edm2(root, [self._moments(i)[0] for i in range(0, len(order), -(-len(order) // 64))])

    def bad(self, positions: Sequence[int]) -> dict[str, str]:
        """See `MomentSource`. Faults are found as latents are read, and stop the import."""
        return {}

    def batches(self, start: int, end: int) -> Iterator[Moments]:
        """See `MomentSource`."""
        for first in range(start, end, BATCH):
            positions = list(range(first, min(first + BATCH, end)))
            items = [self._moments(position) for position in positions]
            for position, item in zip(positions, items, strict=True):
                channels, height, width = item[0].shape
                shape = (channels // 2, height, width)
                if shape != self.latent_shape:
                    raise ValueError(
                        f"{self.records[position].key}: latents {shape}, but those of {self.records[0].key} are "
                        f"{self.latent_shape}; all must have one shape"
                    )
            parts = [torch.from_numpy(np.stack(part)).half() for part in zip(*items, strict=True)]
            for part in parts:
                bad = [positions[i] for i in range(len(part)) if not torch.isfinite(part[i]).all()]
                if bad:
                    raise ValueError(f"{self.records[bad[0]].key}: latents are not finite in float16")
            yield Moments(positions, parts[0], parts[1] if self.mirrored else None, {})

    def _moments(self, position: int) -> list[np.ndarray]:
        """Float32 (2C, h, w), and those of the mirror image where there are."""
        arrays = self._read[position]()
        if self.layout == "repa":
            return arrays
        if self.layout == "fast-dit":
            arrays = [array / np.float32(self.scale) + np.float32(self.shift) for array in arrays]
        return [np.concatenate([array, np.zeros_like(array)]) for array in arrays]


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
        (Record(_label_in(named[name]), name, file_size(path)), functools.partial(_drawn, path))
        for name, path in images.items()
    ]
    return found, ["each image has one draw of its posterior and one random flip, for good"]


def _repa(root: Path) -> Found:
    folder = root / "vae-sd" if (root / "vae-sd").is_dir() else root
    listing = folder / "dataset.json"
    try:
        pairs = [(str(name), label) for name, label in json.loads(listing.read_text())["labels"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{listing}: no list of names and labels can be read from it") from error
    labels = {name: whole_label(label, f"{listing}: {name}") for name, label in pairs}
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.npy") if path.name[0] != "."}
    _require_partners(paths.keys(), labels.keys(), folder, listing)
    found: list[tuple[Record, Read]] = [
        (Record(labels[name], name, file_size(path)), functools.partial(_mean_and_std, path))
        for name, path in paths.items()
    ]
    return found, ["there are no mirror images"]


def _lightningdit(root: Path) -> Found:
    found: list[tuple[Record, Read]] = []
    for path in sorted(root.glob("*.safetensors")):
        labels = _open_shard(path)
        size = file_size(path)
        found += [
            (
                Record(whole_label(label, f"{path}: labels, row {row}"), f"{path.name}:{row:06d}", size),
                functools.partial(_rows, path, row),
            )
            for row, label in enumerate(labels)
        ]
    if not found:
        raise ValueError(f"{root}: no *.safetensors in it, as LightningDiT writes them")
    return found, ["each image has one draw of its posterior, for good; latents_stats.pt is not used"]


def _open_shard(path: Path) -> list[float]:
    """The labels of a LightningDiT shard whose tensors are as they should be."""
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if not {"latents", "latents_flip", "labels"} <= names:
                raise ValueError(f"{path}: has {', '.join(sorted(names))}; expected latents, latents_flip, labels")
            labels = file.get_tensor("labels").reshape(-1).tolist()
            kinds = {name: file.get_slice(name).get_dtype() for name in LATENTS}
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in LATENTS}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    for name in LATENTS:
        if kinds[name] not in FLOATS:
            raise ValueError(f"{path}: {name} is {kinds[name]}; expected one of {', '.join(FLOATS)}")
        if len(shapes[name]) != 4 or 0 in shapes[name][1:] or shapes[name] != shapes[LATENTS[0]]:
            raise ValueError(f"{path}: {name} has shape {shapes[name]}; expected (n, C, h, w), the same of both")
    if shapes[LATENTS[0]][0] != len(labels):
        raise ValueError(f"{path}: {shapes[LATENTS[0]][0]} latents, but {len(labels)} labels")
    return labels


def _rows(path: Path, row: int) -> list[np.ndarray]:
    try:
        with safe_open(path, "pt") as file:
            return [file.get_slice(name)[row].float().numpy() for name in LATENTS]
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: row {row} cannot be read ({error})") from error


def _label_in(path: Path) -> int:
    values = _load(path)
    if values.size != 1:
        raise ValueError(f"{path}: shape {values.shape}; expected one label")
    return whole_label(values.reshape(-1)[0].item(), str(path))


def _drawn(path: Path) -> list[np.ndarray]:
    array = _load_floats(path)
    if array.ndim == 4 and len(array) == 1:
        array = array[0]
    if array.ndim != 3 or not array.size:
        raise ValueError(f"{path}: shape {array.shape}; expected latents (C, h, w) or (1, C, h, w)")
    return [array]


def _mean_and_std(path: Path) -> list[np.ndarray]:
    array = _load_floats(path)
    if array.ndim != 3 or len(array) % 2 or not array.size:
        raise ValueError(f"{path}: shape {array.shape}; expected (2C, h, w): C means, then C standard deviations")
    return [array]


def _load_floats(path: Path) -> np.ndarray:
    """Float32."""
    array = _load(path)
    if array.dtype.kind != "f":
        raise ValueError(f"{path}: {array.dtype} numbers; latents are floating-point")
    return array.astype(np.float32)


def _load(path: Path) -> np.ndarray:
    try:
        content = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a whole .npy file of numbers") from error
    if not isinstance(content, np.ndarray):
        raise ValueError(f"{path}: an .npz archive; expected one array, as np.save writes it")
    return content


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
