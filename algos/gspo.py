"""GSPO: Group Sequence Policy Optimization (arXiv:2507.18071, §4): ratios and clipping of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algos import losses
from algos.advantages import group_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class GSPO(Algorithm):
    """Hyperparameters of GSPO; the methods are its equations."""

    ratio_clip_low: Share = 3e-4
    """A sequence's ratio of new to old probability is clipped below at 1 - this (§5.1)."""
    ratio_clip_high: Positive = 4e-4
    """The ratio is clipped above at 1 + this (§5.1)."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Eq. 6: A_i = (r_i - mean(r)) / std(r)."""
        return [group_advantages(rewards) for rewards in groups]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 5: -1/G sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i), with the geometric mean of the
        tokens' ratios as s_i (Eq. 7). A sequence's importance weight is the mean of its tokens' weights."""
        surrogate = losses.clipped_surrogate(
            inputs, self.ratio_clip_low, self.ratio_clip_high, log_ratio_BT=losses.sequence_log_ratios(inputs)
        )
        return losses.policy_loss(surrogate, inputs, "sequence-mean", self.importance_correction, self.importance_cap)
