from pathlib import Path

import pytest

from vcagen.config import dump_config, load_config, override_sampling

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs/demo.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


MINIMAL = "run_dir: runs/x\ndata:\n  name: digits\n"


def test_defaults_are_the_papers_recipe(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    train = config.train
    assert (train.learning_rate, train.weight_decay, train.ema_decay, train.label_dropout) == (1e-4, 0, 0.9999, 0.1)
    assert (train.max_steps, train.global_batch_size, train.schedule) == (400_000, 256, "constant")
    assert (config.objective.name, config.sampler.name, config.guidance.scale) == ("flow", "euler_maruyama", 1)


def test_the_variant_decides_objective_and_sampler(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["model.variant=DiT-S/4"])
    assert (config.objective.name, config.sampler.name, config.sampler.num_steps) == ("diffusion", "ddpm", 250)
    config = load_config(write(tmp_path, MINIMAL), ["sampler.num_steps=7", "objective.prediction=noise"])
    assert (config.sampler.name, config.sampler.num_steps) == ("euler_maruyama", 7)


def test_dumped_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(DEMO, ["model.attention.contrast_grid=[2,3]", "data.name=digits"])
    assert config.model.attention.contrast_grid == (2, 3)  # type: ignore[union-attr]
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_another_name_starts_its_section_anew() -> None:
    config = load_config(DEMO, ["model.attention.name=mhsa", "sampler.name=heun"])
    assert config.model.attention.model_dump() == {"name": "mhsa", "value_conv": False}
    assert config.sampler.num_steps == 25  # heun's own default, not the file's 20 Euler steps
    assert load_config(DEMO, ["sampler.name=euler"]).sampler.num_steps == 20


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.max_stepz=1"], ["command line: train.max_stepz: unknown key", "did you mean max_steps", "ema_decay"]),
        (["foo.bar=1"], ["foo: unknown key", "autoencoder"]),
        (["model.attention.contrast_grids=1"], ["model.attention.contrast_grids: unknown key", "stage2_softmax"]),
        (["model.attention.name=flash"], ["model.attention.name: 'flash' does not exist", "'mhsa', 'vca'"]),
        (["train.max_steps=ten"], ["train.max_steps", "integer", "'ten'"]),
        (["train.ema_decay=1.5"], ["train.ema_decay", "less than 1", "1.5"]),
        (["model.variant=DiT-H/2"], ["unknown variant 'DiT-H/2'", "XL"]),
        (["model.variant=DiT-S/2"], ["demo.yaml", "sampler.name=euler does not sample diffusion", "ddpm, ddim"]),
        (["objective.name=diffusion"], ["model.variant=SiT-tiny/1 and objective.name=diffusion contradict"]),
        (["train.max_steps"], ["'train.max_steps' is not an override; write key=value"]),
        (["data=3"], ["command line: data"]),
    ],
)
def test_a_wrong_override_names_key_and_choices(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_config(DEMO, overrides)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MINIMAL + "trian: {}\n", ["run.yaml: trian: unknown key", "did you mean train"]),
        (MINIMAL + "config_version: 99\n", ["run.yaml", "config_version 99 is newer", "update vcagen"]),
        ("data:\n  name: digits\n", ["run.yaml: run_dir: missing"]),
        ("run_dir: x\n", ["run.yaml: data: missing"]),
        ("run_dir: x\ndata: {name: image_folder}\n", ["run.yaml: data.root: missing"]),
        ("a: [1\n", ["run.yaml: not valid YAML"]),
        ("- 1\n", ["run.yaml: expected keys and values"]),
        (MINIMAL + "seed: ${nowhere}\n", ["run.yaml", "nowhere"]),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_config(write(tmp_path, text))
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_every_wrong_key_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_config(write(tmp_path, MINIMAL + "a: 1\ntrain:\n  b: 2\n"))
    assert len(str(error.value).splitlines()) == 2


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing.yaml: no such config file"):
        load_config(tmp_path / "nothing.yaml")


def test_config_is_frozen() -> None:
    config = load_config(DEMO)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_sampling_overrides_leave_the_rest_to_the_checkpoint() -> None:
    config = load_config(DEMO)
    changed = override_sampling(config, ["sampler.num_steps=3", "guidance.scale=4"])
    assert (changed.sampler.num_steps, changed.guidance.scale) == (3, 4)
    assert changed.train == config.train
    for refused in ["objective.prediction=noise", "train.max_steps=3", "seed=3"]:
        with pytest.raises(ValueError, match="fixed by the checkpoint"):
            override_sampling(config, [refused])
    with pytest.raises(ValueError, match="does not sample flow models"):
        override_sampling(config, ["sampler.name=ddim"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_loads_and_says_how_to_run_it(path: Path) -> None:
    load_config(path)
    header = [line for line in path.read_text().splitlines()[:4] if line.startswith("#")]
    assert f"python train.py configs/{path.name}" in " ".join(header)
    assert any("Hardware" in line for line in header)
