"""The rows of the published tables: each loads and builds, and is compared with its baseline in attention alone."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_vae
from vcagen.attention import VCAConfig
from vcagen.autoencoder import KLAutoencoder, KLConfig
from vcagen.cache.records import Record
from vcagen.config import RunConfig, load_config
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig
from vcagen.data.latent_format import MANIFEST_FILE, Manifest, plan_for, shard_path, write_shard
from vcagen.files import write_json
from vcagen.models.variants import SHAPES, parse_variant
from vcagen.run import build_model

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "configs/imagenet"
EVERY_ROW = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)

# FID-50K at 256x256, 400K steps, without guidance: arXiv 2511.00833, and DiT's README for the last two.
PUBLISHED = {
    **{"dit-s2-256-mhsa": "67.2", "dit-s2-256-vca": "62.3", "dit-s4-256-mhsa": "97.9", "dit-s4-256-vca": "92.7"},
    **{"dit-b2-256-mhsa": "42.9", "dit-b2-256-vca": "38.9"},
    **{"sit-s2-256-mhsa": "57.3", "sit-s2-256-vca": "53.0", "sit-b2-256-mhsa": "35.3", "sit-b2-256-vca": "32.7"},
    **{"dit-s2-256-vca-stage1": "64.6", "dit-s2-256-vca-stage2": "64.3", "dit-s2-256-differential": "63.9"},
    **{"dit-s2-256-vca-embedding": "63.7", "dit-s2-256-vca-pool-embedding": "62.3"},
    **{"dit-xl2-256-mhsa": "18.1", "dit-b4-256-mhsa": "68.3 to 68.9"},
}
# Parameters of the official models at patch 2, 256x256.
OFFICIAL = {"S": 32_963_360, "B": 130_512_416, "L": 458_102_816, "XL": 675_129_632}

BuildOnMeta = Callable[[RunConfig], torch.nn.Module]


@pytest.fixture(scope="module")
def build_on_meta(tmp_path_factory: pytest.TempPathFactory) -> BuildOnMeta:
    """Builds a run's model without memory, by what training uses; its data is a cache of one latent in 1000 classes."""
    vae = tiny_vae()
    autoencoder = KLAutoencoder(vae, vae)
    caches = {}
    for size in (256, 512):
        root = tmp_path_factory.mktemp(f"cache-{size}")
        (root / "shards").mkdir()
        names = tuple(map(str, range(1000)))
        records = [Record(0, "image", 0)]
        plan = plan_for(KLConfig(), autoencoder, records, names, (3, size, size), mirrored=True, shard_size=1)
        moments = torch.from_numpy(np.ones((1, 8, size // 8, size // 8), np.float16))
        shard = write_shard(shard_path(root, 0), moments, moments.clone(), [records[0][:2]], "")
        manifest = Manifest(
            plan=plan, shards=(shard,), count=1, skipped={}, latent_mean=(0.0,) * 4, latent_std=(1.0,) * 4
        )
        write_json(root / MANIFEST_FILE, manifest.model_dump(mode="json"))
        caches[f"caches/imagenet-{size}"] = LatentCache(LatentCacheConfig(root=str(root)))

    def build(config: RunConfig) -> torch.nn.Module:
        assert isinstance(config.data, LatentCacheConfig)
        with torch.device("meta"):
            return build_model(config, caches[config.data.root], autoencoder)

    return build


def test_every_row_of_the_tables_is_there() -> None:
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    for attention in ("mhsa", "vca"):
        for family in ("dit", "sit"):
            expected = {f"{family}-{s}{p}-256-{attention}" for s in ("s", "b", "l", "xl") for p in (2, 4, 8)}
            assert expected | {f"{family}-{s}2-512-{attention}" for s in ("s", "xl")} <= names
    assert PUBLISHED.keys() <= names


@EVERY_ROW
def test_the_header_says_how_it_is_run_and_judged(path: Path) -> None:
    config = load_config(path)
    text = path.read_text()
    header = text[: text.index("\nbase:")]
    assert all(line.startswith("# ") for line in header.splitlines())
    assert header.startswith(f"# python train.py configs/imagenet/{path.name}\n")
    assert "Hardware: GPUs" in header
    assert f"Evaluation: protocol {config.protocol}." in header
    assert "Not run here." in header
    if path.stem in PUBLISHED:
        assert f"Published: FID-50K {PUBLISHED[path.stem]} (" in header
    else:
        assert "No published figure" in header
    assert config.run_dir == f"runs/imagenet/{path.stem}"


@EVERY_ROW
def test_only_the_attention_differs_from_the_baseline(path: Path) -> None:
    family, model, size, _ = path.stem.split("-", 3)
    config, baseline = load_config(path), load_config(FOLDER / f"{family}-{model}-{size}-mhsa.yaml")
    settings, expected = (c.model_dump(mode="json", exclude={"run_dir"}) for c in (config, baseline))
    attention, plain = settings["model"].pop("attention"), expected["model"].pop("attention")
    assert settings == expected
    assert plain == {"name": "mhsa", "value_conv": False}
    assert (attention == plain) == path.stem.endswith("-mhsa")
    assert config.modified() == []  # the protocol as it stands


def test_no_two_rows_are_the_same_but_the_one_spelled_out() -> None:
    rows = [load_config(path).model_dump_json(exclude={"run_dir"}) for path in FOLDER.glob("*.yaml")]
    assert len(rows) - len(set(rows)) == 1
    spelled_out, short = (load_config(FOLDER / f"dit-s2-256-vca{end}.yaml") for end in ("-pool-embedding", ""))
    assert spelled_out.model == short.model


def test_rows_follow_the_papers_recipe() -> None:
    for path in FOLDER.glob("*.yaml"):
        train = load_config(path).train
        assert (train.max_steps, train.global_batch_size, train.learning_rate) == (400_000, 256, 1e-4)
        assert (train.schedule, train.warmup_steps, train.weight_decay, train.betas) == ("constant", 0, 0, (0.9, 0.999))
        assert (train.gradient_clip, train.ema_decay, train.label_dropout) == (None, 0.9999, 0.1)


@EVERY_ROW
def test_the_model_has_the_official_size(path: Path, build_on_meta: BuildOnMeta) -> None:
    config = load_config(path)
    model = build_on_meta(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    _, name, size, _ = path.stem.split("-", 3)
    shape, patch = name[:-1].upper(), int(name[-1])
    assert parse_variant(config.model.variant)[1:] == (SHAPES[shape], patch)
    width, depth, heads = SHAPES[shape]
    side = int(size) // 8 // patch
    # The patch changes its own projection, the position codes and the last layer.
    expected = OFFICIAL[shape] + 4 * (patch**2 - 4) * width + (side**2 - 256) * width + 8 * (patch**2 - 4) * (width + 1)
    attention = config.model.attention
    if path.stem.endswith("-vca"):
        assert attention == VCAConfig()
        num_contrast = min(8, side // 2) ** 2
        expected += depth * (2 * num_contrast * width + 10 * width + 10 * width // heads)
    if path.stem.endswith(("-mhsa", "-vca")):
        assert sum(parameter.numel() for parameter in model.parameters()) == expected
