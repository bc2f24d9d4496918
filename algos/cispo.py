"""CISPO: Clipped Importance Sampling Policy Optimization (MiniMax-M1, arXiv:2506.13585, §3.1).

The ratio is a clipped weight without a gradient, so every token is learned from, the clipped ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algos import losses
from algos.advantages import group_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class CISPO(Algorithm):
    """Hyperparameters of CISPO; the methods are its equations."""

    ratio_clip_low: Share = 1.0
    """The ratio of new to old probability is clipped below at 1 - this; 1 is no lower bound, as in the paper."""
    ratio_clip_high: Positive = 4.0
    """The ratio is clipped above at 1 + this. The paper gives no number; 5 as the upper bound is from ScaleRL
    (arXiv:2510.13786)."""
    loss_aggregation: losses.LossAggregation = "token-mean"
    """How per-token losses become one number; token-mean is the paper's Eq. 4."""
    constant_length: Count = 1024
    """Divisor of a sequence's summed loss under constant-length, tokens."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """§3.1, as in GRPO: A_i = (r_i - mean(r)) / std(r)."""
        return [group_advantages(rewards) for rewards in groups]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 4 and 5: -1/(sum_i |o_i|) sum_i sum_t sg(clip(rho, 1 - eps_low, 1 + eps_high)) A log pi."""
        log_ratio_BT = losses.log_ratios(inputs).detach()
        ratio_BT = log_ratio_BT.exp()
        clipped_BT = ratio_BT.clamp(1 - self.ratio_clip_low, 1 + self.ratio_clip_high)
        surrogate = losses.ClippedSurrogate(
            loss_BT=-clipped_BT * inputs.advantages_BT * inputs.logprobs_BT,
            clipped_BT=ratio_BT != clipped_BT,
            clipped_lower_BT=ratio_BT < clipped_BT,
            log_ratio_BT=log_ratio_BT,
        )
        return losses.policy_loss(
            surrogate,
            inputs,
            self.loss_aggregation,
            self.importance_correction,
            self.importance_cap,
            self.constant_length,
        )
