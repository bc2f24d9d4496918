"""DAPO: Decoupled Clip and Dynamic Sampling Policy Optimization (arXiv:2503.14476, §3).

Four changes to GRPO: clip-higher (§3.1), dynamic sampling (§3.2), token-level loss (§3.3), overlong reward shaping
(§3.4). There is no KL term (§2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from algos import losses
from algos.advantages import group_advantages
from algos.algorithm import Algorithm
from algos.experience import LossInputs, LossOutput
from engines.constraints import Count, Fraction, NonNegative, Positive, Share, check_fields


@dataclass(frozen=True, kw_only=True)
class DAPO(Algorithm):
    """Hyperparameters of DAPO; the methods are its equations."""

    ratio_clip_low: Share = 0.2
    """The ratio of new to old probability is clipped below at 1 - this."""
    ratio_clip_high: Positive = 0.28
    """The ratio is clipped above at 1 + this: wider than below, so that unlikely tokens can grow (§3.1)."""
    dual_clip: losses.DualClip | None = None
    """Upper bound on the loss of a token with negative advantage, as a multiple of |A| (verl: 3.0); None: no bound."""
    loss_aggregation: losses.LossAggregation = "token-mean"
    """How per-token losses become one number; token-mean is the paper's Eq. 8."""
    constant_length: Count = 1024
    """Divisor of a sequence's summed loss under constant-length, tokens."""
    dynamic_sampling: bool = True
    """Drop groups whose completions all got the same reward, and sample other groups instead (§3.2)."""
    max_sampling_rounds: Count = 3
    """Most rollouts per step, the first included, to replace dropped groups; unused without dynamic sampling."""
    overlong_buffer_fraction: Fraction = 0.2
    """Final share of `max_tokens` over which the penalty grows (paper: L_cache / L_max = 4096 / 20480); 0 is off."""
    overlong_factor: NonNegative = 1.0
    """Penalty of a completion of `max_tokens` tokens; a trajectory's observed tokens count as well."""
    overlong_filtering: bool = False
    """Do not train on completions that were cut off at `max_tokens` (overlong filtering, §3.4)."""
    importance_correction: losses.ImportanceCorrection = "token"
    """Weight losses by p_trainer / p_rollout, truncated at `importance_cap`: per token, per sequence, or off."""
    importance_cap: Positive = 2.0
    """Upper limit of the importance weights."""
    num_epochs: Count = 1
    """Passes over a rollout's experiences."""

    def __post_init__(self) -> None:
        check_fields(self)

    def keep_group(self, rewards: Sequence[float]) -> bool:
        """Eq. 11, 0 < |{correct}| < G, for any reward: True if rewards differ, as equal ones have zero advantages."""
        return not self.dynamic_sampling or len(set(rewards)) > 1

    def shape_rewards(
        self, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool], max_tokens: int
    ) -> list[float]:
        """Eq. 13, soft overlong punishment: 0 up to L_max - L_cache tokens, then linear down to -1 at L_max.

        Lengths are what `max_tokens` bounds: of a trajectory, all tokens behind the prompt, observed ones included, as
        verl's DAPO reward manager counts them.
        """
        cache = self.overlong_buffer_fraction * max_tokens
        if cache == 0:
            return list(rewards)
        return [
            reward + self.overlong_factor * max(-1.0, min(0.0, (max_tokens - cache - length) / cache))
            for reward, length in zip(rewards, lengths, strict=True)
        ]

    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Eq. 9: A_i = (R_i - mean(R)) / std(R)."""
        return [group_advantages(rewards) for rewards in groups]

    def loss_mask(self, length: int, truncated: bool) -> bool:
        return not (self.overlong_filtering and truncated)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Eq. 8: -1/(sum_i |o_i|) sum_i sum_t min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)."""
        surrogate = losses.clipped_surrogate(inputs, self.ratio_clip_low, self.ratio_clip_high, self.dual_clip)
        return losses.policy_loss(
            surrogate,
            inputs,
            self.loss_aggregation,
            self.importance_correction,
            self.importance_cap,
            self.constant_length,
        )
