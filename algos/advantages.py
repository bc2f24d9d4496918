"""Group-relative advantages: each completion is compared with the other completions of its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

ADVANTAGE_EPS = 1e-6
MAX_REWARD = 1e30
"""Sums and squares of larger ones overflow, as does float32."""


def group_advantages(rewards: Sequence[float], *, normalise_std: bool = True) -> list[float]:
    """Returns one advantage per completion of a group. Raises ValueError on a reward that is not finite, or too large.

    GRPO (DeepSeekMath, arXiv:2402.03300, §4.1.2): A_i = (r_i - mean(r)) / (std(r) + 1e-6). The paper does not name the
    estimator of std; this is the sample standard deviation (n - 1), as in TRL and verl.
    `normalise_std=False` is Dr. GRPO (arXiv:2503.20783, §3.2): A_i = r_i - mean(r). Groups that are nearly solved or
    nearly hopeless then weigh no more than others. A group of one, or of equal rewards, has zero advantages.
    """
    if not all(abs(reward) <= MAX_REWARD for reward in rewards):
        raise ValueError(f"rewards={list(rewards)}: must be from -1e30 to 1e30; check the reward function")
    if len(set(rewards)) <= 1:  # exactly zero: 1 / ADVANTAGE_EPS would amplify the rounding error of the mean
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalise_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + ADVANTAGE_EPS) for value in centred]


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """RLOO (arXiv:2402.14740, §2): A_i = r_i - mean of the other rewards = n / (n - 1) (r_i - mean(r))."""
    scale = len(rewards) / max(1, len(rewards) - 1)
    return [scale * centred for centred in group_advantages(rewards, normalise_std=False)]


def batch_advantages(groups: Sequence[Sequence[float]], *, group_baseline: bool) -> list[list[float]]:
    """REINFORCE++ (arXiv:2501.03262v9, Eq. 5): (A - mean(A)) / (std(A) + 1e-6), over the completions of all groups.

    `group_baseline` first subtracts from each reward the mean of its group (Eq. 6 and 7).
    """
    before = [group_advantages(group, normalise_std=False) if group_baseline else group for group in groups]
    normalised = iter(group_advantages([value for group in before for value in group]))
    return [[next(normalised) for _ in group] for group in groups]
