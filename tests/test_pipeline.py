import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from tests.conftest import fill_with_noise, tiny_model, tiny_vae
from tests.tiny_runs import ROOT, tiny_config
from vcagen.autoencoder import KLConfig
from vcagen.config import override_sampling
from vcagen.objectives import FlowConfig
from vcagen.pipeline import ClassConditionalPipeline
from vcagen.pipeline_folder import read_index
from vcagen.samplers.sde import EulerMaruyamaConfig
from vcagen.sampling_config import PipelineConfig, WeightsRecord
from vcagen.seeds import sample_generator
from vcagen.training import train

NAMES = ("cat", "dog", "fish", "crane", "crane", "5", "fox", "hen", "owl", "9")


def settings(**changes: Any) -> dict[str, Any]:
    config = PipelineConfig(
        objective=FlowConfig(),
        sampler=EulerMaruyamaConfig(num_steps=3),
        autoencoder=KLConfig(source="nobody/nothing"),
        variant="SiT of noise",
        class_names=NAMES,
        weights=WeightsRecord(kind="ema", step=7),
    )
    return config.model_dump(mode="json") | changes


@pytest.fixture
def pipe() -> ClassConditionalPipeline:
    pipe = ClassConditionalPipeline(tiny_model(), tiny_vae(), settings())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def arrays(pipe: ClassConditionalPipeline, *arguments: Any, **options: Any) -> np.ndarray:
    return np.stack([np.asarray(image) for image in pipe(*arguments, **options).images])


def sample(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "sample.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_sample_script_and_pipeline_give_identical_images_from_the_folder_alone(
    pipe: ClassConditionalPipeline, tmp_path: Path
) -> None:
    pipe.save_pretrained(tmp_path / "model")
    result = sample(
        *(tmp_path / "model", "--labels", "dog,fox", "--per-label", "2", "--out", tmp_path / "images"),
        *("--batch-size", "4", "--seed", "3", "guidance.scale=2", "sampler.num_steps=4"),
    )
    assert result.returncode == 0, result.stderr
    assert "ema weights at step 7, SiT of noise with mhsa; euler_maruyama, 4 steps, guidance 2" in result.stdout
    loaded = ClassConditionalPipeline.from_pretrained(tmp_path / "model")
    loaded.set_progress_bar_config(disable=True)
    images = arrays(loaded, ["dog", "dog", 6, "fox"], guidance_scale=2.0, num_inference_steps=4, seed=3)
    assert images.shape == (4, 64, 64, 3)
    for index, image in enumerate(images):
        assert np.array_equal(image, np.asarray(Image.open(tmp_path / f"images/{index:06d}.png")))
    assert len({image.tobytes() for image in images}) == 4


def test_a_saved_pipeline_is_what_was_saved(pipe: ClassConditionalPipeline, tmp_path: Path) -> None:
    before = arrays(pipe, [1, 2], seed=0)
    pipe.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "model_index.json", "transformer", "vae"]
    assert read_index(tmp_path) == pipe.sampling
    assert np.array_equal(arrays(ClassConditionalPipeline.from_pretrained(tmp_path), [1, 2], seed=0), before)


def test_a_checkpoint_written_by_training_is_a_pipeline_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vcagen import run

    build = run.build_model
    monkeypatch.setattr(run, "build_model", lambda *arguments: fill_with_noise(build(*arguments)))
    train(tiny_config(tmp_path / "run", "train.max_steps=1"))
    pipe = ClassConditionalPipeline.from_pretrained(tmp_path / "run/checkpoints/step_0000001")
    assert (pipe.sampling.objective.name, pipe.sampling.class_names[3]) == ("flow", "3")
    assert sample(tmp_path / "run", "--labels", "3", "--per-label", "2", "--out", tmp_path / "images").returncode == 0
    images = arrays(pipe, ["3", 3], seed=0)
    for index, image in enumerate(images):
        assert np.array_equal(image, np.asarray(Image.open(tmp_path / f"images/{index:06d}.png")))
    # What training wrote and what the pipeline writes are the same index.
    pipe.save_pretrained(tmp_path / "again")
    indices = [tmp_path / "again", tmp_path / "run/checkpoints/step_0000001"]
    first, second = (json.loads((folder / "model_index.json").read_text()) for folder in indices)
    assert first == second
    raw = ClassConditionalPipeline.from_pretrained(tmp_path / "run", weights="raw")
    assert raw.sampling.weights == WeightsRecord(kind="raw", step=1)


def test_images_do_not_depend_on_the_batch(pipe: ClassConditionalPipeline) -> None:
    whole = arrays(pipe, [1, 2, 3], seed=5).astype(int)
    for batch_size in (1, 2):
        assert np.abs(arrays(pipe, [1, 2, 3], seed=5, batch_size=batch_size) - whole).max() <= 1


def test_generators(pipe: ClassConditionalPipeline) -> None:
    planned = [sample_generator(4, "sample", index) for index in range(2)]
    assert np.array_equal(arrays(pipe, [1, 2], generator=planned), arrays(pipe, [1, 2], seed=4))
    one = torch.Generator().manual_seed(0)
    first, second = arrays(pipe, [1], generator=one), arrays(pipe, [1], generator=one)
    assert not np.array_equal(first, second)  # it was consumed
    assert np.array_equal(arrays(pipe, [1], generator=torch.Generator().manual_seed(0)), first)
    assert not np.array_equal(arrays(pipe, [1]), arrays(pipe, [1]))
    with pytest.raises(ValueError, match="a generator or a seed, not both"):
        pipe([1], generator=one, seed=0)
    with pytest.raises(ValueError, match="1 generators for 2 labels"):
        pipe([1, 2], generator=[one])


def test_output_types(pipe: ClassConditionalPipeline) -> None:
    images = pipe([1], seed=0, output_type="np").images
    assert (images.shape, images.dtype, images.min() >= 0, images.max() <= 1) == (
        (1, 64, 64, 3),
        np.float32,
        True,
        True,
    )
    assert np.array_equal((images * 255).round().astype(np.uint8), arrays(pipe, 1, seed=0))
    assert pipe([1], seed=0, output_type="latent", return_dict=False)[0].shape == (1, 4, 8, 8)
    with pytest.raises(ValueError, match="output_type='jpg': expected pil, np or latent"):
        pipe([1], output_type="jpg")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"class_labels": [10]}, r"labels \[10\] do not exist; this model has classes 0 to 9"),
        ({"class_labels": [-1]}, r"labels \[-1\] do not exist"),
        ({"class_labels": ["catt"]}, r"'catt' is neither a class id nor a class name.*did you mean cat\?"),
        ({"class_labels": ["crane"]}, r"'crane' is the name of classes 3 and 4; give the id"),
        ({"class_labels": []}, r"class_labels is empty"),
        ({"class_labels": [1], "guidance_scale": 0.5}, r"guidance.scale: .*greater than or equal to 1"),
        ({"class_labels": [1], "overrides": ["sampler.name=ddpm"]}, r"does not sample flow models"),
        ({"class_labels": [1], "overrides": ["objective.path=VP"]}, r"fixed by the checkpoint"),
        ({"class_labels": [1], "overrides": ["protocol=sit"]}, r"protocol: 'sit' does not exist"),
        ({"class_labels": [1], "overrides": ["decoding.decoder=nobody/nothing2"]}, r"no AutoencoderKL can be loaded"),
    ],
)
def test_what_cannot_be_sampled_is_said(pipe: ClassConditionalPipeline, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(**call)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"latents of 4 channels, but the autoencoder has 3"):
        ClassConditionalPipeline(tiny_model(), tiny_vae(latent_channels=3), settings())
    with pytest.raises(ValueError, match=r"10 class names, but the model has 12 classes"):
        ClassConditionalPipeline(tiny_model(num_classes=12), tiny_vae(), settings())
    guided = settings(guidance={"scale": 2.0})
    with pytest.raises(ValueError, match=r"guidance.scale=2 needs a null label"):
        ClassConditionalPipeline(tiny_model(has_null_label=False), tiny_vae(), guided)
    with pytest.raises(ValueError, match=r"autoencoder.source=nobody/nothing: no AutoencoderKL can be loaded"):
        ClassConditionalPipeline(tiny_model(), None, settings())
    with pytest.raises(ValueError, match=r"neither a folder nor a hub id"):
        ClassConditionalPipeline.from_pretrained(tmp_path / "nothing")


def test_another_decoder_of_the_same_latents(pipe: ClassConditionalPipeline, tmp_path: Path) -> None:
    fill_with_noise(tiny_vae(), 0.2).save_pretrained(tmp_path / "mse")
    tiny_vae(scaling_factor=0.5).save_pretrained(tmp_path / "other")
    plain = arrays(pipe, [1], seed=0)
    assert not np.array_equal(arrays(pipe, [1], seed=0, overrides=[f"decoding.decoder={tmp_path}/mse"]), plain)
    with pytest.raises(ValueError, match=r"scale and shift \(0.5, 0.0\), but \(0.18215, 0.0\)"):
        pipe([1], overrides=[f"decoding.decoder={tmp_path}/other"])


def test_half_precision_keeps_the_state_in_float32(pipe: ClassConditionalPipeline) -> None:
    exact = pipe([1, 2], seed=0, output_type="latent").images
    pipe.to(torch.bfloat16)
    half = pipe([1, 2], seed=0, output_type="latent").images
    assert half.dtype == torch.float32
    assert (half - exact).abs().max() < 0.1 * exact.abs().max()


def test_model_card_tells_config_protocol_score_and_grid(pipe: ClassConditionalPipeline, tmp_path: Path) -> None:
    score = {
        "metric": "FD-400 (inception)",
        "frechet_distance": 12.345,
        "warnings": ["unreliable"],
        "protocol": {"reference": "/home/me/images", "sampling": None},
    }
    pipe.folders = (tmp_path,)
    (tmp_path / "score.json").write_text(json.dumps(score))
    Image.new("RGB", (4, 4)).save(tmp_path / "grid.png")
    pipe.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved/README.md").read_text()
    for text in ["SiT of noise with mhsa", "![Samples](grid.png)", "12.35", "unreliable", "sampler.num_steps | 3"]:
        assert text in card
    assert "| protocol | none |" in card
    assert "/home/me" not in card
    assert (tmp_path / "saved/grid.png").is_file()


def test_push_to_hub_uploads_the_folder_with_card_and_grid(
    pipe: ClassConditionalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import diffusers.utils.hub_utils

    uploaded: dict[str, Any] = {}

    def upload_folder(folder_path: Path, repo_id: str, **_: Any) -> str:
        uploaded.update(repo_id=repo_id, files=sorted(path.name for path in Path(folder_path).iterdir()))
        uploaded["card"] = (Path(folder_path) / "README.md").read_text()
        return "commit"

    # The two calls that reach the network; all before them is real.
    monkeypatch.setattr("vcagen.pipeline.create_repo", lambda repo_id, **_: SimpleNamespace(repo_id=f"me/{repo_id}"))
    monkeypatch.setattr(diffusers.utils.hub_utils, "upload_folder", upload_folder)
    assert pipe.push_to_hub("model") == "commit"
    assert uploaded["repo_id"] == "me/model"
    assert uploaded["files"] == ["README.md", "grid.png", "model_index.json", "transformer", "vae"]
    assert "![Samples](grid.png)" in uploaded["card"]
    assert isinstance(pipe.vae, AutoencoderKL)


def test_a_run_is_not_damaged_by_saving_into_it(pipe: ClassConditionalPipeline, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "step").mkdir()
    (tmp_path / "step/state.json").write_text("{}")
    for name in ("run", "step"):
        with pytest.raises(ValueError, match="a run or a checkpoint, which this would damage"):
            pipe.save_pretrained(tmp_path / name)


def test_labels_of_any_integer_kind_and_no_other(pipe: ClassConditionalPipeline) -> None:
    expected = arrays(pipe, [3], seed=0)
    for label in (3, np.int64(3), torch.tensor(3), torch.tensor([3]), np.array([3]), (3,)):
        assert np.array_equal(arrays(pipe, label, seed=0), expected)
    for label in (3.7, [3.0], torch.tensor([3.9]), [True], None, {"3": 1}):
        with pytest.raises(ValueError, match="is neither a class id nor a name"):
            pipe(label)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"generator": [0]}, "expected one torch.Generator, or a list of them"),
        ({"overrides": ["guidance.interval=[0.3]"]}, r"guidance.interval: expected \[low, high\], such as"),
        ({"overrides": ["guidance.channels=0"]}, r"guidance.channels: .* or "),
    ],
)
def test_wrong_options_are_one_line(pipe: ClassConditionalPipeline, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        pipe([1], **options)
    assert "\n" not in str(error.value)


def test_a_protocol_can_be_taken_away(pipe: ClassConditionalPipeline) -> None:
    config = override_sampling(pipe.sampling, ["protocol=sit-paper-ode"])
    assert config.sampler.name == "dopri5"
    assert override_sampling(config, ["protocol=null"]).sampler.name == "euler_maruyama"


def test_someone_elses_score_is_left_out_of_the_card(pipe: ClassConditionalPipeline, tmp_path: Path) -> None:
    (tmp_path / "score.json").write_text("[1]")
    pipe.folders = (tmp_path,)
    pipe.save_pretrained(tmp_path / "saved")
    assert "## Score" not in (tmp_path / "saved/README.md").read_text()
