"""GRPO: Group Relative Policy Optimization (DeepSeekMath, arXiv:2402.03300, §4.1), and Dr. GRPO (arXiv:2503.20783).

Dr. GRPO is `normalise_std=False, loss_aggregation="constant-length"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algos import losses
from algos.advantages import group_advantages
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, NonNegative, Positive, Share, check_fields

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GRPO:
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
    def max_sampling_rounds(self) -> int:
        return 1

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def keep_group(self, rewards: Sequence[float]) -> bool:
        return True

    def shape_rewards(
        self, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool], max_tokens: int
    ) -> list[float]:
        return list(rewards)

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """§4.1.2: A_i = (r_i - mean(r)) / std(r), the same for every token of o_i."""
        return group_advantages(rewards, normalise_std=self.normalise_std)

    def loss_mask(self, length: int, truncated: bool) -> bool:
        return True

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 3: -1/G sum_i 1/|o_i| sum_t [min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta KL(policy || ref)]."""
        surrogate = losses.clipped_surrogate(inputs, self.ratio_clip_low, self.ratio_clip_high, self.dual_clip)
        weights_BT = losses.importance_weights(inputs, self.importance_correction, self.importance_cap)
        pg_loss = self._aggregate(weights_BT * surrogate.loss_BT, inputs)
        loss = pg_loss
        metrics, maxima = losses.surrogate_metrics(surrogate, weights_BT, self.importance_cap, inputs)
        metrics["actor/pg_loss"] = pg_loss.detach()
        if self.kl_coef > 0:
            assert inputs.ref_logprobs_BT is not None
            kl_BT = losses.kl_estimate(inputs.logprobs_BT, inputs.ref_logprobs_BT, self.kl_estimator)
            kl_loss = self._aggregate(kl_BT, inputs)
            loss = loss + self.kl_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach()
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * self._aggregate(inputs.entropy_BT, inputs)
        return LossOutput(loss=loss, metrics=metrics | {"actor/loss": loss.detach()}, maxima=maxima)

    def _aggregate(self, values_BT: Tensor, inputs: LossInputs) -> Tensor:
        return losses.aggregate(values_BT, inputs, self.loss_aggregation, self.constant_length)
