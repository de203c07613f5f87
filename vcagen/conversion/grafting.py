"""Another attention on softmax weights: what both have is copied, what is new starts at documented values."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from vcagen.attention import build_attention, parse_attention
from vcagen.checkpoint import list_checkpoints
from vcagen.conversion.model import ConvertedModel
from vcagen.conversion.source import Tensors
from vcagen.files import write_text
from vcagen.models.variants import parse_variant
from vcagen.sampling_config import SamplingConfig
from vcagen.seeds import seed_from

CONFIG_NAME = "fine_tune.yaml"


@dataclass(frozen=True)
class GraftReport:
    """What became of the tensors.

    Attributes:
        attention: settings of the new attention.
        copied: names of tensors taken over.
        dropped: names of tensors that the new attention has no place for.
        new: parameters of one block's attention that are new, by name within it, with their shape.
        num_blocks: blocks that have them.
    """

    attention: dict[str, Any]
    copied: tuple[str, ...]
    dropped: tuple[str, ...]
    new: dict[str, tuple[int, ...]]
    num_blocks: int

    def lines(self) -> list[str]:
        """For people."""
        per_block = sum(torch.Size(shape).numel() for shape in self.new.values())
        described = ", ".join(f"{name} {list(shape)}" for name, shape in self.new.items()) or "nothing"
        return [
            f"attention {self.attention}",
            f"copied: {len(self.copied)} tensors, attn.qkv and attn.proj of every block among them",
            *([f"dropped, since the new attention has none: {', '.join(self.dropped)}"] if self.dropped else []),
            f"new in each of {self.num_blocks} blocks ({per_block:,} parameters): {described}",
            "new parameters start as in a new model of this attention, but a new value_conv starts at zero",
        ]


def graft_attention(
    model: ConvertedModel, name: str, overrides: Sequence[str], seed: int, source: str
) -> tuple[ConvertedModel, GraftReport]:
    """The model with another attention.

    Args:
        model: with softmax attention.
        name: of the new attention.
        overrides: its settings, `key=value`.
        seed: of the new parameters.
        source: what the model was read from, for errors.

    Raises:
        ValueError: the model has another attention already, or the new one does not exist or does not fit its sizes.
    """
    before = model.settings.get("attention") or {"name": "mhsa"}
    if before["name"] != "mhsa":
        raise ValueError(f"{source}: has {before['name']} attention; grafting starts from softmax attention (mhsa)")
    try:
        given: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
        if given.get("name", name) != name:
            raise ValueError(f"--attention {name}, but name={given['name']}; give one of them")
        config = parse_attention({"name": name} | given)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"attention {name}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'][1:])) or 'name'}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"attention {name} with {list(overrides)}: {'; '.join(lines)}") from error
    sizes = model.settings
    height, width = (side // sizes["patch_size"] for side in sizes["latent_size"])
    _require_expressible(model, source)
    tensors: Tensors = dict(model.tensors)
    dropped: list[str] = []
    new: dict[str, tuple[int, ...]] = {}
    for index in range(sizes["depth"]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_from(seed, "graft", index))
            attention = build_attention(config, sizes["hidden_size"], sizes["num_heads"], (height, width), index)
        prefix, parameters = f"blocks.{index}.attn.", attention.state_dict()
        lost = [n for n in tensors if n.startswith(prefix) and n.removeprefix(prefix) not in parameters]
        dropped += lost
        for lost_name in lost:
            del tensors[lost_name]
        for parameter_name, parameter in parameters.items():
            full = prefix + parameter_name
            if full not in model.tensors:
                is_conv = parameter_name.startswith("value_conv.")
                tensors[full] = torch.zeros_like(parameter) if is_conv else parameter
                new[parameter_name] = tuple(parameter.shape)
    settings = config.model_dump(mode="json")
    provenance = {**model.config.provenance, "grafted": {"from": before, "new": sorted(new), "seed": seed}}
    grafted = dataclasses.replace(
        model,
        settings=sizes | {"attention": settings},
        tensors=tensors,
        config=model.config.model_copy(update={"provenance": provenance}),
    )
    return grafted, GraftReport(
        settings, tuple(n for n in model.tensors if n in tensors), tuple(dropped), new, sizes["depth"]
    )


def _require_expressible(model: ConvertedModel, source: str) -> None:
    """What is grafted is to be trained, so it must be a model that a run can describe."""
    sizes = model.settings
    if sizes.get("timestep_frequency_shift", 0) or sizes.get("mlp_norm_eps", 1e-6) != 1e-6:
        raise ValueError(
            f"{source}: computes as diffusers' class does, which training here does not; --trained-by official takes "
            "it as the official code does"
        )
    if sizes["mlp_ratio"] != 4:
        raise ValueError(f"{source}: mlp_ratio {sizes['mlp_ratio']}, but runs have 4")


def write_fine_tuning_config(model: ConvertedModel, source: Path, target: Path) -> Path:
    """Writes a run that starts from `target` beside its weights: the source's own run with the new attention.

    A source that was not trained here has no run; the data is then left to fill in.
    """
    run = _run_of(source)
    base: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(run)) if run else _new_run(model)
    base["run_dir"] = f"runs/{target.name}"
    base["model"] = (base.get("model") or {}) | {"attention": model.settings["attention"]}
    base["train"] = (base.get("train") or {}) | {"init_from": str(target), "init_labels": "match"}
    if not model.settings["has_null_label"]:
        base["train"]["label_dropout"] = 0.0
    if not model.settings["learn_sigma"]:
        base["model"]["learn_sigma"] = False
    path = target / CONFIG_NAME
    header = f"# python train.py {path}\n# Fine-tunes {target.name}: softmax weights with another attention.\n"
    write_text(path, header + OmegaConf.to_yaml(OmegaConf.create(base)))
    return path


def _run_of(source: Path) -> Path | None:
    candidates = [source / "run.yaml", *(folder / "run.yaml" for _, folder in list_checkpoints(source)[-1:])]
    return next((path for path in candidates if path.is_file()), None)


def _new_run(model: ConvertedModel) -> dict[str, Any]:
    sizes = model.settings
    family = "DiT" if model.config.objective.name == "diffusion" else "SiT"
    try:
        variant = parse_variant(model.config.variant) and model.config.variant
    except ValueError:
        variant = f"{family}-S/2"  # whose sizes are all replaced below
    own = {key: sizes[key] for key in ("hidden_size", "depth", "num_heads", "patch_size")}
    sampling = model.config.model_dump(mode="json", include=set(SamplingConfig.model_fields))
    stride = 8 if model.config.autoencoder.name == "kl" else 1
    return {
        "seed": 0,
        "data": {"name": "image_folder", "root": "path/to/images", "image_size": sizes["latent_size"][0] * stride},
        "model": {"variant": variant, **own},
        **sampling,
    }
