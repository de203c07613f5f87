import numpy as np
import pytest
import torch

from fid.moments import FeatureMoments


def random_features(n: int = 103, dimension: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 3 + torch.randn(n, dimension, generator=generator, dtype=torch.float64) * torch.arange(1, dimension + 1)


def moments_of(*batches: torch.Tensor) -> FeatureMoments:
    moments = FeatureMoments(batches[0].shape[1])
    for batch in batches:
        moments.update(batch)
    return moments


def assert_equals_numpy(moments: FeatureMoments, features: torch.Tensor) -> None:
    reference = features.double().numpy()
    np.testing.assert_allclose(moments.mean(), np.mean(reference, axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.covariance(), np.cov(reference, rowvar=False), rtol=1e-12, atol=1e-12)
    assert moments.n == len(features)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 103])
def test_any_batch_size_gives_numpys_mean_and_covariance(batch_size):
    features = random_features()
    assert_equals_numpy(moments_of(*features.split(batch_size)), features)


@pytest.mark.parametrize("sizes", [[50, 53], [1, 2, 100], [0, 103]])
def test_merged_parts_equal_the_whole(sizes):
    features = random_features()
    first, *others = [moments_of(part) for part in features.split(sizes)]
    for other in others:
        first.merge(other)
    assert_equals_numpy(first, features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_features_are_summed_in_float64(dtype):
    features = random_features().to(dtype)
    moments = moments_of(*features.split(10))
    assert moments.mean().dtype == moments.covariance().dtype == np.float64
    assert_equals_numpy(moments, features)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named_and_leaves_no_trace(value):
    good, bad = random_features(20).split(10)
    moments = moments_of(good)
    broken = bad.clone()
    broken[[3, 8], 2] = value
    with pytest.raises(ValueError, match=r"row 3 of this batch \(image 13 so far\)"):
        moments.update(broken)
    moments.update(bad)
    assert_equals_numpy(moments, torch.cat([good, bad]))


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="at least 1 image, got 0"):
        FeatureMoments(7).mean()
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        moments_of(random_features(1)).covariance()


def test_other_lengths_are_refused():
    moments = FeatureMoments(7)
    with pytest.raises(ValueError, match=r"shape \(4, 5\); expected \(B, 7\)"):
        moments.update(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="5 features into moments of 7"):
        moments.merge(FeatureMoments(5))
