import re
from typing import Literal, NamedTuple

Family = Literal["DiT", "SiT"]

PATCH_SIZES = (1, 2, 4, 8)


class Shape(NamedTuple):
    """Width, depth and heads of a transformer."""

    hidden_size: int
    depth: int
    num_heads: int


# DiT, arXiv 2212.09748, table 1; `tiny` is ours, for tests and the demo.
SHAPES: dict[str, Shape] = {
    "tiny": Shape(96, 4, 4),
    "S": Shape(384, 12, 6),
    "B": Shape(768, 12, 12),
    "L": Shape(1024, 24, 16),
    "XL": Shape(1152, 28, 16),
}


class Variant(NamedTuple):
    """A named model: `DiT-S/2` is family DiT, shape S, patch size 2. The family fixes the objective."""

    family: Family
    shape: Shape
    patch_size: int


def parse_variant(name: str) -> Variant:
    """Reads a name such as `DiT-S/2` or `SiT-XL/2`; a `ValueError` that lists the parts for anything else."""
    match = re.fullmatch(r"(DiT|SiT)-(\w+)/(\d+)", name)
    if match is None or match[2] not in SHAPES or int(match[3]) not in PATCH_SIZES:
        raise ValueError(
            f"unknown variant {name!r}; expected DiT or SiT, '-', one of {', '.join(SHAPES)}, '/', "
            f"and a patch size of {', '.join(map(str, PATCH_SIZES))}, for example SiT-S/2"
        )
    family: Family = "DiT" if match[1] == "DiT" else "SiT"
    return Variant(family, SHAPES[match[2]], int(match[3]))
