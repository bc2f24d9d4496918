"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, §4.1), and Dr. GRPO (arXiv:2503.20783).

Dr. GRPO is `normalise_std=False, loss_aggregation="constant-length"`, which `--algo dr-grpo` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from algos import losses
from algos.advantages import group_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, NonNegative, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class GRPO(Algorithm):
    """Hyperparameters of GRPO; the methods are its equations."""

    ratio_clip_low: Share = 0.2
    """The ratio of new to old probability is clipped below at 1 - this (the paper's epsilon)."""
    ratio_clip_high: Positive = 0.2
    """The ratio is clipped above at 1 + this."""
    dual_clip: losses.DualClip | None = None
    """Upper bound on the loss of a token with negative advantage, as a multiple of |A| (verl: 3.0); None: no bound."""
    normalise_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards; False is Dr. GRPO."""
    loss_aggregation: losses.LossAggregation = "sequence-mean"
    """How per-token losses become one number; sequence-mean is the paper's 1/G sum 1/|o_i| sum."""
    constant_length: Count = 1024
    """Divisor of a sequence's summed loss under constant-length (Dr. GRPO's fixed generation budget), tokens."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL term to the initial model (the paper's beta, 0.04 there); 0 loads no reference model."""
    kl_estimator: losses.KLEstimator = "k3"
    """Estimator of the KL term; k3 is the paper's Eq. 4."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences (the paper's mu)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """§4.1.2: A_i = (r_i - mean(r)) / std(r), the same for every token of o_i."""
        return [group_advantages(rewards, normalise_std=self.normalise_std) for rewards in groups]

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 3: -1/G sum_i 1/|o_i| sum_t [min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta KL(policy || ref)]."""
        surrogate = losses.clipped_surrogate(inputs, self.ratio_clip_low, self.ratio_clip_high, self.dual_clip)
        how, length = self.loss_aggregation, self.constant_length
        output = losses.policy_loss(surrogate, inputs, how, self.importance_correction, self.importance_cap, length)
        output = losses.with_kl(output, inputs, self.kl_coef, self.kl_estimator, how, length)
        if self.entropy_coef == 0:
            return output
        loss = output.loss - self.entropy_coef * losses.aggregate(inputs.entropy_BT, inputs, how, length)
        return replace(output, loss=loss, metrics=output.metrics | {"actor/loss": loss.detach()})
