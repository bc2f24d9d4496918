"""What the run and the trainer ask of an RL algorithm. GRPO and DAPO answer it with plain frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
