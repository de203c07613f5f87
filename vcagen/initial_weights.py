"""Training that starts from the weights of another model."""

from pathlib import Path

import torch
import torch.nn.functional as F

from vcagen.attention import parse_attention
from vcagen.checkpoint import resolve_checkpoint
from vcagen.config import RunConfig
from vcagen.models.transformer import DiffusionTransformer
from vcagen.pipeline_folder import load_transformer, mismatches, read_index

LABEL_TABLE, POSITIONS = "y_embedder.embedding_table.weight", "pos_embed"

# Settings of a model that its weights depend on; the number of classes too, unless the label table starts anew.
SIZES = (
    *("in_channels", "patch_size", "hidden_size", "depth", "num_heads", "mlp_ratio", "learn_sigma"),
    *("timestep_frequency_shift", "mlp_norm_eps"),
)
# What of an objective decides the meaning of a model's output.
PREDICTS = ("name", "path", "prediction")

LABEL_SIZES = ("num_classes", "has_null_label")


def load_initial_weights(model: DiffusionTransformer, config: RunConfig, class_names: tuple[str, ...]) -> None:
    """Loads `train.init_from` into a new model: EMA weights where there are some.

    Raises:
        ValueError: it cannot be loaded, is of another kind or size (all differences are listed), or was trained on
            other classes while `train.init_labels` is `match`.
    """
    assert config.train.init_from is not None
    folder = resolve_checkpoint(Path(config.train.init_from))
    index, other = read_index(folder), load_transformer(folder)
    keeps_labels, keeps_size = config.train.init_labels != "new", config.train.init_positions == "match"
    keys = [*SIZES, "attention", *(LABEL_SIZES if keeps_labels else ()), *(("latent_size",) if keeps_size else ())]
    differing = [
        f"{key} is {_value(other, key)}, here {_value(model, key)}"
        for key in keys
        if _value(other, key) != _value(model, key)
    ]
    meanings = [{k: v for k, v in o.model_dump().items() if k in PREDICTS} for o in (index.objective, config.objective)]
    if meanings[0] != meanings[1]:
        differing.append(f"objective is {meanings[0]}, here {meanings[1]}")
    hint = "; train.init_labels=new starts the label table anew"
    if differing:
        labels = any(line.startswith(LABEL_SIZES) for line in differing)
        raise ValueError(
            f"train.init_from={folder}: not the weights of this model: {'; '.join(differing)}{hint if labels else ''}"
        )
    if config.train.init_labels == "match" and index.class_names != class_names:
        label, old, new = next(
            (label, old, new)
            for label, (old, new) in enumerate(zip(index.class_names, class_names, strict=True))
            if old != new
        )
        raise ValueError(
            f"train.init_from={folder}: class {label} is {old!r} there and {new!r} in the data; "
            "train.init_labels=as_is if these are the same, new if the label table is to start anew"
        )
    tensors = other.state_dict()
    if not keeps_labels:
        tensors[LABEL_TABLE] = model.state_dict()[LABEL_TABLE]
    if other.grid_size != model.grid_size:
        new = model.state_dict()[POSITIONS]
        is_new = config.train.init_positions == "recompute"
        tensors[POSITIONS] = new if is_new else _interpolated(tensors[POSITIONS], other.grid_size, model.grid_size)
    problems = mismatches({name: tensor.shape for name, tensor in tensors.items()}, model.state_dict())
    if problems:  # such as the contrast tokens of another grid
        raise ValueError(f"train.init_from={folder}: tensors do not fit this size: {'; '.join(problems)}")
    model.load_state_dict(tensors)


def _interpolated(table: torch.Tensor, old: tuple[int, int], new: tuple[int, int]) -> torch.Tensor:
    """Position codes (1, N, C) of a grid brought to another, bicubically."""
    image = table.unflatten(1, old).permute(0, 3, 1, 2)  # (1, C, H, W)
    return F.interpolate(image, new, mode="bicubic", align_corners=True).flatten(2).transpose(1, 2).contiguous()


def _value(model: DiffusionTransformer, key: str) -> object:
    value = model.config[key]
    if key == "attention":
        return parse_attention(value or {"name": "mhsa"})
    return tuple(value) if isinstance(value, list) else value
