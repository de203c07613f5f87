from pathlib import Path

import pytest

from vcagen.autoencoder import DecodingConfig
from vcagen.config import RunConfig, dump_config, load_config, override_sampling
from vcagen.guidance import GuidanceConfig
from vcagen.protocols import SECTIONS, protocol_names, read_protocol
from vcagen.sampling_config import PipelineConfig, SamplingConfig, WeightsRecord

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


BASE = """
data: {name: digits}
train: {max_steps: 7, log_every: 3}
model: {attention: {name: vca, contrast_grid: [2, 2]}}
"""


def with_base(folder: Path, text: str, base: str = BASE) -> Path:
    (folder / "bases").mkdir(exist_ok=True)
    (folder / "bases/b.yaml").write_text(base)
    return write(folder, f"base: bases/b.yaml\nrun_dir: runs/x\n{text}")


def test_a_file_goes_over_its_base(tmp_path: Path) -> None:
    path = with_base(tmp_path, "train: {max_steps: 9}\n")
    config = load_config(path, ["seed=4", "train.log_every=2"])
    assert (config.train.max_steps, config.train.log_every, config.seed) == (9, 2, 4)
    assert config.model.attention.model_dump()["contrast_grid"] == (2, 2)
    assert load_config(write(tmp_path, dump_config(config))) == config  # what is dumped is whole


def test_another_name_or_protocol_in_the_file_drops_what_the_base_said_of_the_first(tmp_path: Path) -> None:
    config = load_config(with_base(tmp_path, "model: {attention: {name: mhsa}}\n"))
    assert config.model.attention.model_dump() == {"name": "mhsa", "value_conv": False}
    base = BASE + "autoencoder: {name: kl}\nprotocol: sit-paper-sde\nguidance: {scale: 3}\n"
    config = load_config(with_base(tmp_path, "protocol: sit-paper-ode\n", base))
    assert (config.protocol, config.sampler.name, config.modified()) == ("sit-paper-ode", "dopri5", [])
    assert load_config(with_base(tmp_path, "seed: 1\n", base)).modified() == ["guidance.scale=3.0 (protocol: 1.0)"]


@pytest.mark.parametrize(
    ("text", "base", "parts"),
    [
        ("trian: 1\n", BASE, ["run.yaml over ", "bases/b.yaml: trian: unknown key", "did you mean train"]),
        ("", BASE + "seed: x\n", ["run.yaml over ", "bases/b.yaml: seed:", "integer", "'x'"]),
        ("", "a: [1\n", ["run.yaml: base: ", "b.yaml: not valid YAML"]),
        ("", "- 1\n", ["run.yaml: base: ", "b.yaml: expected keys and values"]),
        ("", "base: c.yaml\n", ["run.yaml: base: ", "b.yaml has a base itself; only one level is read"]),
        ("protocol: sit\n", BASE, ["run.yaml over ", "b.yaml: protocol: 'sit' does not exist"]),
        ("seed: ${nowhere}\n", BASE, ["run.yaml over ", "nowhere"]),
        ("train: 3\n", BASE, ["run.yaml", "train"]),
    ],
)
def test_a_wrong_base_is_named_with_its_file(tmp_path: Path, text: str, base: str, parts: list[str]) -> None:
    path = with_base(tmp_path, text, base)
    with pytest.raises(ValueError, match=r".") as error:
        load_config(path)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: nothing.yaml\n", r"run.yaml: base: .*nothing.yaml: no such config file"),
        ("base: [a, b]\n", r"run.yaml: base: expected the path of a config file"),
        ("base: ${nowhere}\n", r"run.yaml: .*nowhere"),
    ],
)
def test_a_base_must_be_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, MINIMAL + text))


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
    run = load_config(DEMO)
    shared = {name: getattr(run, name) for name in SamplingConfig.model_fields}
    config = PipelineConfig(
        **shared, variant="SiT-tiny/1", class_names=("0", "1"), weights=WeightsRecord(kind="ema", step=1)
    )
    changed = override_sampling(config, ["sampler.num_steps=3", "guidance.scale=4"])
    assert (changed.sampler.num_steps, changed.guidance.scale) == (3, 4)
    assert changed.objective == config.objective
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


PROTOCOLS = ["dit-paper", "dit-paper-cfg1.5", "repa-paper", "sit-paper-ode", "sit-paper-sde"]


def test_protocols_are_whole_and_say_what_was_published() -> None:
    assert protocol_names() == PROTOCOLS
    for name in PROTOCOLS:
        settings = read_protocol(name)
        assert tuple(settings) == SECTIONS
        assert settings["guidance"].keys() == GuidanceConfig.model_fields.keys()
        assert settings["decoding"].keys() == DecodingConfig.model_fields.keys()
        header = (ROOT / f"vcagen/protocols/{name}.yaml").read_text().split("sampler:")[0]
        assert "arXiv" in header
        assert "FID-50K" in header
        assert "Not run here" in header


def with_protocol(tmp_path: Path, name: str, *overrides: str, text: str = "") -> RunConfig:
    variant = "DiT-S/2" if name.startswith("dit") else "SiT-S/2"
    base = f"{MINIMAL}autoencoder: {{name: kl}}\nmodel: {{variant: {variant}}}\nprotocol: {name}\n{text}"
    return load_config(write(tmp_path, base), overrides)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_gives_everything_it_fixes(tmp_path: Path, name: str) -> None:
    config = with_protocol(tmp_path, name)
    assert config.modified() == []
    assert config.model_dump(mode="json", include=set(SECTIONS)) == read_protocol(name)
    assert load_config(write(tmp_path, dump_config(config))) == config


def test_what_differs_from_a_protocol_is_said(tmp_path: Path) -> None:
    config = with_protocol(tmp_path, "sit-paper-sde", "sampler.num_steps=9", text="guidance: {scale: 1.5}\n")
    assert config.sampler.model_dump()["last_step_size"] == 0.04
    assert config.modified() == ["guidance.scale=1.5 (protocol: 1.0)", "sampler.num_steps=9 (protocol: 249)"]
    other = with_protocol(tmp_path, "sit-paper-sde", text="sampler: {name: heun}\n")
    assert other.sampler.model_dump() == {"name": "heun", "num_steps": 25}
    assert "sampler.name=heun (protocol: euler_maruyama)" in other.modified()


def test_another_protocol_replaces_what_the_first_fixed(tmp_path: Path) -> None:
    config = with_protocol(tmp_path, "sit-paper-sde", "protocol=repa-paper", text="guidance: {scale: 3}\n")
    assert config.guidance == GuidanceConfig(scale=1.8, interval=(0.3, 1.0))
    assert config.modified() == []
    config = with_protocol(tmp_path, "sit-paper-sde", "protocol=null")
    assert (config.protocol, config.decoding.decoder, config.label_mode) == (None, None, "balanced")


def test_a_protocol_that_does_not_fit_or_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"protocol: 'sit' does not exist; there are dit-paper, dit-paper-cfg1.5"):
        with_protocol(tmp_path, "sit-paper-sde", "protocol=sit")
    with pytest.raises(ValueError, match=r"sampler.name=ddpm does not sample flow models"):
        with_protocol(tmp_path, "sit-paper-sde", "protocol=dit-paper")
    with pytest.raises(ValueError, match=r"sd-vae-ft-ema: this model works on pixels.*use decoding.decoder=null"):
        with_protocol(tmp_path, "sit-paper-sde", "autoencoder.name=identity")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["guidance.interval=[0.5,1.5]"], r"timesteps of flow models lie within \[0, 1\]"),
        (["guidance.interval=[0.9,0.5]"], r"expected \[low, high\] with low <= high"),
        (["model.variant=DiT-S/2", "sampler.name=ddpm", "guidance.interval=[0,1000]"], r"lie within \[0, 999\]"),
        (["sampler.name=stochastic_heun", "sampler.last_step=none"], r"the score at t=1, where it is 0/0"),
    ],
)
def test_sampling_that_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(DEMO, overrides)
