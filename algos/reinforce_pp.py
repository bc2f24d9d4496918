"""REINFORCE++, by default with baseline (arXiv:2501.03262v9, §3): advantages are normalised over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algos import losses
from algos.advantages import batch_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, NonNegative, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """Hyperparameters of REINFORCE++; the methods are its equations."""

    ratio_clip_low: Share = 0.2
    """The ratio of new to old probability is clipped below at 1 - this."""
    ratio_clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + this."""
    group_baseline: bool = True
    """Subtract the mean of its group from each reward (§3.2, "w/ Baseline"); False: §3.1, without KL in the reward."""
    loss_aggregation: losses.LossAggregation = "sequence-mean"
    """How per-token losses become one number; sequence-mean is the paper's Eq. 1."""
    constant_length: Count = 1024
    """Divisor of a sequence's summed loss under constant-length, tokens."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL term to the initial model (the paper's lambda); 0 loads no reference model."""
    kl_estimator: losses.KLEstimator = "k2"
    """Estimator of the KL term; k2 is the paper's Eq. 8."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Eq. 6 and 7, or Eq. 5. Each completion counts once in the means, however many tokens it has."""
        return batch_advantages(groups, group_baseline=self.group_baseline)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 8: PPO's clipped objective (Eq. 1), negated, plus lambda times the KL by k2."""
        how, length = self.loss_aggregation, self.constant_length
        surrogate = losses.clipped_surrogate(inputs, self.ratio_clip_low, self.ratio_clip_high)
        output = losses.policy_loss(surrogate, inputs, how, self.importance_correction, self.importance_cap, length)
        return losses.with_kl(output, inputs, self.kl_coef, self.kl_estimator, how, length)
