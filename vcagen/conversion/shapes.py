"""What a DiT or SiT is, read off the shapes of its tensors."""

import math
from typing import Any, NamedTuple

import torch

from vcagen.conversion.source import Tensors
from vcagen.models.layers import position_table
from vcagen.models.variants import SHAPES, Family

PATCH_WEIGHT = "x_embedder.proj.weight"  # (C, in_channels, p, p)
LABEL_TABLE = "y_embedder.embedding_table.weight"  # (K or K + 1, C)
FINAL_WEIGHT = "final_layer.linear.weight"  # (p * p * out_channels, C)
POSITIONS = "pos_embed"  # (1, N, C)
TIME_WEIGHT = "t_embedder.mlp.0.weight"  # (C, 256), columns: cosines, then sines
MLP_WEIGHT = "blocks.0.mlp.fc1.weight"  # (mlp_ratio * C, C)

# Ranks of the tensors that the sizes are read from.
RANKS = {PATCH_WEIGHT: 4, LABEL_TABLE: 2, FINAL_WEIGHT: 2, POSITIONS: 3, MLP_WEIGHT: 2}


class Reading(NamedTuple):
    """Settings of a `DiffusionTransformer`, without attention, and what was assumed to get them."""

    settings: dict[str, Any]
    assumed: list[str]


def read_settings(tensors: Tensors, num_heads: int | None, num_classes: int | None, source: str) -> Reading:
    """Reads sizes off tensors with official names.

    Args:
        tensors: by official name.
        num_heads: heads, which no tensor shows; None takes those of the published model of this width and depth.
        num_classes: as the training script's arguments say, where they do; None takes the last row of the label
            table for the null label, as in every published model.
        source: file to name in errors.

    Raises:
        ValueError: a tensor that is needed is missing or of the wrong rank, sizes contradict each other, or the
            number of heads cannot be known.
    """
    lacking = [name for name in RANKS if name not in tensors]
    if lacking:
        there = ", ".join(list(tensors)[:5])
        raise ValueError(f"{source}: not a DiT or SiT; missing {', '.join(lacking)}; it has {there}, ...")
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {rank} dimensions"
        for name, rank in RANKS.items()
        if tensors[name].dim() != rank
    ]
    if wrong:
        raise ValueError(f"{source}: {'; '.join(wrong)}")
    empty = [name for name in RANKS if tensors[name].numel() == 0]
    if empty:
        raise ValueError(f"{source}: {', '.join(empty)} is empty")
    hidden_size, in_channels, patch_size, _ = tensors[PATCH_WEIGHT].shape
    depth = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
    out_channels, rest = divmod(len(tensors[FINAL_WEIGHT]), patch_size**2)
    if rest or out_channels not in (in_channels, 2 * in_channels):
        raise ValueError(
            f"{source}: {FINAL_WEIGHT} has {len(tensors[FINAL_WEIGHT])} rows; with patches of {patch_size} and "
            f"{in_channels} latent channels expected {patch_size**2 * in_channels}, or twice that"
        )
    assumed: list[str] = []
    grid = _grid(tensors[POSITIONS], hidden_size, source, assumed)
    rows = len(tensors[LABEL_TABLE])
    if num_classes is not None and rows not in (num_classes, num_classes + 1):
        raise ValueError(
            f"{source}: {LABEL_TABLE} has {rows} rows, but its arguments say num_classes={num_classes}; expected "
            f"{num_classes + 1} with a null label, {num_classes} without"
        )
    has_null_label = num_classes is None or rows == num_classes + 1
    if num_classes is None:
        assumed.append(f"the last of {rows} rows of the label table is the null label")
    if num_heads is None:
        num_heads = _published_heads(hidden_size, depth)
        if num_heads is None:
            raise ValueError(
                f"{source}: width {hidden_size} and depth {depth} are no published model's, and no tensor shows the "
                "number of heads; give --num-heads"
            )
        assumed.append(f"{num_heads} heads, as in the published model of width {hidden_size} and depth {depth}")
    settings: dict[str, Any] = {
        "latent_size": (grid[0] * patch_size, grid[1] * patch_size),
        "in_channels": in_channels,
        "patch_size": patch_size,
        "hidden_size": hidden_size,
        "depth": depth,
        "num_heads": num_heads,
        "mlp_ratio": len(tensors[MLP_WEIGHT]) / hidden_size,
        "num_classes": rows - has_null_label,
        "has_null_label": has_null_label,
        "learn_sigma": out_channels == 2 * in_channels,
    }
    return Reading(settings, assumed)


def _grid(positions: torch.Tensor, hidden_size: int, source: str, assumed: list[str]) -> tuple[int, int]:
    """(rows, columns) of the token grid: the one whose position codes these are."""
    num_tokens = positions.shape[1]
    sides = [(rows, num_tokens // rows) for rows in range(1, num_tokens + 1) if num_tokens % rows == 0]
    for grid in sorted(sides, key=lambda grid: abs(grid[0] - grid[1])):
        table = position_table(hidden_size, grid)
        if table.shape == positions.shape and (table - positions.float()).abs().max() < 0.01:
            return grid
    side = math.isqrt(num_tokens)
    if side**2 != num_tokens:
        raise ValueError(
            f"{source}: {POSITIONS} has {num_tokens} tokens and is not the sine-cosine table of any grid, so the sides "
            "of the latents cannot be known"
        )
    assumed.append(f"a square grid of {side} x {side} tokens, since {POSITIONS} is not the sine-cosine table")
    return side, side


def _published_heads(hidden_size: int, depth: int) -> int | None:
    shapes = (shape for shape in SHAPES.values() if (shape.hidden_size, shape.depth) == (hidden_size, depth))
    return next((shape.num_heads for shape in shapes), None)


def variant_name(family: Family, settings: dict[str, Any]) -> str:
    """`SiT-XL/2` for a published shape, else width and depth."""
    sizes = tuple(settings[key] for key in ("hidden_size", "depth", "num_heads"))
    name = next((name for name, shape in SHAPES.items() if tuple(shape) == sizes), None)
    return f"{family}-{name or f'{sizes[0]}x{sizes[1]}'}/{settings['patch_size']}"
