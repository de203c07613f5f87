"""What goes wrong in a long run: numbers that are not finite, half precision, damaged data."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cache.helpers import build, write_tree
from tests.tiny_runs import losses, tensors_of, tiny_config
from tests.training_parts import at_losses, fp16_on_the_cpu, sharded_on_the_cpu, spoil
from vcagen.autoencoder import IdentityAutoencoder
from vcagen.bad_steps import sample_names
from vcagen.checkpoint import list_checkpoints
from vcagen.data import ImageFolder, ImageFolderConfig, LatentCache, LatentCacheConfig
from vcagen.data.latent_format import shard_path
from vcagen.training import train


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of 24 images in two shards, in which one latent has one inf."""
    tree = write_tree(tmp_path / "tree", num_classes=4, images=6)
    build(tree, tmp_path / "cache", IdentityAutoencoder(), image_size=8)
    path = shard_path(tmp_path / "cache", 1)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in ("moments", "mirrored"):
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        values = np.frombuffer(content[start:end], np.float16).reshape(header[name]["shape"]).copy()
        values[4, 0, 3, 3] = np.inf
        content = content[:start] + values.tobytes() + content[end:]
    path.write_bytes(content)
    return tmp_path / "cache"


def test_one_inf_in_a_latent_costs_one_update_and_is_named_by_its_key(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("data.name=latent_cache", f"data.root={cache}", "train.global_batch_size=4", "train.checkpoint_every=6")
    train(tiny_config(tmp_path / "run", *settings, "train.max_steps=6"))  # one epoch
    lines = [line for line in capsys.readouterr().err.splitlines() if "update skipped" in line]
    assert len(lines) == 1
    bad = 16 + 4  # the first shard has 16 records
    assert f"the loss of samples {bad} (3/2.png) is not finite" in lines[0]
    assert len(losses(tmp_path / "run")) == 5
    tensors = tensors_of(tmp_path / "run/checkpoints/step_0000006")
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert tensors["optimizer.safetensors:step.x_embedder.proj.bias"] == 5


def test_samples_are_named_by_what_a_person_finds_them_by(cache: Path, tmp_path: Path) -> None:
    images = ImageFolder(ImageFolderConfig(root=str(tmp_path / "tree")))
    assert sample_names(images, [7]) == f"samples 7 ({tmp_path}/tree/1/1.png)"
    latents = LatentCache(LatentCacheConfig(root=str(cache)))
    for index, (_, key) in enumerate(record for shard in latents.shards for record in shard.records()):
        assert sample_names(latents, [index]) == f"samples {index} ({key})"
    assert sample_names(latents, list(range(11))).endswith("7 (1/1.png) and 3 more")


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    with fp16_on_the_cpu(init_scale=2.0**12, growth_interval=3):
        train(tiny_config(tmp_path / "straight"))
        for max_steps in (5, 12):
            train(tiny_config(tmp_path / "resumed", f"train.max_steps={max_steps}"))
    assert losses(tmp_path / "straight") == losses(tmp_path / "resumed")
    ends = [list_checkpoints(tmp_path / name)[-1][1] for name in ("straight", "resumed")]
    first, second = (tensors_of(end) for end in ends)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    scalers = [json.loads((end / "state.json").read_text())["scaler"] for end in ends]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] == 2.0**16  # doubled after steps 3, 6, 9 and 12


def test_the_fp16_loss_scale_has_a_floor_at_which_a_run_ends(tmp_path: Path) -> None:
    with fp16_on_the_cpu(init_scale=8.0), pytest.MonkeyPatch.context() as patch:
        at_losses(patch, range(6, 99), spoil)
        # Halved in steps 6, 7 and 8 the scale is 1; in step 9 it would fall below.
        with pytest.raises(ValueError, match=r"step 9: the loss of samples \d+ is not finite although the fp16 loss"):
            train(tiny_config(tmp_path, "train.max_steps=99", "train.checkpoint_every=1"))
    step, checkpoint = list_checkpoints(tmp_path)[-1]
    assert step == 8
    assert json.loads((checkpoint / "state.json").read_text())["scaler"]["scale"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(checkpoint).values())


def test_an_overflow_in_fp16_skips_the_update_and_halves_the_scale(tmp_path: Path) -> None:
    with fp16_on_the_cpu(init_scale=2.0**10), pytest.MonkeyPatch.context() as patch:
        at_losses(patch, {6}, spoil)
        train(tiny_config(tmp_path))
    tensors = tensors_of(tmp_path / "checkpoints/step_0000012")
    assert tensors["optimizer.safetensors:step.x_embedder.proj.bias"] == 11
    state = json.loads((tmp_path / "checkpoints/step_0000012/state.json").read_text())
    assert state["scaler"]["scale"] == 2.0**9
    assert state["ema_updates"] == 11


def test_other_ways_to_split_weights_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate: FSDP is for several processes with a GPU each"):
        train(tiny_config(tmp_path / "run"))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    with sharded_on_the_cpu(activation_checkpointing=True), pytest.raises(ValueError, match="renames weights"):
        train(tiny_config(tmp_path / "run"))
    with (
        sharded_on_the_cpu(fsdp_version=1),
        pytest.raises(ValueError, match="use fsdp_version 2"),
    ):
        train(tiny_config(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
