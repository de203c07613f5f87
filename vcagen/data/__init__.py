"""Data sets: images with labels, by index."""

from typing import Annotated

from pydantic import Field

from vcagen.data.digits import Digits, DigitsConfig
from vcagen.data.image_folder import FolderName, ImageFolder, ImageFolderConfig

DataConfig = Annotated[DigitsConfig | ImageFolderConfig, Field(discriminator="name")]

__all__ = [
    "DataConfig",
    "Digits",
    "DigitsConfig",
    "FolderName",
    "ImageData",
    "ImageFolder",
    "ImageFolderConfig",
    "build_data",
]

ImageData = Digits | ImageFolder


def build_data(config: DataConfig) -> ImageData:
    """The data set that a config describes; a `ValueError` that names the file or folder where it cannot be read."""
    if isinstance(config, DigitsConfig):
        return Digits()
    return ImageFolder(config)
