import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fid import digits_classifier
from fid.digits_classifier import RECORD_NAME, WEIGHTS_NAME, load_digits_classifier

SHIPPED = Path(digits_classifier.__file__).parent


@pytest.fixture(scope="module")
def split():
    return digits_classifier.load_split()


@pytest.fixture(scope="module")
def record():
    return json.loads((SHIPPED / RECORD_NAME).read_text())


def test_the_split_is_the_recorded_one(split, record):
    assert len(split.train_labels) == record["train_images"] == 1437
    assert len(split.held_out_labels) == record["held_out_images"] == 360
    indices = json.dumps(split.held_out_indices).encode()
    assert hashlib.sha256(indices).hexdigest() == record["held_out_indices_sha256"]
    counts = torch.bincount(split.held_out_labels)
    assert counts.min() >= 34
    assert counts.max() <= 37


def test_digits_fill_the_uint8_range(split):
    assert split.train_images.shape[1:] == (1, 8, 8)
    assert split.train_images.dtype == torch.uint8
    assert split.train_images.unique().tolist() == [round(grey * 255 / 16) for grey in range(17)]


def test_held_out_accuracy_is_the_recorded_one(split, record):
    accuracy = digits_classifier.accuracy(load_digits_classifier(), split.held_out_images, split.held_out_labels)
    assert accuracy == record["held_out_accuracy"]
    assert accuracy >= 0.98


def test_one_channel_and_three_equal_ones_are_the_same_digit(split):
    classifier, images = load_digits_classifier(), split.held_out_images[:5]
    grey, colour = classifier(images), classifier(images.expand(-1, 3, -1, -1))
    assert grey.features.shape == (5, 64)
    assert grey.logits.shape == (5, 10)
    assert torch.equal(grey.features, colour.features)
    assert torch.equal(grey.logits, colour.logits)


@pytest.mark.parametrize("images", [torch.zeros(2, 1, 8, 8), torch.zeros(2, 2, 8, 8, dtype=torch.uint8)])
def test_other_types_and_channels_are_refused(images):
    with pytest.raises(ValueError, match=r"expected uint8 \(B, 1 or 3, 8, 8\)"):
        load_digits_classifier()(images)


def test_other_sizes_are_refused():
    with pytest.raises(ValueError, match="images are 32x32; the digits classifier takes 8x8 or 16x16 only"):
        load_digits_classifier()(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))


def test_changed_weights_are_refused(tmp_path):
    weights = load_file(SHIPPED / WEIGHTS_NAME)
    weights["head.bias"] += 1e-3
    save_file(weights, tmp_path / WEIGHTS_NAME)
    shutil.copy(SHIPPED / RECORD_NAME, tmp_path)
    with pytest.raises(ValueError, match=r"digits_classifier\.safetensors has sha256 .* train again"):
        load_digits_classifier(tmp_path)


def test_training_writes_what_loading_accepts(tmp_path, split, monkeypatch):
    monkeypatch.setattr(digits_classifier, "EPOCHS", 1)
    monkeypatch.setattr(digits_classifier, "LOWEST_USABLE_ACCURACY", 0.5)
    trained = digits_classifier.train(split)
    digits_classifier.save(trained, split, tmp_path / "new")
    loaded = load_digits_classifier(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [RECORD_NAME, WEIGHTS_NAME]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_useless_classifier_is_not_written(tmp_path, split):
    with pytest.raises(ValueError, match="nothing was written"):
        digits_classifier.save(digits_classifier.DigitsClassifier(), split, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_random_shifts_move_by_at_most_one_pixel():
    images = torch.zeros(200, 1, 8, 8, dtype=torch.uint8)
    images[:, 0, 4, 4] = 255
    torch.manual_seed(0)
    shifted = digits_classifier.shift_randomly(images)
    assert shifted.shape == images.shape
    assert shifted.dtype == torch.uint8
    places = {(row, column) for _, _, row, column in shifted.nonzero().tolist()}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}
    assert (shifted == 255).sum(dim=(1, 2, 3)).eq(1).all()
