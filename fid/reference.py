"""What images are compared with: statistics that others or we have written, or real images themselves."""

import json
import pickle
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy._core import multiarray
from numpy.typing import NDArray

from fid.features import CLIP, DIMENSIONS, DINO, INCEPTION, SPATIAL_DIMENSION
from fid.images import DIGITS_REFERENCE, Images, NpzImages, open_images
from vcagen.files import file_sha256

Array = NDArray[np.float64]
Format = Literal[
    "adm", "mar", "edm", "pytorch-fid", "clean-fid-legacy_tensorflow", "clean-fid-legacy_pytorch", "clean-fid-clean"
]
HALF_PIXEL = "its resize has half-pixel centres, which moves FID by about 0.002 at 256x256 and more at other sizes"
NOTES: dict[str, str] = {
    "adm": "ADM statistics: the whole training set, Inception v3 of 2015-12-05",
    "mar": "MAR statistics: mu and sigma copied from ADM's file",
    "edm": "EDM statistics: the same network, after EDM's own preprocessing of the images",
    "pytorch-fid": f"pytorch-fid statistics: {HALF_PIXEL}",
    "clean-fid-legacy_tensorflow": "clean-fid statistics in legacy_tensorflow mode",
    "clean-fid-legacy_pytorch": f"clean-fid statistics in legacy_pytorch mode: {HALF_PIXEL}",
}
# What pickles make arrays with, whose module has another name since numpy 2: files of both are about.
ARRAY_MAKERS = {
    f"{module}.{name}": getattr(multiarray, name)
    for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("_reconstruct", "scalar")
}


SIZED = (INCEPTION, DINO, CLIP)  # told apart by the number of their features


@dataclass(frozen=True)
class Gaussian:
    """Mean (d,) and covariance (d, d), float64, and of how many images, where that is known."""

    mean: Array
    covariance: Array
    n: int | None


@dataclass(frozen=True)
class Reference:
    """What a score compares with.

    Attributes:
        name: in messages and results.
        images: real images, or None where only statistics are at hand.
        pooled: statistics of the pooled features, or None: to be computed from `images`.
        spatial: statistics of sFID's features, or None.
        features: (N, d) pooled features, where the file holds them.
        extractor: that the statistics were made with; None where nothing was.
        extractor_weights_sha256: of its weights, where that is recorded.
        size: (height, width) of the images behind it, where that is known.
        sha256: of the file, or None.
        halves_distance: Frechet distance between its two halves, where that is recorded.
        notes: what was assumed.
    """

    name: str
    images: Images | None = None
    pooled: Gaussian | None = None
    spatial: Gaussian | None = None
    features: NDArray[np.floating] | None = None
    extractor: str | None = None
    extractor_weights_sha256: str | None = None
    size: tuple[int, int] | None = None
    sha256: str | None = None
    halves_distance: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_images(self) -> int | None:
        """Behind the statistics, where that is known."""
        if self.pooled is not None:
            return self.pooled.n
        return self.images.about.num_images if self.images else None


def open_reference(source: str, crop: int | None, form: Format | None = None, check: bool = True) -> Reference:
    """The reference that a name on the command line means.

    Args:
        source: `digits`, a folder, tar or parquet files, or a file: an npz of ADM, MAR, EDM, pytorch-fid, clean-fid or
            `python -m fid reference`, a pkl of EDM2, a .pt of torch-fidelity's cache.
        crop: side to crop images of folders to, pixels.
        form: which tool wrote an npz of mu and sigma alone, which does not say so itself.
        check: whether to decode a folder's images now; one process of many does.

    Raises:
        ValueError: nothing is there, it is none of these, or what it holds cannot be compared.
    """
    path = Path(source)
    if not source:
        raise ValueError("--reference is empty: give a folder of images, a statistics file, or digits")
    readers = {".npz": _read_npz, ".pkl": _read_edm2, ".pt": _read_torch_fidelity, ".pth": _read_torch_fidelity}
    reader = readers.get(path.suffix.lower())
    if reader is not None and path.is_file():
        return reader(path, form)
    if form is not None:
        raise ValueError(f"--reference-format {form} says what an npz is, but {source} is none")
    if reader is None and path.is_file() and path.suffix not in (".tar", ".parquet"):
        raise ValueError(f"{source}: not a reference; known are folders, .npz, .pkl (EDM2) and .pt (torch-fidelity)")
    if source != DIGITS_REFERENCE and not path.exists():
        raise ValueError(f"{source} does not exist: give a folder of images, a statistics file, or {DIGITS_REFERENCE}")
    images = open_images(source, crop, check)
    return Reference(name=images.about.name, images=images, size=images.about.size)


def _read_npz(path: Path, form: Format | None) -> Reference:
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
        with np.load(path, allow_pickle=False) as content:  # member by member: arr_0 may be gigabytes
            keys = [key for key in ("mu", "sigma", "mu_s", "sigma_s", "n", "meta") if key in names]
            values = {key: content[key] for key in keys}
        meta = json.loads(str(values["meta"])) if "meta" in values else {}
        if not isinstance(meta, dict) or not isinstance(meta.get("image_size", []), list):
            raise ValueError("its meta is not as `python -m fid reference` writes it")
        n = int(values["n"]) if "n" in values else None
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, TypeError, EOFError) as error:
        raise ValueError(f"{path}: not a readable npz ({' '.join(str(error).split())})") from error
    images = NpzImages(path) if "arr_0" in names else None
    if "mu" not in values or "sigma" not in values:
        if images is None:
            raise ValueError(f"{path}: holds {', '.join(sorted(names))}; expected mu and sigma, or images in arr_0")
        note = f"no statistics in it, so they are computed from its {images.about.num_images} images"
        return Reference(str(path), images, size=images.about.size, sha256=file_sha256(path), notes=(note,))
    has_spatial = "mu_s" in values and "sigma_s" in values
    if not (meta or has_spatial or images):
        form = form or _form_by_name(path)
    if form == "clean-fid-clean":
        raise ValueError(
            f"{path}: clean-fid statistics in clean mode come from images resized by another rule and cannot be "
            "compared with anything here; use statistics of its legacy_tensorflow mode, or make your own by "
            "`python -m fid reference`"
        )
    pooled = _gaussian(path, values, "mu", "sigma", n)
    extractor = meta.get("extractor") or _extractor_of(path, pooled.mean.size, (INCEPTION,) if form else SIZED)
    spatial = _gaussian(path, values, "mu_s", "sigma_s", n) if has_spatial else None
    if spatial is not None and spatial.mean.size != SPATIAL_DIMENSION:
        raise ValueError(f"{path}: mu_s has {spatial.mean.size} values, expected {SPATIAL_DIMENSION}")
    size = tuple(meta["image_size"]) if "image_size" in meta else images.about.size if images else None
    notes: tuple[str, ...] = ()
    if meta:
        if images:
            others = f"its {images.about.num_images} images in arr_0 are for pr and kid alone"
            notes += (f"statistics of {n} images; {others}",)
        if meta.get("lossy"):
            notes += (f"made of images that were stored lossily ({', '.join(meta['lossy'])})",)
    elif form or has_spatial or images:
        notes = (NOTES[form or "adm"],)
    else:
        notes = (
            f"mu and sigma alone, of an unknown tool, taken to be of {extractor} with the same resize rule; "
            f"--reference-format says which: {', '.join(get_args(Format))}",
        )
    return Reference(
        name=str(path),
        images=images,
        pooled=pooled,
        spatial=spatial,
        extractor=extractor,
        extractor_weights_sha256=meta.get("extractor_weights_sha256"),
        size=size,
        sha256=file_sha256(path),
        halves_distance=meta.get("halves_distance"),
        notes=notes,
    )


def _read_edm2(path: Path, form: Format | None) -> Reference:
    _refuse_form(path, form)
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file).load()
        statistics, n = content["fid"], int(content["num_images"]) if "num_images" in content else None
    except Exception as error:  # damaged pickles raise anything
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a reference of EDM2 with statistics under fid ({reason})") from error
    pooled = _gaussian(path, statistics, "mu", "sigma", n)
    return Reference(
        name=str(path),
        pooled=pooled,
        extractor=_extractor_of(path, pooled.mean.size, (INCEPTION,)),
        sha256=file_sha256(path),
        notes=("EDM2 statistics: the same network",),
    )


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain containers, and refuses all that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The few that arrays need."""
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":  # pickle's protocol 5
            return _from_buffer
        if f"{module}.{name}" in ARRAY_MAKERS:
            return ARRAY_MAKERS[f"{module}.{name}"]
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}, and only arrays are read")


def _from_buffer(buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Literal["C", "F"]) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _read_torch_fidelity(path: Path, form: Format | None) -> Reference:
    _refuse_form(path, form)
    makers = [(maker, name) for name, maker in ARRAY_MAKERS.items()]
    safe: list[Any] = [*makers, np.ndarray, np.dtype, np.dtypes.Float32DType, np.dtypes.Float64DType]
    try:
        with torch.serialization.safe_globals(safe):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files make the unpickler raise anything
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: neither statistics nor features of torch-fidelity's cache ({reason})") from error
    if isinstance(content, torch.Tensor) and content.ndim == 2:
        features = content.double().numpy()
        _require_two(path, len(features))
        values = {"mu": features.mean(axis=0), "sigma": np.cov(features, rowvar=False)}
        pooled = _gaussian(path, values, "mu", "sigma", len(features))
    else:
        features, pooled = None, _gaussian(path, content, "mu", "sigma", None)
    return Reference(
        name=str(path),
        pooled=pooled,
        features=features,
        extractor=_extractor_of(path, pooled.mean.size, SIZED),
        sha256=file_sha256(path),
        notes=("torch-fidelity's cache: the file does not say which weights made it",),
    )


def _gaussian(path: Path, values: Any, mean_key: str, covariance_key: str, n: int | None) -> Gaussian:
    """Statistics as float64, whatever they were stored as; a `ValueError` that names file and key."""
    if n is not None:
        _require_two(path, n)
    try:
        mean, covariance = (np.asarray(values[key], dtype=np.float64) for key in (mean_key, covariance_key))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: no numbers as {mean_key} and {covariance_key} in it") from error
    if mean.ndim != 1 or not mean.size or covariance.shape != (mean.size, mean.size):
        raise ValueError(
            f"{path}: {mean_key} has shape {mean.shape} and {covariance_key} {covariance.shape}; "
            "expected (d,) and (d, d)"
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise ValueError(f"{path}: {mean_key} or {covariance_key} has NaN or inf; make the statistics again")
    if np.abs(covariance - covariance.T).max() > 1e-6 * np.abs(covariance).max():
        raise ValueError(f"{path}: {covariance_key} is not symmetric, so it is no covariance")
    eigenvalues = np.linalg.eigvalsh(covariance)
    if eigenvalues[0] < -1e-6 * max(eigenvalues[-1], 0.0):
        raise ValueError(
            f"{path}: {covariance_key} has the eigenvalue {eigenvalues[0]:.3g} (largest {eigenvalues[-1]:.3g}), "
            "so it is no covariance"
        )
    return Gaussian(mean, covariance, n)


def _require_two(path: Path, n: int) -> None:
    if n < 2:
        raise ValueError(f"{path}: made of {n} images; a covariance needs at least 2")


def _extractor_of(path: Path, dimension: int, candidates: tuple[str, ...]) -> str:
    """The one of some networks that statistics of this length are taken to be of."""
    for name in candidates:
        if DIMENSIONS[name] == dimension:
            return name
    raise ValueError(
        f"{path}: statistics of {dimension} features, but {INCEPTION} has {DIMENSIONS[INCEPTION]}; "
        "they are of another network"
    )


def _form_by_name(path: Path) -> Format | None:
    """clean-fid puts its mode into the name: DATASET_MODE_SPLIT_RESOLUTION.npz."""
    for mode in ("legacy_tensorflow", "legacy_pytorch", "clean"):
        if f"_{mode}_" in path.name:
            return f"clean-fid-{mode}"  # type: ignore[return-value]
    return None


def _refuse_form(path: Path, form: Format | None) -> None:
    if form is not None:
        raise ValueError(f"--reference-format {form} says what an npz is, but {path} is none")
