"""The README.md of a pipeline folder: what the model is, how it is sampled, where it came from, how it scored."""

import json
from pathlib import Path
from typing import Any

from vcagen.files import write_text
from vcagen.models.transformer import DiffusionTransformer
from vcagen.sampling_config import PipelineConfig, flat

CARD_FILE, GRID_FILE, SCORE_FILE = "README.md", "grid.png", "score.json"


def write_model_card(folder: Path, config: PipelineConfig, transformer: DiffusionTransformer) -> None:
    """Writes README.md into a pipeline folder; a grid.png and a score.json that lie there are shown."""
    write_text(folder / CARD_FILE, _card(folder, config, transformer))


def _card(folder: Path, config: PipelineConfig, transformer: DiffusionTransformer) -> str:
    sizes = transformer.config
    attention = sizes.attention or {"name": "mhsa"}
    family = "DiT" if config.objective.name == "diffusion" else "SiT"
    example = next((repr(name) for name in config.class_names if not name.isdecimal()), "0")
    sections = [
        "---\nlibrary_name: diffusers\npipeline_tag: unconditional-image-generation\n"
        f"tags:\n- vcagen\n- {family}\n- {attention['name']}\n---",
        f"# {config.variant} with {attention['name']} attention",
        f"![Samples]({GRID_FILE})" if (folder / GRID_FILE).is_file() else "",
        "```python\nfrom vcagen.pipeline import ClassConditionalPipeline\n\n"
        f'pipe = ClassConditionalPipeline.from_pretrained("THIS_FOLDER_OR_HUB_ID")\n'
        f"image = pipe(class_labels=[{example}], seed=0).images[0]\n```",
        "## Model\n\n" + _table(_model_rows(config, transformer)),
        "## Sampling\n\n" + _table(_sampling_rows(config)),
        _score_section(folder / SCORE_FILE),
        "## Where the weights came from\n\n" + _table(dict(flat(config.provenance))) if config.provenance else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _model_rows(config: PipelineConfig, transformer: DiffusionTransformer) -> dict[str, Any]:
    sizes = transformer.config
    step = "" if config.weights.step is None else f" at step {config.weights.step}"
    return {
        "parameters": f"{sum(parameter.numel() for parameter in transformer.parameters()):,}",
        "width, depth, heads, patch": f"{sizes.hidden_size}, {sizes.depth}, {sizes.num_heads}, {sizes.patch_size}",
        "latents": f"{sizes.in_channels} x {sizes.latent_size[0]} x {sizes.latent_size[1]}",
        "classes": f"{sizes.num_classes}" + (", and a null label" if sizes.has_null_label else ""),
        "weights": f"{config.weights.kind}{step}",
        **dict(flat({"attention": sizes.attention or {"name": "mhsa"}})),
        **dict(flat({"objective": config.objective.model_dump(mode="json")})),
        **dict(flat({"autoencoder": config.autoencoder.model_dump(mode="json")})),
    }


def _sampling_rows(config: PipelineConfig) -> dict[str, Any]:
    protocol = config.protocol or "none"
    if modified := config.modified():
        protocol += f", modified: {', '.join(modified)}"
    parts = config.model_dump(mode="json", include={"sampler", "guidance", "decoding"})
    return {"protocol": protocol, **dict(flat(parts))}


def _score_section(path: Path) -> str:
    if not path.is_file():
        return ""
    score = json.loads(path.read_text())
    if not isinstance(score, dict) or not {"metric", "frechet_distance", "protocol", "warnings"} <= score.keys():
        return ""  # someone else's file of this name
    rows = {score["metric"]: f"{score['frechet_distance']:.4g}", "reference": Path(score["protocol"]["reference"]).name}
    rows |= {f"warning {number}": text for number, text in enumerate(score["warnings"], 1)}
    sampling = score["protocol"]["sampling"]
    if sampling:
        rows |= dict(flat({key: sampling[key] for key in ("protocol", "sampler", "guidance", "weights", "step")}))
    return "## Score\n\n" + _table(rows)


def _table(rows: dict[str, Any]) -> str:
    lines = [f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
