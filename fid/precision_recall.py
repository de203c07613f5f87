"""Improved precision and recall (Kynkaanniemi et al. 2019, arXiv 1904.06991), with ADM's neighbourhood of 3."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

NEIGHBOURS = 3
ROWS = 1000  # a block of distances is ROWS x N float32: 200 MB at 50,000 images


class PrecisionRecall(NamedTuple):
    """Two fractions in [0, 1]."""

    precision: float  # of generated images that lie in the ball of a real one
    recall: float  # of real images that lie in the ball of a generated one


def precision_recall(
    generated: Tensor, real: Tensor, neighbours: int = NEIGHBOURS, device: torch.device | str = "cpu"
) -> PrecisionRecall:
    """How much of the generated images is real, and how much of the real ones is generated.

    An image's ball reaches to its `neighbours`-th neighbour of its own set, itself not counted; the border is
    inside. Distances are float32, in blocks (ADM's are float16, which moves the values by about 0.002). Neither
    number compares between sets of other sizes.

    Args:
        generated: (N, d) float32.
        real: (M, d) float32.
        neighbours: k.
        device: where distances are computed.

    Raises:
        ValueError: a set has no more than `neighbours` images.
    """
    for features, what in ((generated, "generated"), (real, "real")):
        if len(features) <= neighbours:
            raise ValueError(
                f"precision and recall need more than {neighbours} {what} images for a neighbourhood of {neighbours}, "
                f"got {len(features)}"
            )
    generated, real = generated.to(device).float(), real.to(device).float()
    return PrecisionRecall(
        precision=_inside(generated, real, _radii(real, neighbours)),
        recall=_inside(real, generated, _radii(generated, neighbours)),
    )


def _radii(features: Tensor, neighbours: int) -> Tensor:
    """Distance of each feature's k-th neighbour: (N,)."""
    return torch.cat([block.kthvalue(neighbours + 1, dim=1).values for block in _distances(features, features)])


def _inside(features: Tensor, centers: Tensor, radii: Tensor) -> float:
    """The fraction of `features` within the radius of at least one of `centers`."""
    inside = [(block <= radii).any(dim=1) for block in _distances(features, centers)]
    return torch.cat(inside).double().mean().item()


def _distances(rows: Tensor, columns: Tensor) -> Iterator[Tensor]:
    for block in rows.split(ROWS):
        yield torch.cdist(block, columns)
