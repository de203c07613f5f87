import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import fill_with_noise, tiny_vae
from tests.conversion.helpers import file_of, oracle_weights, tiny_weights
from tests.tiny_runs import ROOT, losses, tiny_config
from vcagen import run as run_module
from vcagen.class_names import read_class_names
from vcagen.config import load_config
from vcagen.pipeline import ClassConditionalPipeline
from vcagen.pipeline_folder import load_transformer
from vcagen.training import train


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return command("-m", "vcagen.conversion", *arguments)


def test_official_weights_convert_and_sample_from_the_folder_alone(tmp_path: Path) -> None:
    tiny_vae().save_pretrained(tmp_path / "vae")
    source = file_of(tmp_path, oracle_weights("sit"), "SiT-tiny.safetensors")
    settings = ["protocol=sit-paper-sde", "sampler.num_steps=3", "decoding.decoder=null"]
    result = convert(source, tmp_path / "model", "--num-heads", 4, *settings, f"autoencoder.source={tmp_path}/vae")
    assert result.returncode == 0, result.stderr
    assert "SiT-64x2/2: " in result.stdout
    assert "assumed: SiT, by the file's name" in result.stdout
    assert "assumed: objective.path=Linear, as in all releases of SiT" in result.stdout
    (tmp_path / "vae").rename(tmp_path / "moved")
    sampled = command("sample.py", tmp_path / "model", "--labels", "1,2", "--per-label", "2", "--batch-size", "4")
    assert sampled.returncode == 0, sampled.stderr
    assert "unknown weights, SiT-64x2/2 with mhsa; euler_maruyama, 3 steps, guidance 1" in sampled.stdout
    assert "protocol sit-paper-sde, modified: decoding.decoder=None (protocol: stab" in sampled.stdout
    assert "sampler.num_steps=3 (protocol: 249)" in sampled.stdout
    assert "model calls a batch: 4" in sampled.stdout
    pipe = ClassConditionalPipeline.from_pretrained(tmp_path / "model")
    images = pipe([1, 1, 2, 2], seed=0).images
    grid = np.asarray(Image.open(tmp_path / "model/grid.png"))
    for index, image in enumerate(images):
        top, left = 2 + (index // 2) * 66, 2 + (index % 2) * 66
        assert np.array_equal(grid[top : top + 64, left : left + 64], np.asarray(image))


def test_a_run_exports_and_comes_back(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "run", "model.attention.name=mhsa", "train.max_steps=1"))
    result = convert(tmp_path / "run", tmp_path / "SiT.pt", "--to", "official", "--weights", "raw")
    assert result.returncode == 0, result.stderr
    checkpoint = tmp_path / "run/checkpoints/step_0000001"
    back = torch.load(tmp_path / "SiT.pt", weights_only=True)
    expected = load_transformer(checkpoint, "raw").state_dict()
    assert all(torch.equal(back[name], expected[name]) for name in expected)
    result = convert(tmp_path / "SiT.pt", tmp_path / "model", "--num-heads", "2", "autoencoder.name=identity")
    assert result.returncode == 0, result.stderr
    index = json.loads((tmp_path / "model/model_index.json").read_text())["settings"]
    assert index["weights"] == {"kind": "unknown", "step": None, "initial_share": 0.0}


def test_graft_writes_a_run_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = run_module.build_model
    monkeypatch.setattr(run_module, "build_model", lambda *arguments: fill_with_noise(build(*arguments)))
    train(tiny_config(tmp_path / "run", "model.attention.name=mhsa", "train.max_steps=2"))
    result = convert("graft", tmp_path / "run", tmp_path / "grafted", "--attention", "vca", "contrast_grid=[2,2]")
    assert result.returncode == 0, result.stderr
    assert "copied: 32 tensors, attn.qkv and attn.proj of every block among them" in result.stdout
    assert "new in each of 2 blocks" in result.stdout
    config = tmp_path / "grafted/fine_tune.yaml"
    assert f"python train.py {config}" in result.stdout
    trained = command("train.py", config, f"run_dir={tmp_path}/tuned", "train.max_steps=1", "train.learning_rate=1e-9")
    assert trained.returncode == 0, trained.stderr
    assert f"starting from the weights of {tmp_path}/grafted" in trained.stdout
    tuned = load_transformer(tmp_path / "tuned/checkpoints/step_0000001").state_dict()
    start = load_transformer(tmp_path / "grafted").state_dict()
    assert all(torch.allclose(tuned[name], start[name], atol=1e-6) for name in start)
    assert losses(tmp_path / "tuned")[1] > 0
    # The run goes on without the folder it started from.
    (tmp_path / "grafted").rename(tmp_path / "moved")
    longer = [f"run_dir={tmp_path}/tuned", "train.max_steps=2", "train.learning_rate=1e-9"]
    again = command("train.py", tmp_path / "moved/fine_tune.yaml", *longer)
    assert again.returncode == 0, again.stderr


def initial(tmp_path: Path, *overrides: str) -> None:
    config = load_config(ROOT / "configs/demo.yaml", tiny_settings(tmp_path, *overrides))
    train(config)


def tiny_settings(tmp_path: Path, *overrides: str) -> list[str]:
    from tests.tiny_runs import tiny_overrides

    return tiny_overrides(tmp_path / "second", "train.max_steps=1", f"train.init_from={tmp_path}/first", *overrides)


def test_weights_to_start_from_must_be_of_the_same_model(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "first", "train.max_steps=1"))
    for overrides, message in [
        (["model.depth=3"], r"depth is 2, here 3"),
        (["model.attention.name=mhsa"], r"attention is name='vca'.*here name='mhsa'"),
        (["objective.prediction=noise"], r"objective is .*velocity.*here .*noise"),
        (["train.label_dropout=0", "guidance.scale=1"], r"has_null_label is True, here False; train.init_labels=new"),
    ]:
        with pytest.raises(ValueError, match=message):
            initial(tmp_path, *overrides)
    with pytest.raises(ValueError, match="no such run or checkpoint folder"):
        initial(tmp_path, f"train.init_from={tmp_path}/nothing")
    assert not (tmp_path / "second").exists()
    initial(tmp_path, "train.label_dropout=0", "guidance.scale=1", "train.init_labels=new")
    initial_table = load_transformer(tmp_path / "first/checkpoints/step_0000001").y_embedder.embedding_table.weight
    table = load_transformer(tmp_path / "second/checkpoints/step_0000001").y_embedder.embedding_table.weight
    assert table.shape[0] == 10
    assert not torch.allclose(table, initial_table[:10], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.pt", "target"], "nothing.pt: no such file or folder"),
        (["weights", "target", "--num-heads", "5"], "hidden_size=32 is not divisible by model.num_heads=5"),
        (["weights", "target"], "give --num-heads"),
        (["weights", "target", "--num-heads", "2", "sampler.nam=x"], "sampler.nam: unknown key"),
        (["weights", "target", "--num-heads", "2", "--class-names", "weights"], "expected class names"),
        (["weights", "target", "--num-heads", "2", "autoencoder.source=/nothing/here", "protocol=x"], "does not exist"),
        (["graft", "weights", "target", "--num-heads", "2", "--attention", "flash"], "attention flash"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    source = file_of(tmp_path, tiny_weights())
    given = [str(source) if a == "weights" else str(tmp_path / a) if a == "target" else a for a in arguments]
    result = convert(*given)
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_damaged_model_config_is_named(tmp_path: Path) -> None:
    source = file_of(tmp_path, tiny_weights(), "SiT.safetensors")
    assert convert(source, tmp_path / "model", "--num-heads", "2", "autoencoder.name=identity").returncode == 0
    path = tmp_path / "model/transformer/config.json"
    path.write_text(path.read_text().replace('"num_heads": 2', '"num_heads": 3'))
    result = command("sample.py", tmp_path / "model")
    assert result.returncode == 1
    assert "config.json: not the config of a model here (model.hidden_size=32 is not divisible" in result.stderr


def test_class_names_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(b"\xef\xbb\xbfcat \r\n dog\r\n\r\n")
    assert read_class_names(path) == ("cat", "dog")
    path.write_text('["cat", "dog"]')
    assert read_class_names(path) == ("cat", "dog")
    path.write_text("cat\n\ndog\n")
    with pytest.raises(ValueError, match="name 2 is empty"):
        read_class_names(path)


def test_the_same_classes_in_another_spelling(tmp_path: Path) -> None:
    train(tiny_config(tmp_path / "first", "train.max_steps=1"))
    path = tmp_path / "first/checkpoints/step_0000001/model_index.json"
    path.write_text(path.read_text().replace('"3"', '"three"'))
    with pytest.raises(ValueError, match=r"class 3 is 'three' there and '3' in the data; train.init_labels=as_is if"):
        initial(tmp_path)
    initial(tmp_path, "train.init_labels=as_is")
