import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch_fidelity.metric_kid import kid_features_to_metric

from fid.kernel_distance import kernel_distance, require_subset_size, squared_mmd

Array = NDArray[np.float64]


def column(*values: float) -> Array:
    return np.array(values, dtype=np.float64)[:, None]


def test_two_points_a_side_by_hand() -> None:
    # k(a, b) = (ab + 1)^3: 1 of (0, 2), 64 of (1, 3), and 1, 1, 27, 343 between.
    assert squared_mmd(column(0, 2), column(1, 3)) == 1 + 64 - 2 * (1 + 1 + 27 + 343) / 4 == -121
    assert kernel_distance(column(0, 2), column(1, 3), 2) == pytest.approx((-121, 0))


def test_equal_sets_are_a_little_below_0_as_the_estimate_is_unbiased() -> None:
    x = np.random.default_rng(0).standard_normal((40, 6))
    kernel = (x @ x.T / 6 + 1) ** 3
    total, diagonal, m = kernel.sum(), np.trace(kernel), len(x)
    expected = 2 * (total - diagonal) / (m * (m - 1)) - 2 * total / m**2
    assert squared_mmd(x, x) == pytest.approx(expected, rel=1e-12)
    assert expected < 0


def test_equal_distributions_are_0_on_average() -> None:
    random = np.random.default_rng(0)
    values = [squared_mmd(*random.standard_normal((2, 50, 16))) for _ in range(300)]
    deviation = np.std(values) / len(values) ** 0.5
    assert abs(np.mean(values)) < 4 * deviation < 0.02  # the biased estimate would be at 0.15
    assert 0.35 < np.mean(np.array(values) < 0) < 0.65


def test_a_shifted_gaussian_is_at_its_closed_form() -> None:
    d, delta = 16, 1.0
    expected = 3 * delta**2 / d + 3 * delta**4 / d**2 + (delta**6 + 6 * delta**4 + 3 * delta**2 * (d + 2)) / d**3
    assert expected == pytest.approx(0.214111, abs=1e-6)
    random = np.random.default_rng(1)
    shift = delta * np.eye(d)[0]
    values = [
        squared_mmd(random.standard_normal((200, d)) + shift, random.standard_normal((200, d))) for _ in range(200)
    ]
    deviation = np.std(values) / len(values) ** 0.5
    assert np.mean(values) == pytest.approx(expected, abs=4 * deviation)
    assert 4 * deviation < 0.03


def test_sets_of_two_sizes_are_fine() -> None:
    random = np.random.default_rng(2)
    x, y = random.standard_normal((3, 4)), random.standard_normal((5, 4))

    def k(a: Array, b: Array) -> float:
        return (float(a @ b) / 4 + 1) ** 3

    within = [np.mean([k(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j]) for s in (x, y)]
    between = np.mean([k(a, b) for a in x for b in y])
    assert squared_mmd(x, y) == pytest.approx(sum(within) - 2 * between, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_fidelity_agrees_subset_by_subset(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    generated = torch.randn(150, 32, generator=generator).to(dtype)
    real = (0.2 + torch.randn(120, 32, generator=generator)).to(dtype)
    theirs = kid_features_to_metric(
        generated, real, kid_subsets=100, kid_subset_size=50, kid_kernel="poly", rng_seed=2020, verbose=False
    )
    ours = kernel_distance(generated.numpy(), real.numpy(), 50)
    rel = 1e-4 if dtype == torch.float32 else 1e-10
    assert ours.mean == pytest.approx(theirs["kernel_inception_distance_mean"], rel=rel)
    assert ours.std == pytest.approx(theirs["kernel_inception_distance_std"], rel=rel)


def test_a_set_smaller_than_its_subsets_is_refused_with_a_size_that_works() -> None:
    with pytest.raises(ValueError, match=r"at least 1000 generated images for its subsets, got 100; .* 100$"):
        kernel_distance(np.zeros((100, 2)), np.zeros((2000, 2)))
    with pytest.raises(ValueError, match=r"at least 1000 reference images for its subsets, got 30; .* 30$"):
        require_subset_size(5000, 30, 1000)
    with pytest.raises(ValueError, match="--kid-subset-size 1: must be at least 2"):
        require_subset_size(100, 100, 1)
    with pytest.raises(ValueError, match=r"--kid-subset-size 30$"):  # 100 would be refused again
        require_subset_size(100, 30, 1000)
