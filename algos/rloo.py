"""RLOO: REINFORCE Leave-One-Out ("Back to Basics", arXiv:2402.14740, §2; Kool et al. 2019).

A completion is one action: its log-prob is the *sum* over its tokens. The paper updates once per rollout; for more
updates than one, PPO's clip is added, which has no effect on the first. The paper's KL penalty is not part of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algos import losses
from algos.advantages import leave_one_out_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class RLOO(Algorithm):
    """Hyperparameters of RLOO; the methods are its equations."""

    ratio_clip_low: Share = 0.2
    """The ratio of new to old probability of a token is clipped below at 1 - this."""
    ratio_clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + this."""
    constant_length: Count = 1
    """Divisor of a sequence's summed loss, tokens; 1 is the paper's sum."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """A_i = r_i - 1/(k - 1) sum_{j != i} r_j."""
        return [leave_one_out_advantages(rewards) for rewards in groups]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Gradient -1/k sum_i A_i sum_t grad log pi(o_t), as of the surrogate at ratio 1."""
        surrogate = losses.clipped_surrogate(inputs, self.ratio_clip_low, self.ratio_clip_high)
        return losses.policy_loss(
            surrogate,
            inputs,
            "constant-length",
            self.importance_correction,
            self.importance_cap,
            self.constant_length,
        )
