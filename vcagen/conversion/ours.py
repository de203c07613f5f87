"""Reads a run, checkpoint or pipeline folder of this toolkit."""

import json
from pathlib import Path

from vcagen.checkpoint import resolve_checkpoint
from vcagen.config import complete_pipeline_config
from vcagen.conversion.model import ConversionChoices, ConvertedModel, require_fitting
from vcagen.pipeline_folder import (
    INDEX_FILE,
    VAE,
    is_pipeline_folder,
    load_tensors,
    read_index,
    read_transformer_settings,
    weights_file,
)
from vcagen.sampling_config import WeightsRecord

# Choices for weights of others; a folder of ours says these things itself.
FOREIGN_CHOICES = {"family": "--family", "num_heads": "--num-heads", "trained_by": "--trained-by"}
CHANGEABLE = ("protocol", "sampler", "guidance", "decoding", "label_mode", "autoencoder")


def is_ours(path: Path) -> bool:
    """Whether this toolkit wrote the folder."""
    return (path / "checkpoints").is_dir() or (is_pipeline_folder(path) and _has_settings(path))


def _has_settings(path: Path) -> bool:
    try:
        index = json.loads((path / INDEX_FILE).read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return True  # so that the error is about our own format
    return isinstance(index, dict) and "settings" in index


def read_ours(path: Path, choices: ConversionChoices) -> ConvertedModel:
    """The model of a folder that this toolkit wrote.

    Raises:
        ValueError: it is damaged, or something is chosen that the folder says itself.
    """
    given = [flag for key, flag in FOREIGN_CHOICES.items() if getattr(choices, key) is not None]
    if given:
        raise ValueError(f"{path}: says itself what {', '.join(given)} would; leave out {', '.join(given)}")
    fixed = [o for o in choices.overrides if o.split("=")[0].split(".")[0] not in CHANGEABLE]
    if fixed:
        raise ValueError(f"{fixed[0]!r} cannot be changed here: only {', '.join(CHANGEABLE)} can")
    folder = resolve_checkpoint(path)
    plain = read_index(folder).model_dump(mode="json")
    if choices.class_names is not None:
        plain["class_names"] = list(choices.class_names)
    config = complete_pipeline_config(plain, choices.overrides, str(folder / INDEX_FILE))
    kind = choices.weights or "ema"
    file = weights_file(folder, kind)
    settings = read_transformer_settings(file.parent)
    if kind == "raw":
        config = config.model_copy(update={"weights": WeightsRecord(kind="raw", step=config.weights.step)})
    tensors = load_tensors(file)
    require_fitting(tensors, settings, str(file), config.variant)
    own_vae = folder / VAE if (folder / VAE).is_dir() else None
    changes_vae = any(override.startswith("autoencoder.") for override in choices.overrides)
    vae = choices.local_autoencoder() if changes_vae else own_vae
    return ConvertedModel(settings, tensors, config, vae=vae)
