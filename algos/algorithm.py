"""What the run and the trainer ask of an RL algorithm. GRPO and DAPO answer it with plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, get_args

from algos import losses
from algos.experience import LossInputs, LossOutput


class Algorithm(Protocol):
    """Rewards of completions to advantages, advantages to a loss. All methods are pure.

    The order of a step: `keep_group` on raw rewards, `shape_rewards`, `advantages`, `loss_mask`, `loss`.
    """

    @property
    def num_epochs(self) -> int:
        """Passes over a rollout's experiences."""

    @property
    def max_sampling_rounds(self) -> int:
        """Rollouts at most until a step has enough kept groups; 1 without dynamic sampling."""

    @property
    def needs_reference(self) -> bool:
        """Whether `LossInputs.ref_logprobs_BT` must be given."""

    def keep_group(self, rewards: Sequence[float]) -> bool:
        """Whether a group, by its raw rewards, is worth training on."""

    def shape_rewards(
        self, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool], max_tokens: int
    ) -> list[float]:
        """Rewards to learn from, given each completion's length in tokens and whether `max_tokens` cut it."""

    def advantages(self, rewards: Sequence[float]) -> list[float]:
        """Advantages of one group's completions from their shaped rewards."""

    def loss_mask(self, length: int, truncated: bool) -> bool:
        """Whether a completion's tokens are trained on."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the mini-batch's loss."""


def objective_checks(algorithm: Any) -> dict[str, tuple[bool, str]]:
    """For `check_fields`: what the fields that GRPO and DAPO share must be."""
    return {
        "ratio_clip_low": (0 < algorithm.ratio_clip_low <= 1, "in (0, 1]"),
        "ratio_clip_high": (algorithm.ratio_clip_high > 0, "above 0"),
        "dual_clip": (algorithm.dual_clip is None or algorithm.dual_clip > 1, "above 1, or None"),
        "loss_aggregation": one_of(algorithm.loss_aggregation, losses.LossAggregation),
        "constant_length": (algorithm.constant_length >= 1, "at least 1 token"),
        "importance_correction": one_of(algorithm.importance_correction, losses.ImportanceCorrection),
        "importance_cap": (algorithm.importance_cap > 0, "above 0"),
        "num_epochs": (algorithm.num_epochs >= 1, "at least 1"),
    }


def one_of(value: str, choices: Any) -> tuple[bool, str]:
    """A check that `value` is one of a Literal's."""
    return value in get_args(choices), "one of " + ", ".join(get_args(choices))


def check_fields(algorithm: object, checks: dict[str, tuple[bool, str]]) -> None:
    """Raises ValueError naming the field, its value and what it must be, for the first check that fails."""
    for name, (holds, requirement) in checks.items():
        if not holds:
            value = getattr(algorithm, name)
            raise ValueError(f"{type(algorithm).__name__}.{name}={value!r}: must be {requirement}")
