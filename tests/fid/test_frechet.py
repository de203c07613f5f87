from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric

from fid.frechet import frechet_distance
from fid.moments import FeatureMoments

ZERO2, ZERO3 = np.zeros(2), np.zeros(3)
SQUARE = np.array([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0]])  # mean (1, 1), covariance 4/3 I


def statistics(features):
    moments = FeatureMoments(features.shape[1])
    moments.update(torch.as_tensor(features))
    return moments.mean(), moments.covariance()


def distance_of(features1, features2, known_n=False):
    counts = (len(features1), len(features2)) if known_n else (None, None)
    return frechet_distance(*statistics(features1), *statistics(features2), *counts)


def random_covariance(rng, dimension, samples):
    return np.cov(rng.standard_normal((samples, dimension)), rowvar=False)


def test_commuting_covariances():
    cov1, cov2 = np.diag([1.0, 4.0, 9.0]), np.diag([4.0, 9.0, 16.0])
    assert frechet_distance(ZERO3, cov1, ZERO3, cov2) == pytest.approx(3, abs=1e-6)
    means = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 0.0])
    assert frechet_distance(means[0], cov1, means[1], cov2) == pytest.approx(12, abs=1e-6)


def test_shifted_points():
    assert frechet_distance(ZERO2, np.eye(2), np.array([3.0, 0.0]), np.eye(2)) == pytest.approx(9, abs=1e-6)
    assert distance_of(SQUARE, SQUARE + np.array([3.0, 0.0])) == pytest.approx(9, abs=1e-6)


def test_covariances_that_do_not_commute():
    cov1, transport = np.diag([1.0, 4.0]), np.array([[2.0, 1.0], [1.0, 2.0]])
    cov2 = transport @ cov1 @ transport
    np.testing.assert_array_equal(cov2, [[8, 10], [10, 17]])
    assert frechet_distance(ZERO2, cov1, ZERO2, cov2) == pytest.approx(10, abs=1e-6)


def test_optimal_transport_closed_form_in_many_dimensions():
    rng = np.random.default_rng(0)
    cov1, transport = random_covariance(rng, 40, 200), random_covariance(rng, 40, 200)
    cov2 = transport @ cov1 @ transport
    expected = np.trace(cov1) + np.trace(cov2) - 2 * np.trace(transport @ cov1)
    assert frechet_distance(np.zeros(40), cov1, np.zeros(40), cov2) == pytest.approx(expected, abs=1e-6)


def test_rank_one_covariances():
    assert frechet_distance(ZERO2, np.diag([4.0, 0.0]), ZERO2, np.diag([0.0, 9.0])) == pytest.approx(13, abs=1e-6)
    direction = np.array([0.6, 0.8])
    oblique = 9 * np.outer(direction, direction)
    assert frechet_distance(ZERO2, np.diag([4.0, 0.0]), ZERO2, oblique) == pytest.approx(5.8, abs=1e-6)


def test_scaled_points_prove_the_divisor_n_minus_1():
    assert distance_of(SQUARE, 2 * SQUARE) == pytest.approx(2 + 8 / 3, abs=1e-6)


@pytest.mark.parametrize(("n", "dimension"), [(20, 100), (101, 100), (500, 100), (100, 512)])
def test_identical_statistics_are_at_distance_0(n, dimension):
    features = np.random.default_rng(n).standard_normal((n, dimension))
    assert distance_of(features, features) < 1e-5
    assert distance_of(features, features, known_n=True) < 1e-9


@pytest.mark.parametrize("known_n", [False, True])
def test_the_distance_is_symmetric_and_ignores_common_rotations(known_n):
    rng = np.random.default_rng(1)
    features1, features2 = rng.standard_normal((15, 30)), 1 + 2 * rng.standard_normal((300, 30))
    distance = distance_of(features1, features2, known_n)
    rotation, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    order = rng.permutation(30)
    assert distance_of(features2, features1, known_n) == pytest.approx(distance, abs=1e-5)
    assert distance_of(features1 @ rotation, features2 @ rotation, known_n) == pytest.approx(distance, abs=1e-5)
    assert distance_of(features1[:, order], features2[:, order], known_n) == pytest.approx(distance, abs=1e-5)


@pytest.mark.parametrize(("n1", "n2"), [(20, 20), (20, 35), (35, 20), (20, 400), (400, 20)])
def test_rank_deficient_covariances_equal_the_nuclear_norm(n1, n2):
    rng = np.random.default_rng(2)
    features1, features2 = (
        rng.standard_normal((n1, 60)),
        rng.standard_normal((n2, 60)) * np.linspace(0.1, 3, 60),
    )
    centred1, centred2 = features1 - features1.mean(axis=0), features2 - features2.mean(axis=0)
    root_trace = np.linalg.norm(centred1 @ centred2.T, "nuc") / np.sqrt((n1 - 1) * (n2 - 1))
    (mean1, cov1), (mean2, cov2) = statistics(features1), statistics(features2)
    expected = np.sum((mean1 - mean2) ** 2) + np.trace(cov1) + np.trace(cov2) - 2 * root_trace
    assert frechet_distance(mean1, cov1, mean2, cov2, n1, n2) == pytest.approx(expected, abs=1e-9)
    assert frechet_distance(mean1, cov1, mean2, cov2) == pytest.approx(expected, abs=1e-4)


def test_torch_fidelity_agrees():
    generator = torch.Generator().manual_seed(3)
    features1 = torch.randn(200, 32, generator=generator, dtype=torch.float64)
    features2 = 0.5 + torch.randn(300, 32, generator=generator, dtype=torch.float64).exp()
    theirs = fid_statistics_to_metric(
        fid_features_to_statistics(features1), fid_features_to_statistics(features2), verbose=False
    )
    assert distance_of(features1, features2) == pytest.approx(theirs[KEY_METRIC_FID], abs=1e-6)


def test_scipys_matrix_square_root_agrees():
    oracle = load_file(Path(__file__).parents[1] / "data" / "frechet.safetensors")
    distance = distance_of(oracle["features_1"], oracle["features_2"], known_n=True)
    assert distance == pytest.approx(oracle["fid"].item(), abs=1e-6)


@pytest.mark.parametrize("n", [2, 64, 300, 2000])
def test_any_number_of_samples_gives_a_real_number(n):
    rng = np.random.default_rng(n)
    first, second = rng.standard_normal((2, n, 256))
    distance, other_way = distance_of(first, second, known_n=True), distance_of(second, first, known_n=True)
    assert np.isfinite(distance)
    assert distance == pytest.approx(other_way, rel=1e-6)
    assert distance == pytest.approx(distance_of(first, second), rel=1e-6)
    assert 0 <= distance_of(first, first, known_n=True) < 1e-3
    assert distance > {2: 500, 64: 250, 300: 90, 2000: 12}[n]  # both of one distribution: all of it is bias


def test_the_bias_of_few_samples_is_as_theory_says():
    def bias(n, dimension, repeats):
        rng = np.random.default_rng(0)
        exact = np.zeros(dimension), np.eye(dimension)
        sampled = (statistics(rng.standard_normal((n, dimension))) for _ in range(repeats))
        return np.mean([frechet_distance(*one, *exact, n) for one in sampled])

    d, n = 64, 2000
    assert bias(n, d, 40) == pytest.approx(d / n + d * (d + 1) / (4 * n), abs=0.01)  # 0.552
    assert bias(300, 256, 4) == pytest.approx(65, abs=2)


def test_scaled_and_shifted_standard_normals():
    mean1, cov1, mean2, cov2 = np.zeros(64), np.eye(64), np.full(64, 0.3), 1.7**2 * np.eye(64)
    assert frechet_distance(mean1, cov1, mean2, cov2) == pytest.approx(37.12, abs=1e-8)
    assert frechet_distance(mean2, cov2, mean1, cov1) == pytest.approx(37.12, abs=1e-8)


def test_a_condition_number_of_1e12_is_fine():
    rng = np.random.default_rng(4)
    rotation, _ = np.linalg.qr(rng.standard_normal((64, 64)))
    spectrum = np.logspace(0, -12, 64)
    cov1, cov2 = (rotation * spectrum) @ rotation.T, (rotation * 4 * spectrum) @ rotation.T
    cov1, cov2 = (cov1 + cov1.T) / 2, (cov2 + cov2.T) / 2
    zero = np.zeros(64)
    assert frechet_distance(zero, cov1, zero, cov2) == pytest.approx(spectrum.sum(), abs=1e-6)  # sum (2 s - s)^2
    assert frechet_distance(zero, cov2, zero, cov1) == pytest.approx(spectrum.sum(), abs=1e-6)
    assert frechet_distance(zero, cov1, zero, cov1) < 1e-6


def test_covariances_whose_product_is_far_from_symmetric():
    # A symmetric routine on the product itself would find eigenvalues below -10 here.
    cov1, transport = np.diag([1.0, 400.0]), np.array([[2.0, 0.9], [0.9, 0.5]])
    cov2 = transport @ cov1 @ transport
    assert np.linalg.eigvalsh(cov1 @ cov2)[0] < -10
    expected = np.trace(cov1) + np.trace(cov2) - 2 * np.trace(transport @ cov1)
    assert frechet_distance(ZERO2, cov1, ZERO2, cov2) == pytest.approx(expected, rel=1e-9)


def test_the_covariance_is_of_features_not_of_samples():
    for n in (5, 31, 200):
        mean, covariance = statistics(np.random.default_rng(5).standard_normal((n, 31)))
        assert (mean.shape, covariance.shape) == ((31,), (31, 31))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean1": np.zeros((1, 2))}, r"mean1 has shape \(1, 2\)"),
        ({"cov2": np.eye(3)}, r"cov2 \(3, 3\); expected \(d,\) and \(d, d\)"),
        ({"mean2": ZERO3, "cov2": np.eye(3)}, "2 and 3 features"),
        ({"mean2": np.array([0.0, np.nan])}, "mean2 or cov2 has NaN or inf"),
        ({"cov1": np.diag([1.0, np.inf])}, "mean1 or cov1 has NaN or inf"),
        ({"cov1": np.array([[1.0, 0.5], [0.4, 1.0]])}, "cov1 is not symmetric"),
        ({"cov1": np.diag([1.0, -0.1])}, "negative eigenvalue -0.1"),
        ({"cov2": np.diag([1.0, -0.1])}, "negative eigenvalue -0.1"),
        ({"n2": 1}, "n2=1, expected at least 2"),
    ],
)
def test_wrong_statistics_are_refused(changes, message):
    arguments = {"mean1": ZERO2, "cov1": np.eye(2), "mean2": ZERO2, "cov2": np.eye(2)} | changes
    with pytest.raises(ValueError, match=message):
        frechet_distance(**arguments)


def test_a_negative_distance_is_rounding_or_an_error():
    nearly = np.diag([1e3, -1e-4])  # tr cov1 + tr cov2 - 2 tr sqrt = -2e-4
    assert frechet_distance(ZERO2, nearly, ZERO2, nearly) == 0
    wrong = np.diag([1e6, -0.5])  # the same sum is -1
    with pytest.raises(ValueError, match="came out as -1, expected at least 0"):
        frechet_distance(ZERO2, wrong, ZERO2, wrong)
