import hashlib
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import BaseModel


class DigitsConfig(BaseModel, extra="forbid", frozen=True):
    """The embedded data set: scikit-learn's 1,797 real handwritten digits, 8x8 grey levels.

    Attributes:
        image_size: 8, or 16 for the same digits enlarged (bicubic).
    """

    name: Literal["digits"] = "digits"
    image_size: Literal[8, 16] = 8


class Digits:
    """The digits in memory.

    Attributes:
        image_shape: (1, 8, 8) or (1, 16, 16).
        class_names: "0".."9", in label order.
        labels: int (N,).
        can_mirror: a mirrored digit is another sign.
        fingerprint: hash of images and labels.
        report: one line on what is used.
    """

    class_names = tuple(str(digit) for digit in range(10))
    can_mirror = False
    report = "1797 images used in 10 classes"

    def __init__(self, image_size: int = 8) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.image_shape = (1, image_size, image_size)
        # Grey levels 0..16 to 0..255.
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # (N, 8, 8)
        if image_size != 8:
            images = np.stack([_enlarged(image, image_size) for image in images])
        self.images = images[:, None]  # (N, 1, size, size)
        self.labels = digits.target
        self.fingerprint = hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def image(self, index: int) -> np.ndarray:
        """uint8, of `image_shape`."""
        return self.images[index]

    def label(self, index: int) -> int:
        """0..9."""
        return int(self.labels[index])


def _enlarged(image: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
