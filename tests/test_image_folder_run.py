"""A folder of images through training, sampling and scoring."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.tiny_runs import losses, tiny_config
from vcagen.checkpoint import list_checkpoints
from vcagen.data import build_data
from vcagen.data.image_folder import ImageFolder, ImageFolderConfig
from vcagen.generation import load_model, parse_labels, plan_samples
from vcagen.training import train

FOLDER = ("data.name=image_folder", "data.image_size=16", "model.patch_size=4", "train.max_steps=3")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve classes 0..11 of three 24x20 images; the colour encodes the class, a corner the image."""
    root = tmp_path / "images"
    for label in range(12):
        (root / str(label)).mkdir(parents=True)
        for number in range(3):
            image = np.full((24, 20, 3), (20 * label, 255 - 20 * label, 128), dtype=np.uint8)
            image[2:6, :4] = 80 * number
            Image.fromarray(image).save(root / f"{label}/{number}.png")
    return root


def test_labels_follow_the_folders_by_number(tree: Path) -> None:
    data = build_data(ImageFolderConfig(root=str(tree), image_size=16))
    assert data.class_names == tuple(str(label) for label in range(12))
    assert data.image_shape == (3, 16, 16)
    for index in range(len(data)):
        image = data.image(index)
        assert image.dtype == np.uint8
        assert image[0, 12, 12] == 20 * data.label(index)


def test_train_sample_by_name_and_refuse_other_classes(tree: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(run_dir, *FOLDER, f"data.root={tree}"))
    assert len(losses(run_dir)) == 3
    run = load_model(run_dir)
    assert parse_labels("10", run.class_names) == [10]
    (_, image), *_ = run.maker.images(plan_samples([10], 0, 12), 1, progress=False)
    assert image.shape == (16, 16, 3)
    shutil.rmtree(tree / "3")
    with pytest.raises(ValueError, match="class 3 was '3' in training, but is '4' in the data now"):
        train(tiny_config(run_dir, *FOLDER, f"data.root={tree}", "train.max_steps=4"))


def test_mirroring_changes_the_training_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    for flip in ("true", "false"):
        settings = (f"data.root={tree}", f"data.horizontal_flip={flip}", "train.num_workers=2")
        train(tiny_config(tmp_path / flip, *FOLDER, *settings))
    assert losses(tmp_path / "true")[1] != losses(tmp_path / "false")[1]


def test_an_empty_folder_and_bad_files_stop_before_training(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tmp_path}/empty"))
    (tree / "4/1.png").write_bytes((tree / "4/1.png").read_bytes()[:60])
    (tree / "4/notes.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"4/1.png"):
        train(tiny_config(tmp_path / "run", *FOLDER, f"data.root={tree}"))
    assert not (tmp_path / "run").exists()
    data = ImageFolder(ImageFolderConfig(root=str(tree), on_bad="skip"))
    assert len(data) == 35
    assert "35 images used in 12 classes, files ignored that are not images: 1, bad images skipped: 1 (" in data.report
    assert "4/1.png" in data.report
    assert [data.label(index) for index in range(len(data))].count(4) == 2


def test_data_that_changed_does_not_resume_and_data_that_moved_does(tree: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config(run_dir, *FOLDER, f"data.root={tree}"))
    moved = tmp_path / "moved #1"  # a path is taken as it is
    shutil.move(tree, moved)
    train(tiny_config(run_dir, *FOLDER, f"data.root={moved}", "train.max_steps=4"))
    assert len(losses(run_dir)) == 4
    (moved / "3/1.png").unlink()
    with pytest.raises(ValueError, match="trained on other data"):
        train(tiny_config(run_dir, *FOLDER, f"data.root={moved}", "train.max_steps=5"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_vanishes_ends_the_run_with_its_name_and_a_checkpoint(
    tree: Path, tmp_path: Path, num_workers: int
) -> None:
    run_dir = tmp_path / "run"
    settings = (f"data.root={tree}", "train.global_batch_size=1", "train.checkpoint_every=99", "train.max_steps=36")
    from vcagen.data.order import epoch_order

    tree_files = build_data(ImageFolderConfig(root=str(tree))).files  # type: ignore[union-attr]
    victim = tree_files[epoch_order(36, 0, 0)[9]].path  # the sample of step 10
    build = build_data

    def build_and_delete(config: ImageFolderConfig) -> object:
        data = build(config)
        victim.unlink()
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vcagen.run.build_data", build_and_delete)
        with pytest.raises(ValueError, match=rf"^{victim}: ") as error:
            train(tiny_config(run_dir, *FOLDER, *settings, f"train.num_workers={num_workers}"))
    assert "\n" not in str(error.value)
    assert list_checkpoints(run_dir)[-1][0] == 9
