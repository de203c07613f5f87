"""Training that starts from the weights of another model."""

from pathlib import Path

from vcagen.attention import parse_attention
from vcagen.checkpoint import resolve_checkpoint
from vcagen.config import RunConfig
from vcagen.models.transformer import DiffusionTransformer
from vcagen.pipeline_folder import load_transformer, read_index

LABEL_TABLE = "y_embedder.embedding_table.weight"

# Settings of a model that its weights depend on; the number of classes too, unless the label table starts anew.
SIZES = (
    *("latent_size", "in_channels", "patch_size", "hidden_size", "depth", "num_heads", "mlp_ratio", "learn_sigma"),
    *("timestep_frequency_shift", "mlp_norm_eps"),
)
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
    keeps_labels = config.train.init_labels != "new"
    differing = [
        f"{key} is {_value(other, key)}, here {_value(model, key)}"
        for key in (*SIZES, "attention", *(LABEL_SIZES if keeps_labels else ()))
        if _value(other, key) != _value(model, key)
    ]
    if index.objective != config.objective:
        differing.append(f"objective is {index.objective}, here {config.objective}")
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
    model.load_state_dict(tensors)


def _value(model: DiffusionTransformer, key: str) -> object:
    value = model.config[key]
    if key == "attention":
        return parse_attention(value or {"name": "mhsa"})
    return tuple(value) if isinstance(value, list) else value
