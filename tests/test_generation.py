import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from fid.sampled import score_folder
from tests.conftest import fill_with_noise
from tests.tiny_runs import ROOT, tiny_config
from vcagen import generation
from vcagen import run as run_module
from vcagen.checkpoint import load_state
from vcagen.generation import LoadedModel, PlannedSample, load_model, parse_labels, plan_samples
from vcagen.pipeline_folder import load_transformer
from vcagen.sample_folder import prepare_samples, write_samples
from vcagen.training import train

SAMPLERS = {
    "SiT": ["sampler.name=euler", "sampler.name=heun", "sampler.name=euler_maruyama"],
    "DiT": ["sampler.name=ddpm", "sampler.name=ddim"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A DiT and a SiT of noise: untrained zero layers would make every image alike."""
    folder = tmp_path_factory.mktemp("runs")
    build = run_module.build_model
    run_module.build_model = lambda *arguments: fill_with_noise(build(*arguments))  # type: ignore[assignment]
    try:
        for family, (sampler, *_) in SAMPLERS.items():
            settings = (f"model.variant={family}-tiny/2", sampler, "sampler.num_steps=3", "train.max_steps=1")
            train(tiny_config(folder / family, *settings))
    finally:
        run_module.build_model = build
    return {family: folder / family for family in SAMPLERS}


def images_of(run: LoadedModel, labels: list[int], batch_size: int, seed: int = 7) -> np.ndarray:
    samples = plan_samples(labels, seed, 10)
    return np.stack([image for _, image in run.maker.images(samples, batch_size, progress=False)])


@pytest.mark.parametrize(("family", "sampler"), [(f, s) for f, names in SAMPLERS.items() for s in names])
def test_an_image_depends_on_seed_index_and_label_alone(runs: dict[str, Path], family: str, sampler: str) -> None:
    run = load_model(runs[family], overrides=[sampler, "sampler.num_steps=4", "guidance.scale=2"])
    labels = [index % 5 for index in range(12)]
    whole = images_of(run, labels, 12)
    for batch_size in (5, 1):
        assert np.abs(images_of(run, labels, batch_size).astype(int) - whole).max() <= 1
    assert len({image.tobytes() for image in whole}) == 12
    other_labels = images_of(run, [9, *labels[1:]], 12)
    assert np.abs(other_labels[1:].astype(int) - whole[1:]).max() <= 1
    assert not np.array_equal(other_labels[0], whole[0])
    assert not np.array_equal(images_of(run, labels, 12, seed=8), whole)


def write(run: LoadedModel, samples: list[PlannedSample], folder: Path, batch_size: int = 4) -> None:
    prepare_samples(run, samples, folder)
    write_samples(run, samples, folder, batch_size, rank=0, num_processes=1)


def test_guidance_and_steps_change_the_picture(runs: dict[str, Path]) -> None:
    pictures = [
        images_of(load_model(runs["SiT"], overrides=overrides), [1, 2], 2).tobytes()
        for overrides in (["guidance.scale=1"], ["guidance.scale=2"], ["sampler.num_steps=9"])
    ]
    assert len(set(pictures)) == 3


def test_an_interrupted_folder_goes_on_and_equals_a_whole_one(runs: dict[str, Path], tmp_path: Path) -> None:
    run = load_model(runs["SiT"])
    samples = plan_samples([3, 1, 4, 1, 5], 0, 10)
    prepare_samples(run, samples, tmp_path / "whole")
    for rank in (1, 0):
        write_samples(run, samples, tmp_path / "whole", 4, rank, 2)
    write(run, samples, tmp_path / "parts")
    kept = tmp_path / "parts/000001.png"
    stamp = kept.stat().st_mtime_ns
    for index in (2, 4):
        (tmp_path / f"parts/{index:06d}.png").unlink()
    write(run, samples, tmp_path / "parts", 1)
    assert kept.stat().st_mtime_ns == stamp
    names = [f"{index:06d}.png" for index in range(5)]
    for folder in ("whole", "parts"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == [*names, "samples.json"]
    for name in names:
        whole, parts = (np.asarray(Image.open(tmp_path / folder / name), dtype=int) for folder in ("whole", "parts"))
        assert np.abs(whole - parts).max() <= 1
    record = json.loads((tmp_path / "parts/samples.json").read_text())
    assert [sample["label"] for sample in record["samples"]] == [3, 1, 4, 1, 5]
    assert record["protocol"]["sampler"] == {"name": "euler", "num_steps": 3}
    assert record["protocol"]["weights"] == "ema"


def test_a_folder_of_other_samples_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    run = load_model(runs["SiT"])
    write(run, plan_samples([1], 0, 10), tmp_path)
    with pytest.raises(ValueError, match="holds other samples already"):
        write(run, plan_samples([2], 0, 10), tmp_path)
    (tmp_path / "samples.json").write_text("{")
    with pytest.raises(ValueError, match=r"samples.json: not valid JSON"):
        write(run, plan_samples([1], 0, 10), tmp_path)
    (tmp_path / "samples.json").unlink()
    with pytest.raises(ValueError, match="not sampled here"):
        write(run, plan_samples([1], 0, 10), tmp_path)


def test_images_of_other_weights_at_the_same_step_are_not_taken_for_these(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, samples = copy_of(runs["SiT"], tmp_path), plan_samples([1], 0, 10)
    before = load_model(run_dir)
    write(before, samples, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    relative = load_model(Path("run"))  # the same weights by another path are the same
    write(relative, samples, tmp_path / "images")
    assert score_folder(relative, 9, 0).name == score_folder(before, 9, 0).name
    assert score_folder(before, 9, 0) != score_folder(before, 9, 1)
    shutil.rmtree(run_dir / "checkpoints/step_0000001/transformer")
    shutil.copytree(run_dir / "checkpoints/step_0000001/raw", run_dir / "checkpoints/step_0000001/transformer")
    path = run_dir / "checkpoints/step_0000001/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["final_layer.linear.bias"] += 1.0
    save_file(tensors, path)
    after = load_model(run_dir)
    assert score_folder(after, 9, 0) != score_folder(before, 9, 0)
    with pytest.raises(ValueError, match="holds other samples already"):
        write(after, samples, tmp_path / "images")


@pytest.mark.parametrize("label", [-1, 10, 11])
def test_labels_out_of_range_are_refused_with_the_range(label: int) -> None:
    with pytest.raises(ValueError, match=rf"labels \[{label}\] do not exist; this model has classes 0 to 9"):
        plan_samples([0, label], 0, 10)


def test_labels_by_id_and_name() -> None:
    names = ["cat", "dog", "7", "0"]
    assert parse_labels("all", names) == [0, 1, 2, 3]
    assert parse_labels("dog, cat,1", names) == [1, 0, 1]
    assert parse_labels("7", names) == [2]  # there is no class 7, so it is a name
    assert parse_labels("id:0,name:0", names) == [0, 3]
    assert parse_labels("9", [str(i) for i in range(10)]) == [9]
    assert parse_labels("name:x:1", ["x:1", "x:0"]) == [0]
    with pytest.raises(ValueError, match=r"'0' is the name of class 3 and the id of class 'cat'; write name:0 or id:0"):
        parse_labels("0", names)
    with pytest.raises(ValueError, match=r"'horse' is neither a class id nor a class name; the classes are cat"):
        parse_labels("horse", names)


def copy_of(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def test_checkpoint_without_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    shutil.rmtree(run / "checkpoints/step_0000001/transformer")
    with pytest.raises(ValueError, match="no ema weights in this folder; it has raw weights"):
        load_model(run)
    load_model(run, "raw")
    shutil.rmtree(run / "checkpoints/step_0000001/raw")
    with pytest.raises(ValueError, match="no weights at all"):
        load_model(run)


def test_truncated_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    path = run / "checkpoints/step_0000001/transformer/diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"transformer/diffusion_pytorch_model.safetensors: not a whole safetensors file"
    ):
        load_model(run)


def test_folders_without_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such run or checkpoint folder"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"no checkpoint in it; expected a run folder"):
        load_model(tmp_path)


def test_checkpoint_of_a_newer_version(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    path = run / "checkpoints/step_0000001/model_index.json"
    path.write_text(path.read_text().replace('"config_version": 1', '"config_version": 2'))
    with pytest.raises(ValueError, match=r"model_index.json: config_version 2 is newer"):
        load_model(run)


def test_ema_and_raw_weights_give_other_pictures_and_say_which(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    path = run / "checkpoints/step_0000001/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["final_layer.linear.bias"] += 1.0
    save_file(tensors, path)
    ema, raw = load_model(run), load_model(run, "raw")
    assert "ema weights at step 1" in ema.describe()
    assert "raw weights at step 1" in raw.describe()
    assert images_of(ema, [1], 1).mean() > images_of(raw, [1], 1).mean() + 10


def test_a_model_in_bf16_gives_nearly_the_same_images_and_is_told_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    exact, half = load_model(runs["SiT"]), load_model(runs["SiT"], dtype="bf16")
    assert half.maker.model.dtype == torch.bfloat16
    labels, generators = generation.labels_and_generators(plan_samples([1, 2], 0, 10))
    latents = half.maker.latents(labels, generators)
    assert latents.dtype == torch.float32  # the state, while the model is in bf16
    assert not torch.equal(latents, latents.bfloat16())
    difference = images_of(half, [1, 2, 3], 3).astype(int) - images_of(exact, [1, 2, 3], 3)
    assert 0 < np.abs(difference).mean() < 4
    assert "ema weights at step 1 in bf16" in half.describe()
    assert " in " not in exact.describe().split(";")[0]
    assert (half.protocol["dtype"], exact.protocol["dtype"]) == ("bf16", "fp32")
    write(exact, plan_samples([1], 0, 10), tmp_path)
    with pytest.raises(ValueError, match="holds other samples already"):
        write(half, plan_samples([1], 0, 10), tmp_path)


def test_asking_for_the_next_batch_first_changes_no_image(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_model(runs["SiT"])
    one_by_one = images_of(run, [1, 2, 3, 4, 5], 2)
    monkeypatch.setattr(generation, "_works_ahead", lambda model: True)
    assert np.array_equal(images_of(run, [1, 2, 3, 4, 5], 2), one_by_one)
    decode, calls = run.maker.autoencoder.decode, iter([True, True, False])

    def decode_twice(latents: torch.Tensor) -> torch.Tensor:
        if not next(calls):
            raise ValueError("out of memory")
        return decode(latents)

    monkeypatch.setattr(run.maker.autoencoder, "decode", decode_twice)
    images = run.maker.images(plan_samples([1, 2, 3, 4, 5], 7, 10), 2, progress=False)
    finished = [next(images)[1] for _ in range(4)]
    with pytest.raises(ValueError, match="out of memory"):
        next(images)
    assert np.array_equal(finished, one_by_one[:4])


def test_guidance_needs_a_null_label(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, "train.label_dropout=0", "guidance.scale=1", "train.max_steps=1"))
    checkpoint = tmp_path / "checkpoints/step_0000001"
    assert load_transformer(checkpoint).y_embedder.embedding_table.weight.shape[0] == 10
    images_of(load_model(tmp_path), [1], 1)
    with pytest.raises(ValueError, match=r"guidance.scale=1.5 needs a null label.*use guidance.scale=1"):
        load_model(tmp_path, overrides=["guidance.scale=1.5"])


def sample(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "sample.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_sample_script_writes_grid_and_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["--labels", "3,5", "--per-label", "2", "--out", tmp_path / "images", "--grid", tmp_path / "grid.png"]
    result = sample(runs["SiT"], *arguments, "sampler.num_steps=2")
    assert result.returncode == 0, result.stderr
    assert "ema weights at step 1, SiT-tiny/2 with vca; euler, 2 steps, guidance 1.5" in result.stdout
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    assert grid.shape == (102, 102)
    for index in range(4):  # tile k is file k
        top, left = 2 + (index // 2) * 50, 2 + (index % 2) * 50
        image = np.asarray(Image.open(tmp_path / f"images/{index:06d}.png"))
        assert np.array_equal(grid[top : top + 48 : 6, left : left + 48 : 6], image)


def test_a_checkpoint_anywhere_writes_its_grid_beside_its_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["SiT"] / "checkpoints/step_0000001", tmp_path / "best")
    assert sample(tmp_path / "best", "--labels", "1", "--per-label", "1").returncode == 0
    assert (tmp_path / "best/grid.png").exists()
    assert load_model(runs["SiT"] / "checkpoints/step_0000001").folder == runs["SiT"]


def test_a_young_ema_is_announced(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "warning: the EMA is young, 99% initial weights still" in load_model(runs["SiT"]).describe()
    assert "warning" not in load_model(runs["SiT"], "raw").describe()


def test_a_damaged_index_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    path = run / "checkpoints/step_0000001/model_index.json"
    index = json.loads(path.read_text())
    for text, message in [
        ("{", r"model_index.json: cannot be read"),
        ('{"_class_name": "DiTPipeline"}', r"a pipeline of class DiTPipeline, without vcagen's settings"),
        (json.dumps(index | {"settings": index["settings"] | {"colour": 1}}), r"colour: unknown key"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_model(run)


def test_a_damaged_state_stops_a_resumed_run(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_of(runs["SiT"], tmp_path)
    (run / "checkpoints/step_0000001/state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state.json: cannot be read .*the checkpoint is damaged"):
        load_state(run / "checkpoints/step_0000001")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--labels", "12"], "labels [12] do not exist; this model has classes 0 to 9"),
        (["--labels", "cat"], "'cat' is neither a class id nor a class name"),
        (["objective.prediction=noise"], "fixed by the checkpoint"),
        (["sampler.name=ddpm"], "does not sample flow models"),
        (["sampler.num_stepz=3"], "unknown key; did you mean num_steps"),
        (["--device", "cuda:7"], "device 'cuda:7' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--per-label", "0"], "must be at least 1"),
        (["--columns", "-1"], "must be at least 1"),
    ],
)
def test_sample_script_says_in_one_line_what_is_wrong(
    runs: dict[str, Path], tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = sample(runs["SiT"], "--grid", tmp_path / "grid.png", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
