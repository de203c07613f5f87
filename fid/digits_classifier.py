"""A small classifier of scikit-learn's 8x8 digits: for the embedded data set, what Inception is for photos.

`python -m fid.digits_classifier` trains it again and writes the weights and their record beside this file.
"""

import argparse
import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vcagen.data.digits import Digits
from vcagen.files import file_sha256, write_json, written_aside

WEIGHTS_NAME = "digits_classifier.safetensors"
RECORD_NAME = "digits_classifier.json"
SEED = 0
HELD_OUT_FRACTION = 0.2
EPOCHS = 40
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
LOWEST_USABLE_ACCURACY = 0.98


class DigitsOutput(NamedTuple):
    """What the classifier says of a batch."""

    features: Tensor  # (B, 64) float32, >= 0: after the last hidden layer
    logits: Tensor  # (B, 10) float32


class DigitsClassifier(nn.Module):
    """Three 3x3 convolutions and two linear layers over one 8x8 grey channel."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),  # (B, 32, 8, 8)
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),  # (B, 64, 8, 8)
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 64, 4, 4)
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 64, 2, 2)
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(256, 64),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> DigitsOutput:
        """Features and logits of a batch.

        Args:
            images: (B, 1 or 3, 8, 8) uint8, 0 = paper, 255 = ink; channels are averaged. Of 16x16 images the means of
                2x2 pixels are taken: of the enlarged digits 99.7% of the held-out ones are then read correctly.

        Raises:
            ValueError: another type or size.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"digits are {images.dtype} {tuple(images.shape)}; expected uint8 (B, 1 or 3, 8, 8): "
                "quantise to 0..255 first"
            )
        if images.shape[2:] not in ((8, 8), (16, 16)):
            raise ValueError(
                f"images are {images.shape[2]}x{images.shape[3]}; the digits classifier takes 8x8 or 16x16 only, "
                "as its features of other images would mean nothing: use inception-v3-compat for those"
            )
        grey = images.float().mean(dim=1, keepdim=True) / 255  # (B, 1, 8, 8) or (B, 1, 16, 16)
        if grey.shape[-1] == 16:
            grey = F.avg_pool2d(grey, 2)
        features = self.trunk(grey)  # (B, 64)
        return DigitsOutput(features, self.head(features))


class DigitsSplit(NamedTuple):
    """The real digits, divided once for all: images (N, 1, 8, 8) uint8, labels (N,) int64."""

    train_images: Tensor
    train_labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    held_out_indices: list[int]  # in scikit-learn's order


def load_split() -> DigitsSplit:
    """The 1,797 digits, one fifth of every class held out; 0..16 grey becomes 0..255."""
    # Only training and tests need scikit-learn; loading the weights should not wait for its import.
    from sklearn.model_selection import train_test_split

    digits = Digits()
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels).long()
    train, held_out = train_test_split(
        np.arange(len(labels)), test_size=HELD_OUT_FRACTION, random_state=SEED, stratify=digits.labels
    )
    return DigitsSplit(images[train], labels[train], images[held_out], labels[held_out], held_out.tolist())


@torch.no_grad()
def accuracy(classifier: DigitsClassifier, images: Tensor, labels: Tensor) -> float:
    """The fraction of `images` (N, 1, 8, 8) uint8 given their label (N,), in eval mode."""
    classifier.eval()
    return (classifier(images).logits.argmax(dim=1) == labels).double().mean().item()


def load_digits_classifier(folder: Path = Path(__file__).parent) -> DigitsClassifier:
    """The trained classifier on CPU, in eval mode, without gradients.

    Args:
        folder: where the training script wrote its two files.

    Raises:
        ValueError: the weights are not those of the record.
    """
    weights_path = folder / WEIGHTS_NAME
    expected = json.loads((folder / RECORD_NAME).read_text())["weights_sha256"]
    actual = file_sha256(weights_path)
    if actual != expected:
        raise ValueError(
            f"{weights_path} has sha256 {actual}, but {RECORD_NAME} records {expected}; "
            "restore both files, or train again with `python -m fid.digits_classifier`"
        )
    classifier = DigitsClassifier()
    classifier.load_state_dict(load_file(weights_path))
    return classifier.requires_grad_(False).eval()


def train(split: DigitsSplit) -> DigitsClassifier:
    """A classifier trained on the training part of `split`, on CPU, from a fixed seed."""
    torch.manual_seed(SEED)
    classifier = DigitsClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    steps = EPOCHS * -(-len(split.train_labels) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    classifier.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(split.train_labels)).split(BATCH_SIZE):
            images = shift_randomly(split.train_images[batch])
            loss = F.cross_entropy(classifier(images).logits, split.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return classifier.eval()


def shift_randomly(images: Tensor) -> Tensor:
    """Moves each of `images` (B, 1, 8, 8) by -1, 0 or 1 pixel a side, filling with 0."""
    padded = F.pad(images, (1, 1, 1, 1))  # (B, 1, 10, 10)
    top, left = torch.randint(0, 3, (2, len(images), 1)) + torch.arange(8)  # (B, 8) each
    image = torch.arange(len(images))
    return padded[image[:, None, None], 0, top[:, :, None], left[:, None, :]].unsqueeze(1)


def save(classifier: DigitsClassifier, split: DigitsSplit, folder: Path) -> None:
    """Writes the weights and their record into `folder`, each aside first and then renamed.

    Raises:
        ValueError: the classifier is too weak to measure anything; nothing is written.
    """
    held_out_accuracy = accuracy(classifier, split.held_out_images, split.held_out_labels)
    print(f"held-out accuracy {held_out_accuracy:.4f} on {len(split.held_out_labels)} digits")
    if held_out_accuracy < LOWEST_USABLE_ACCURACY:
        raise ValueError(
            f"held-out accuracy is {held_out_accuracy:.4f}, expected at least {LOWEST_USABLE_ACCURACY}; "
            "nothing was written: check the training settings at the top of fid/digits_classifier.py"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with written_aside(folder / WEIGHTS_NAME) as aside:
        save_file(classifier.state_dict(), aside)
    record = {
        "weights_sha256": file_sha256(folder / WEIGHTS_NAME),
        "held_out_accuracy": held_out_accuracy,
        "train_images": len(split.train_labels),
        "held_out_images": len(split.held_out_labels),
        "held_out_fraction": HELD_OUT_FRACTION,
        "held_out_indices_sha256": hashlib.sha256(json.dumps(split.held_out_indices).encode()).hexdigest(),
        "seed": SEED,
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "scikit-learn": version("scikit-learn"),
            "numpy": np.__version__,
        },
    }
    write_json(folder / RECORD_NAME, record)
    print(json.dumps(record, indent=2))


def main() -> None:
    """The command line of the training script."""
    parser = argparse.ArgumentParser(prog="python -m fid.digits_classifier", description=__doc__)
    parser.add_argument(
        "--out-dir",
        type=Path,
        default=Path(__file__).parent,
        help="where to write both files (default: the fid folder)",
    )
    arguments = parser.parse_args()
    split = load_split()
    save(train(split), split, arguments.out_dir)


if __name__ == "__main__":
    main()
