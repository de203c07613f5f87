import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field

from vcagen.data.images import center_crop, check_images, decode_image, walk_class_folders

FolderName = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]


class ImageFolderConfig(BaseModel, extra="forbid", frozen=True):
    """A folder of class folders of images.

    Attributes:
        root: the folder; the names of the folders in it are the class names.
        image_size: side of the square that images are cropped to, pixels.
        horizontal_flip: mirror every other sample, decided anew at each visit.
        on_bad: `stop` at files that cannot be decoded, or `skip` and report them.
    """

    name: Literal["image_folder"] = "image_folder"
    root: FolderName
    image_size: Annotated[int, Field(ge=1)] = 64
    horizontal_flip: bool = True
    on_bad: Literal["stop", "skip"] = "stop"


class ImageFolder:
    """Images of class folders, decoded and cropped when asked for.

    Every file is decoded once at construction, so that a bad one shows before work starts and not in the middle.

    Attributes:
        image_shape: (3, size, size).
        class_names: in label order.
        fingerprint: hash of which files are there, under which labels and in which order.
        report: one line on what was used, ignored and skipped.

    Raises:
        ValueError: no usable folder, or bad files under `on_bad=stop`, each named.
    """

    def __init__(self, config: ImageFolderConfig) -> None:
        tree = walk_class_folders(Path(config.root))
        bad = check_images([file.path for file in tree.files], config.on_bad)
        tree = tree.without(bad)
        self.files = tree.files
        self.class_names = tree.class_names
        listing = "\n".join(f"{f.label} {f.path.relative_to(config.root).as_posix()}" for f in tree.files)
        self.fingerprint = hashlib.sha256(listing.encode()).hexdigest()
        self.image_shape = (3, config.image_size, config.image_size)
        self.can_mirror = config.horizontal_flip
        self.report = f"{len(tree.files)} images used in {len(tree.class_names)} classes"
        if tree.ignored:
            self.report += f", files ignored that are not images: {len(tree.ignored)}"
        if bad:
            self.report += f", bad images skipped: {len(bad)} ({', '.join(str(path) for path in bad)})"

    def __len__(self) -> int:
        return len(self.files)

    def image(self, index: int) -> np.ndarray:
        """uint8 (3, size, size): the centre crop."""
        image = center_crop(decode_image(self.files[index].path), self.image_shape[1])
        return np.ascontiguousarray(image.transpose(2, 0, 1))

    def label(self, index: int) -> int:
        """Index into `class_names`."""
        return self.files[index].label
