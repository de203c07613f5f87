"""Ten class folders of images whose colour tells the class and whose corner tells the number."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tiny_runs import ROOT
from vcagen.autoencoder import Autoencoder, IdentityConfig, KLConfig
from vcagen.cache.moments import EncodedImages
from vcagen.cache.records import ImageSource
from vcagen.cache.sources import open_source
from vcagen.cache.writer import build_cache, prepare_cache
from vcagen.data.latent_format import Manifest, Plan, plan_for

SIZE, STEP = 64, 20


def coloured_image(label: int, number: int) -> np.ndarray:
    """uint8 (64, 64, 3): red encodes the class, the blue corner the number."""
    image = np.zeros((SIZE, SIZE, 3), np.uint8)
    image[..., 0] = label * STEP
    image[..., 1] = 128
    image[:16, :16, 2] = number * STEP
    return image


def write_tree(root: Path, num_classes: int = 10, images: int = 6, suffix: str = ".png") -> Path:
    for label in range(num_classes):
        folder = root / str(label)
        folder.mkdir(parents=True)
        for number in range(images):
            Image.fromarray(coloured_image(label, number)).save(folder / f"{number}{suffix}")
    return root


def write_tars(tree: Path, folder: Path, parts: int = 2) -> Path:
    """The tree as WebDataset shards."""
    folder.mkdir()
    paths = sorted(path for path in tree.rglob("*") if path.is_file())
    for part in range(parts):
        with tarfile.open(folder / f"part-{part}.tar", "w") as archive:
            for path in paths[part::parts]:
                name = path.relative_to(tree).as_posix()
                add(archive, name, path.read_bytes())
                add(archive, str(Path(name).with_suffix(".cls")), path.parent.name.encode())
    return folder


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_parquet(tree: Path, folder: Path) -> Path:
    """The tree as a parquet file, rows in reverse."""
    import datasets

    folder.mkdir()
    paths = sorted((path for path in tree.rglob("*") if path.is_file()), reverse=True)
    names = sorted({path.parent.name for path in paths}, key=int)
    features = datasets.Features(
        {"key": datasets.Value("string"), "image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )
    rows: dict[str, list[Any]] = {
        "key": [path.relative_to(tree).as_posix() for path in paths],
        "image": [{"bytes": path.read_bytes(), "path": None} for path in paths],
        "label": [names.index(path.parent.name) for path in paths],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")
    return folder


def tiny_plan(source: ImageSource, autoencoder: Autoencoder, image_size: int = SIZE, **changes: Any) -> Plan:
    config = KLConfig(source="stub") if hasattr(autoencoder, "vae") else IdentityConfig()
    settings = {"mirrored": True, "shard_size": 16} | changes
    shape = (3, image_size, image_size)
    return plan_for(config, autoencoder, source.records, source.class_names, shape, **settings)


def build(
    tree: Path, cache: Path, autoencoder: Autoencoder, on_bad: Any = "stop", names: Any = None, **changes: Any
) -> Manifest:
    """A cache without the command line around it."""
    source = open_source(str(tree), class_names=names)
    plan = tiny_plan(source, autoencoder, **changes)
    images = EncodedImages(source, autoencoder, plan.image_size, plan.mirrored, batch_size=8, num_threads=2)
    prepare_cache(cache, plan, images, on_bad)
    return build_cache(cache, plan, images, on_bad)


def cache_command(*arguments: object, processes: int = 1) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "-m", "vcagen.cache", *map(str, arguments)]


def run_cache(*arguments: object, processes: int = 1) -> subprocess.CompletedProcess[str]:
    command = cache_command(*arguments, processes=processes)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def contents(cache: Path) -> dict[str, bytes]:
    """What makes the cache: manifest and shards."""
    paths = [cache / "manifest.json", *sorted((cache / "shards").iterdir())]
    return {str(path.relative_to(cache)): path.read_bytes() for path in paths}
