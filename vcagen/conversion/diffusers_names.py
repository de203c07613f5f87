"""Names of diffusers' `DiTTransformer2DModel` and the official ones, both ways."""

from typing import Any

import torch

from vcagen.conversion.source import Tensors

# Layers with a weight and a bias: official name -> diffusers' name.
OUTER = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
BLOCK = {
    "adaLN_modulation.1": "norm1.linear",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
QKV = ("attn1.to_q", "attn1.to_k", "attn1.to_v")

# Embedders, of which diffusers keeps a copy in every block: full official name -> diffusers' name in a block.
EMBEDDERS = {
    "t_embedder.mlp.0.weight": "norm1.emb.timestep_embedder.linear_1.weight",
    "t_embedder.mlp.0.bias": "norm1.emb.timestep_embedder.linear_1.bias",
    "t_embedder.mlp.2.weight": "norm1.emb.timestep_embedder.linear_2.weight",
    "t_embedder.mlp.2.bias": "norm1.emb.timestep_embedder.linear_2.bias",
    "y_embedder.embedding_table.weight": "norm1.emb.class_embedder.embedding_table.weight",
}
KINDS = ("weight", "bias")

# In the config.json of a folder exported here: what diffusers' class does not know, and `load_diffusers` does.
FREQUENCY_KEY = "timestep_frequency_shift"


def to_diffusers(tensors: Tensors, depth: int) -> Tensors:
    """Official names to diffusers'; `pos_embed` goes, since diffusers computes it."""
    found = {f"{theirs}.{kind}": tensors[f"{ours}.{kind}"] for ours, theirs in OUTER.items() for kind in KINDS}
    for index in range(depth):
        block, their_block = f"blocks.{index}", f"transformer_blocks.{index}"
        for ours, theirs in BLOCK.items():
            found |= {f"{their_block}.{theirs}.{kind}": tensors[f"{block}.{ours}.{kind}"] for kind in KINDS}
        for kind in KINDS:
            parts = tensors[f"{block}.attn.qkv.{kind}"].chunk(3)
            found |= {f"{their_block}.{name}.{kind}": part.clone() for name, part in zip(QKV, parts, strict=True)}
        found |= {f"{their_block}.{theirs}": tensors[ours].clone() for ours, theirs in EMBEDDERS.items()}
    return found


def from_diffusers(tensors: Tensors, depth: int, source: str) -> Tensors:
    """Diffusers' names to official ones, without `pos_embed`.

    Raises:
        ValueError: a tensor is missing or unknown (all are listed), or the blocks' copies of the embedders differ.
    """
    expected = set(_names(depth))
    problems = [f"missing {name}" for name in sorted(expected - tensors.keys())]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - expected)]
    if problems:
        raise ValueError(f"{source}: not the tensors of a DiT of {depth} blocks: {'; '.join(problems)}")
    for theirs in EMBEDDERS.values():
        first = tensors[f"transformer_blocks.0.{theirs}"]
        for index in range(1, depth):
            if not torch.equal(tensors[f"transformer_blocks.{index}.{theirs}"], first):
                raise ValueError(
                    f"{source}: transformer_blocks.{index}.{theirs} differs from block 0's; a DiT has one embedder for "
                    "all blocks, so weights that were trained on as separate ones cannot be converted"
                )
    found = {f"{ours}.{kind}": tensors[f"{theirs}.{kind}"] for ours, theirs in OUTER.items() for kind in KINDS}
    found |= {ours: tensors[f"transformer_blocks.0.{theirs}"] for ours, theirs in EMBEDDERS.items()}
    for index in range(depth):
        block, their_block = f"blocks.{index}", f"transformer_blocks.{index}"
        for ours, theirs in BLOCK.items():
            found |= {f"{block}.{ours}.{kind}": tensors[f"{their_block}.{theirs}.{kind}"] for kind in KINDS}
        for kind in KINDS:
            parts = [tensors[f"{their_block}.{name}.{kind}"] for name in QKV]
            found[f"{block}.attn.qkv.{kind}"] = torch.cat(parts)
    return found


def _names(depth: int) -> list[str]:
    blocks = [f"{name}.{kind}" for name in (*BLOCK.values(), *QKV) for kind in KINDS] + list(EMBEDDERS.values())
    return [
        *(f"{name}.{kind}" for name in OUTER.values() for kind in KINDS),
        *(f"transformer_blocks.{index}.{name}" for index in range(depth) for name in blocks),
    ]


def diffusers_config(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `DiTTransformer2DModel` for a model of ours."""
    return {
        "num_attention_heads": settings["num_heads"],
        "attention_head_dim": settings["hidden_size"] // settings["num_heads"],
        "in_channels": settings["in_channels"],
        "out_channels": settings["in_channels"] * (2 if settings["learn_sigma"] else 1),
        "num_layers": settings["depth"],
        "sample_size": settings["latent_size"][0],
        "patch_size": settings["patch_size"],
        "num_embeds_ada_norm": settings["num_classes"],
        "norm_eps": settings.get("mlp_norm_eps", 1e-6),
    }
