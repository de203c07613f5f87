import math

import numpy as np
import pytest
import torch
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

from fid import inception_score
from fid.inception_score import SPLIT_SIZE, InceptionScoreSums


def score_of(logits: torch.Tensor, batch_size: int | None = None) -> float:
    sums = InceptionScoreSums(len(logits), logits.shape[1])
    for batch in torch.arange(len(logits)).split(batch_size or len(logits)):
        sums.update(logits[batch], batch.numpy())
    return sums.score()


def one_hot(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Logits 200 apart: probabilities 1 and, in float32, exactly 0, where p log p is NaN."""
    return 200 * torch.nn.functional.one_hot(labels, num_classes).float()


def random_logits(n: int, num_classes: int = 12) -> torch.Tensor:
    return 2 * torch.randn(n, num_classes, generator=torch.Generator().manual_seed(0))


def test_uniform_predictions_score_1() -> None:
    assert score_of(torch.zeros(50, 1008)) == pytest.approx(1, abs=1e-12)


def test_sure_and_even_predictions_score_the_number_of_classes() -> None:
    assert score_of(one_hot(torch.arange(60) % 6, 6)) == pytest.approx(6, rel=1e-12)
    assert score_of(one_hot(torch.arange(SPLIT_SIZE) % 1000, 1000), 1000) == pytest.approx(1000, rel=1e-12)


def test_two_classes_with_errors() -> None:
    error = 0.1
    entropy = -(error * math.log(error) + (1 - error) * math.log(1 - error))
    logits = torch.tensor([[1 - error, error], [error, 1 - error]], dtype=torch.float64).log()
    assert score_of(logits) == pytest.approx(2 * math.exp(-entropy), rel=1e-12)
    assert score_of(logits) == pytest.approx(1.444935, abs=1e-6)


def test_splits_are_of_neighbours_and_sorted_classes_ruin_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception_score, "SPLIT_SIZE", 100)
    labels = torch.arange(1000) % 10
    assert score_of(one_hot(labels, 10)) == pytest.approx(10, rel=1e-12)
    assert score_of(one_hot(labels.sort().values, 10)) == pytest.approx(1, abs=1e-12)


def test_a_split_is_5000_images() -> None:
    logits = one_hot(torch.arange(1000).repeat_interleave(50), 1000)  # sorted by class
    sums = InceptionScoreSums(len(logits), 1000)
    for batch in torch.arange(len(logits)).split(5000):
        sums.update(logits[batch], batch.numpy())
    assert sums.score() == pytest.approx(100, rel=1e-12)
    one_split = InceptionScoreSums(1, 1000)
    for name, value in vars(sums).items():
        getattr(one_split, name)[:] = value.sum(axis=0)
    assert one_split.score() == pytest.approx(1000, rel=1e-12)


def test_the_score_is_the_mean_over_splits_of_which_a_short_one_weighs_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inception_score, "SPLIT_SIZE", 8)
    labels = torch.cat([torch.arange(8) % 4, torch.zeros(3, dtype=torch.int64)])  # scores 4 and 1
    assert score_of(one_hot(labels, 4)) == pytest.approx(2.5, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_fidelity_agrees(dtype: torch.dtype) -> None:
    logits = random_logits(500).to(dtype)
    theirs = isc_features_to_metric(logits, splits=1, shuffle=False)[KEY_METRIC_ISC_MEAN]
    assert score_of(logits) == pytest.approx(theirs, rel=1e-10)
    assert theirs > 2


def test_torch_fidelity_agrees_in_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception_score, "SPLIT_SIZE", 50)
    logits = random_logits(500)
    theirs = isc_features_to_metric(logits, splits=10, shuffle=False)[KEY_METRIC_ISC_MEAN]
    assert score_of(logits, 64) == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_any_batches_in_any_order_give_the_same(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception_score, "SPLIT_SIZE", 40)
    logits = random_logits(103)
    expected = score_of(logits)
    sums = InceptionScoreSums(103, 12)
    order = torch.randperm(103, generator=torch.Generator().manual_seed(1))
    for batch in order.split(batch_size):
        sums.update(logits[batch], batch.numpy())
    assert sums.score() == pytest.approx(expected, rel=1e-12)
    assert sums.n.tolist() == [40, 40, 23]


def test_merged_parts_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception_score, "SPLIT_SIZE", 40)
    logits, parts = random_logits(103), []
    for rank in range(3):
        indices = torch.arange(rank, 103, 3)
        parts.append(InceptionScoreSums(103, 12))
        parts[-1].update(logits[indices], indices.numpy())
    first, *others = parts
    for other in others:
        first.merge(other)
    assert first.n.tolist() == [40, 40, 23]
    assert first.score() == pytest.approx(score_of(logits), rel=1e-12)


def test_what_is_the_same_for_all_classes_of_an_image_does_not_count() -> None:
    logits = random_logits(30)
    assert score_of(logits + torch.linspace(-50, 50, 30)[:, None]) == pytest.approx(score_of(logits), rel=1e-5)


def test_splits_that_nobody_has_seen_yet_do_not_count() -> None:
    sums = InceptionScoreSums(20_000, 4)
    sums.update(one_hot(torch.arange(8) % 4, 4), np.arange(8) + 10_000)
    assert sums.n.tolist() == [0, 0, 8, 0]
    assert sums.score() == pytest.approx(4, rel=1e-12)
    with pytest.raises(ValueError, match="at least 1 image, got 0"):
        InceptionScoreSums(5, 4).score()
