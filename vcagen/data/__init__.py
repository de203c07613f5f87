"""Data sets: images with labels, by index."""

from typing import Annotated

from pydantic import Field

from vcagen.data.digits import Digits, DigitsConfig
from vcagen.data.image_folder import FolderName, ImageFolder, ImageFolderConfig
from vcagen.data.latent_cache import LatentCache, LatentCacheConfig

DataConfig = Annotated[DigitsConfig | ImageFolderConfig | LatentCacheConfig, Field(discriminator="name")]

__all__ = [
    "DataConfig",
    "Digits",
    "DigitsConfig",
    "FolderName",
    "ImageFolder",
    "ImageFolderConfig",
    "LatentCache",
    "LatentCacheConfig",
    "TrainingData",
    "build_data",
]

TrainingData = Digits | ImageFolder | LatentCache


def build_data(config: DataConfig) -> TrainingData:
    """The data set that a config describes; a `ValueError` that names the file or folder where it cannot be read."""
    if isinstance(config, DigitsConfig):
        return Digits(config.image_size)
    if isinstance(config, LatentCacheConfig):
        return LatentCache(config)
    return ImageFolder(config)
