"""Scores of a policy on held-out problems. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that at least one of `k` completions, drawn without replacement from `num_samples` of which
    `num_correct` are right, is right.

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv:2107.03374, eq. 1), as a product of
    at most k factors in [0, 1], which neither overflows nor cancels. Raises `ValueError` unless
    0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct}: must be from 0 to num_samples={num_samples}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be from 1 to num_samples={num_samples}; sample more completions or lower k")
    num_wrong = num_samples - num_correct
    # C(w, k) / C(n, k) = prod_{i<k} (w - i) / (n - i) = prod_{j<c} (n - k - j) / (n - j): the shorter one rounds least.
    if k <= num_correct:
        all_wrong = math.prod((num_wrong - i) / (num_samples - i) for i in range(min(k, num_wrong + 1)))
    else:
        all_wrong = math.prod(
            (num_samples - k - j) / (num_samples - j) for j in range(min(num_correct, num_samples - k + 1))
        )
    return 1.0 - all_wrong


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """The mean of `pass_at_k` over problems; `correct[p][s]` says whether sample s of problem p is right.

    Problems may have different numbers of samples, each at least `k`. Raises `ValueError` when there is no problem.
    """
    if not correct:
        raise ValueError("correct=[]: must hold at least one problem")
    return math.fsum(pass_at_k(len(samples), sum(samples), k) for samples in correct) / len(correct)
