"""The Inception Score, exp(E KL(p(y|x) || p(y))), of a stream of logits (Salimans et al. 2016, arXiv 1606.03498)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPLIT_SIZE = 5000  # as ADM's evaluator; the mean over splits is the score, a short last one weighs as much


class InceptionScoreSums:
    """Running sums per split of 5,000 images, float64: all that the score needs, without keeping logits.

    With q the mean of p over a split, mean KL = mean(sum p log p) - sum q log q, so sums of p and of p log p do.

    Attributes:
        n: (S,) int64, images seen of each split.
        probabilities: (S, K) float64, sum of p.
        negative_entropies: (S,) float64, sum over images of sum_k p log p.
    """

    def __init__(self, num_images: int, num_classes: int) -> None:
        splits = -(-num_images // SPLIT_SIZE)
        self.n: NDArray[np.int64] = np.zeros(splits, dtype=np.int64)
        self.probabilities: NDArray[np.float64] = np.zeros((splits, num_classes))
        self.negative_entropies: NDArray[np.float64] = np.zeros(splits)

    def update(self, logits: Tensor, positions: NDArray[np.int64]) -> None:
        """Adds a batch.

        Args:
            logits: (B, K), any floating type and device.
            positions: (B,) place of each image in the set; place // 5000 is its split.
        """
        log_p = logits.detach().cpu().double().log_softmax(dim=1)  # never log 0, which makes NaN of ADM's p log p
        p = log_p.exp()
        split = positions // SPLIT_SIZE
        np.add.at(self.n, split, 1)
        np.add.at(self.probabilities, split, p.numpy())
        np.add.at(self.negative_entropies, split, torch.special.entr(p).sum(dim=1).neg().numpy())

    def merge(self, other: "InceptionScoreSums") -> None:
        """Adds what `other` has seen of the same set."""
        self.n += other.n
        self.probabilities += other.probabilities
        self.negative_entropies += other.negative_entropies

    def score(self) -> float:
        """The mean over splits, at least 1.

        Raises:
            ValueError: nothing has been seen.
        """
        seen = self.n > 0
        if not seen.any():
            raise ValueError("an Inception Score needs at least 1 image, got 0")
        n = self.n[seen]
        q = torch.from_numpy(self.probabilities[seen] / n[:, None])
        mean_kl = self.negative_entropies[seen] / n + torch.special.entr(q).sum(dim=1).numpy()
        return float(np.exp(mean_kl).mean())
