import hashlib
from typing import Literal

import numpy as np
from pydantic import BaseModel


class DigitsConfig(BaseModel, extra="forbid", frozen=True):
    """The embedded data set: scikit-learn's 1,797 real handwritten digits, 8x8 grey levels."""

    name: Literal["digits"] = "digits"


class Digits:
    """The digits in memory.

    Attributes:
        image_shape: (1, 8, 8).
        class_names: "0".."9", in label order.
        labels: int (N,).
        can_mirror: a mirrored digit is another sign.
        fingerprint: hash of images and labels.
        report: one line on what is used.
    """

    image_shape = (1, 8, 8)
    class_names = tuple(str(digit) for digit in range(10))
    can_mirror = False
    report = "1797 images used in 10 classes"

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Grey levels 0..16 to 0..255.
        self.images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]  # (N, 1, 8, 8)
        self.labels = digits.target
        self.fingerprint = hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> np.ndarray:
        """uint8 (1, 8, 8)."""
        return self.images[index]

    def label(self, index: int) -> int:
        """0..9."""
        return int(self.labels[index])
