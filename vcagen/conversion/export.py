"""Writes a model: as a pipeline folder, or under the names of the official code or of diffusers."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import save_file

from vcagen.autoencoder import KLConfig, load_vae
from vcagen.conversion.diffusers_names import FREQUENCY_KEY, diffusers_config, to_diffusers
from vcagen.conversion.model import ConvertedModel
from vcagen.conversion.source import Tensors
from vcagen.files import require_file_name, require_writable, written_aside
from vcagen.models.layers import position_table
from vcagen.pipeline_folder import TRANSFORMER, VAE, WEIGHTS_FILE, write_index


def write_pipeline(model: ConvertedModel, target: Path, source: str) -> None:
    """Writes a pipeline folder, whole or not at all; a local autoencoder is copied along.

    Raises:
        ValueError: the target exists, cannot be written, or the autoencoder does not fit the model.
    """
    require_new(target)
    vae, config = None, model.config
    if isinstance(config.autoencoder, KLConfig) and model.vae is not None:
        vae = load_vae(str(model.vae), "autoencoder.source")
        if vae.config.latent_channels != model.settings["in_channels"]:
            raise ValueError(
                f"{source}: the model works on latents of {model.settings['in_channels']} channels, but the "
                f"autoencoder {model.vae} has {vae.config.latent_channels}; give the one it was trained with"
            )
        if config.autoencoder.source == str(model.vae):
            # The folder has its own copy, and a path of this machine means nothing elsewhere.
            named = KLConfig(source=model.vae.resolve().name or "autoencoder")
            config = config.model_copy(update={"autoencoder": named})
    num_bytes = sum(tensor.nbytes for tensor in model.tensors.values())
    require_writable(target.parent, num_bytes)
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        (aside / TRANSFORMER).mkdir(parents=True)
        model.skeleton().save_config(aside / TRANSFORMER)
        save_file(contiguous(model.tensors), aside / TRANSFORMER / WEIGHTS_FILE, metadata={"format": "pt"})
        if vae is not None:
            vae.save_pretrained(aside / VAE)
        write_index(aside, config, has_vae=vae is not None)
        if target.exists():
            target.rmdir()
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_new(target: Path) -> None:
    """A `ValueError` unless the target is free or an empty folder, and no link."""
    if target.is_symlink() or target.name in ("", ".."):
        raise ValueError(f"{target}: a link or no name; give the name of a new folder or file")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target}: exists already; choose another target or delete it")


def contiguous(tensors: Tensors) -> Tensors:
    """As a file needs them: dense, each with memory of its own."""
    places = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        name: tensor.contiguous() if places[tensor.untyped_storage().data_ptr()] == 1 else tensor.clone()
        for name, tensor in tensors.items()
    }


def write_official(model: ConvertedModel, target: Path, source: str) -> None:
    """Writes a bare state dict with the official names, `.safetensors` or `.pt`, as the official scripts load it.

    Raises:
        ValueError: the official code has no such model, or the file cannot be written.
    """
    _require_softmax(model, source)
    if model.settings.get("timestep_frequency_shift", 0):
        raise ValueError(
            f"{source}: computes as diffusers' class does, which the official code does not; convert the original with "
            "--trained-by official if that trained it"
        )
    if target.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{target}: expected a file name that ends in .safetensors or .pt")
    require_new(target)
    require_file_name(target)
    require_writable(target.parent, sum(tensor.nbytes for tensor in model.tensors.values()))
    with written_aside(target) as aside:
        if target.suffix == ".pt":
            torch.save(contiguous(model.tensors), aside)
        else:
            save_file(contiguous(model.tensors), aside, metadata={"format": "pt"})


def write_diffusers(model: ConvertedModel, target: Path, source: str) -> list[str]:
    """Writes a folder for diffusers' `DiTTransformer2DModel`; returns what its reader must know.

    Raises:
        ValueError: diffusers has no such model, or the folder cannot be written.
    """
    _require_softmax(model, source)
    height, width = model.settings["latent_size"]
    if model.config.objective.name != "diffusion":
        raise ValueError(f"{source}: a SiT; diffusers has DiT alone")
    if height != width or not model.settings["has_null_label"] or model.settings["mlp_ratio"] != 4:
        raise ValueError(f"{source}: diffusers' DiT needs square latents, a null label and mlp_ratio 4")
    require_new(target)
    require_writable(target.parent, sum(tensor.nbytes for tensor in model.tensors.values()))
    notes = []
    shift = model.settings.get("timestep_frequency_shift", 0)
    if not shift:
        notes.append(
            "warning: diffusers' class computes other timestep frequencies than the official code, so its own "
            "from_pretrained gives other outputs (up to several percent at late timesteps); load the folder with "
            "vcagen.conversion.export.load_diffusers"
        )
    side = height // model.settings["patch_size"]
    if not torch.equal(model.tensors["pos_embed"], position_table(model.settings["hidden_size"], (side, side))):
        notes.append("pos_embed differs in its last digits from the table, which diffusers computes anew")
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        aside.mkdir(parents=True)
        with torch.device("meta"):
            DiTTransformer2DModel(**diffusers_config(model.settings)).save_config(aside)
        config = json.loads((aside / "config.json").read_text())
        (aside / "config.json").write_text(json.dumps(config | {FREQUENCY_KEY: shift}, indent=2) + "\n")
        tensors = to_diffusers(model.tensors, model.settings["depth"])
        save_file(contiguous(tensors), aside / WEIGHTS_FILE, metadata={"format": "pt"})
        if target.exists():
            target.rmdir()
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return notes


def load_diffusers(folder: Path) -> DiTTransformer2DModel:
    """Diffusers' own class with an exported folder, with the timestep frequencies that the folder says."""
    model = DiTTransformer2DModel.from_pretrained(folder)
    shift = json.loads((folder / "config.json").read_text()).get(FREQUENCY_KEY, 1)
    for block in model.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = shift
    return model.eval()


def _require_softmax(model: ConvertedModel, source: str) -> None:
    attention = model.settings.get("attention") or {"name": "mhsa"}
    if attention["name"] != "mhsa" or attention.get("value_conv"):
        raise ValueError(f"{source}: has {attention} attention, which only a vcagen folder can hold")
