import argparse
import pathlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import tiny_model
from vcagen.conversion.model import ConversionChoices
from vcagen.conversion.read import read_model
from vcagen.conversion.source import Tensors, read_source, strip_wrappers

WEIGHTS: Tensors = {"a.weight": torch.arange(4.0), "b": torch.ones(2)}


def saved(tmp_path: Path, content: Any, name: str = "file.pt") -> Path:
    path = tmp_path / name
    torch.save(content, path)
    return path


def prefixed(prefix: str, tensors: Tensors = WEIGHTS) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_leave_the_names(tmp_path: Path, prefix: str, nested: bool) -> None:
    content = {"ema": prefixed(prefix)} if nested else prefixed(prefix)
    found = read_source(saved(tmp_path, content))
    assert found.tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(found.tensors[name], WEIGHTS[name]) for name in WEIGHTS)
    assert any("prefixes removed" in note for note in found.notes) == bool(prefix)


def test_compiled_blocks_and_a_child_called_module() -> None:
    inner, removed = strip_wrappers({"blocks.0._orig_mod.attn.weight": torch.ones(1), "x": torch.ones(1)})
    assert list(inner) == ["blocks.0.attn.weight", "x"]
    assert removed == ["._orig_mod."]
    own = {"module.weight": torch.ones(1), "head.weight": torch.ones(1)}
    assert strip_wrappers(own) == (own, [])
    assert strip_wrappers(prefixed("module.", own))[0].keys() == own.keys()


def test_ema_is_the_default_and_each_can_be_chosen(tmp_path: Path) -> None:
    raw, ema = {"bias": torch.zeros(1)}, {"bias": torch.ones(1)}
    arguments = argparse.Namespace(model="DiT-XL/2", num_classes=1000)
    path = saved(tmp_path, {"model": raw, "ema": ema, "opt": {"state": {}}, "args": arguments, "steps": 7})
    default = read_source(path)
    assert (default.kind, default.tensors["bias"].item(), default.step) == ("ema", 1, 7)
    assert default.arguments["num_classes"] == 1000
    chosen = read_source(path, "raw")
    assert (chosen.kind, chosen.tensors["bias"].item()) == ("raw", 0)
    only = saved(tmp_path, {"ema": ema})
    with pytest.raises(ValueError, match="no raw weights in this checkpoint; it has ema"):
        read_source(only, "raw")
    bare = saved(tmp_path, ema)
    assert read_source(bare).kind == "unknown"
    with pytest.raises(ValueError, match=r"does not say what it is; leave out --weights ema"):
        read_source(bare, "ema")


def test_safetensors_and_the_older_torch_format(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "file.safetensors")
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("file.safetensors", "old.pt"):
        assert read_source(tmp_path / name).tensors.keys() == WEIGHTS.keys()


class Exploit:
    """What a pickle can do: run a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.path,)


def test_no_code_runs_from_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"ema": WEIGHTS, "callback": Exploit(tmp_path / "owned")})
    with pytest.raises(
        ValueError, match=r"file.pt: holds objects made by \S+, .*refused, because that would run whatever"
    ) as error:
        read_source(path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "owned").exists()
    whole_model = saved(tmp_path, tiny_model())
    with pytest.raises(ValueError, match=r"holds objects made by vcagen\.models\.transformer\.DiffusionTransformer"):
        read_source(whole_model)


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors", "old.pt"])
@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_half_a_file(tmp_path: Path, name: str, kept: float) -> None:
    path = tmp_path / name
    if name == "file.safetensors":
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=name == "file.pt")
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ValueError, match=rf"{name}: not a whole .* file \(.+\); download it again") as error:
        read_source(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], r"holds one list, expected weights by name"),
        ({"a": torch.ones(1), "b": 3}, r"expected weights by name, or a checkpoint with ema or model; found b"),
        ({}, r"found nothing"),
        ({"model": {"a": "text"}}, r"found a"),
    ],
)
def test_files_without_weights(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(saved(tmp_path, content))


def test_paths_that_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        read_source(tmp_path / "nothing.pt")
    (tmp_path / "file.zip").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"file.zip: unknown kind of file; expected one of .pt"):
        read_source(tmp_path / "file.zip")
    with pytest.raises(ValueError, match=r"no readable config.json of a DiTTransformer2DModel"):
        read_source(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(ValueError, match="of class UNet2DModel, expected DiTTransformer2DModel"):
        read_source(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
    with pytest.raises(ValueError, match=r"neither diffusion_pytorch_model.safetensors nor"):
        read_source(tmp_path)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"])
def test_a_web_page_or_pointer_is_called_that(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"file.pt: not a checkpoint file: it begins with b'"):
        read_source(tmp_path / "file.pt")


def test_torchs_averaged_model_loads(tmp_path: Path) -> None:
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    assert set(read_source(saved(tmp_path, average.state_dict())).tensors) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "no readable config.json"),
        ('{"_class_name": "DiTTransformer2DModel", "num_layers": "two"}', r"config.json: num_layers: Input should be"),
        ('{"_class_name": "DiTTransformer2DModel", "patch_size": 0}', r"config.json: patch_size: Input should be"),
        ('{"_class_name": "DiTTransformer2DModel", "norm_type": "ada_norm"}', r"norm_type='ada_norm'; not a DiT's"),
    ],
)
def test_diffusers_configs_that_are_wrong(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model_index.json").write_text("[1]")
    save_file(WEIGHTS, tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_model(tmp_path, ConversionChoices())
