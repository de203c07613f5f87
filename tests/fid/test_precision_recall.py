import pytest
import torch
from torch_fidelity.metric_prc import prc_features_to_metric

from fid import precision_recall as module
from fid.precision_recall import precision_recall


def line(*places: float) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.float32)[:, None]


def random_sets(n: int = 230, m: int = 170, dimension: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Two clouds that overlap in part."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, dimension, generator=generator), 1.3 + 0.8 * torch.randn(m, dimension, generator=generator)


@pytest.mark.parametrize("n", [5, 100])  # beyond 25 torch takes distances by a matrix product
def test_equal_sets_and_disjoint_ones(n: int) -> None:
    features = torch.randn(n, 16, generator=torch.Generator().manual_seed(1))
    assert precision_recall(features, features) == (1, 1)
    assert precision_recall(features, features.flip(0)) == (1, 1)
    assert precision_recall(features, features + 1000) == (0, 0)


def test_points_on_a_line_with_one_neighbour() -> None:
    one_to_nine = line(*range(10))
    assert precision_recall(line(0, 1, 2, 3, 4), one_to_nine, 1) == pytest.approx((1, 0.6))
    assert precision_recall(line(*range(0, 100, 10)), one_to_nine, 1) == pytest.approx((0.2, 1))


def test_three_neighbours_and_which_side_is_precision() -> None:
    generated, real = line(0, 1, 2, 3, 4), line(0, 1, 2, 3, 100)
    assert precision_recall(generated, real) == pytest.approx((1, 0.8))
    assert precision_recall(real, generated) == pytest.approx((0.8, 1))


def test_copies_of_one_image_have_no_room_around_them() -> None:
    real = line(*range(10))
    collapsed = line(*[0.5] * 10)
    assert precision_recall(collapsed, real) == (1, 0)


@pytest.mark.parametrize("rows", [1, 7, 100, 229, 230])
def test_blocks_do_not_change_the_result(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generated, real = random_sets()
    whole = precision_recall(generated, real)
    assert 0 < whole.precision < 1
    assert 0 < whole.recall < 1
    monkeypatch.setattr(module, "ROWS", rows)
    assert precision_recall(generated, real) == whole


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("dimension", [2, 8, 2048])
def test_torch_fidelity_agrees(dimension: int, by_blocks: bool) -> None:
    generated, real = random_sets(dimension=dimension)
    theirs = prc_features_to_metric(
        generated, real, prc_neighborhood=3, prc_batch_size=64, save_cpu_ram=by_blocks, verbose=False
    )
    ours = precision_recall(generated, real)
    assert ours.precision == pytest.approx(theirs["precision"], rel=1e-6)
    assert ours.recall == pytest.approx(theirs["recall"], rel=1e-6)


def test_other_types_are_taken_as_float32() -> None:
    generated, real = random_sets()
    assert precision_recall(generated.double(), real.double()) == precision_recall(generated, real)


@pytest.mark.parametrize(
    ("num_generated", "num_real", "message"),
    [(3, 10, "more than 3 generated images .* got 3"), (10, 2, "more than 3 real images .* got 2")],
)
def test_sets_no_larger_than_a_neighbourhood_are_refused(num_generated: int, num_real: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        precision_recall(torch.zeros(num_generated, 2), torch.zeros(num_real, 2))
