"""The interface of an RL algorithm that the run and the trainer use. Algorithms are frozen dataclasses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from algos.experience import LossInputs, LossOutput


class Algorithm(Protocol):
    """Turns rewards of completions into advantages, and advantages into a loss. All methods are pure.

    A step calls, in this order: `keep_group` on raw rewards, `shape_rewards`, `advantages`, `loss_mask`, `loss`. An
    algorithm has `advantages` and `loss`; the other members are here as most algorithms have them.
    """

    @property
    def num_epochs(self) -> int:
        """Passes over a rollout's experiences."""
        return 1

    @property
    def max_sampling_rounds(self) -> int:
        """Most rollouts per step; a step stops sampling when it has kept enough groups. 1 if every group is kept."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Whether `LossInputs.ref_logprobs_BT` must be given."""
        return False

    def keep_group(self, rewards: Sequence[float]) -> bool:
        """Whether to train on a group, given its raw rewards."""
        return True

    def shape_rewards(
        self, rewards: Sequence[float], lengths: Sequence[int], truncated: Sequence[bool], max_tokens: int
    ) -> list[float]:
        """Rewards to train on, given each completion's length in tokens and whether it was cut off at `max_tokens`."""
        return list(rewards)

    @abstractmethod
    def advantages(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Advantages of each group's completions from their shaped rewards; `groups` are all those of a step."""

    def loss_mask(self, length: int, truncated: bool) -> bool:
        """Whether to train on the tokens of a completion of `length` tokens."""
        return True

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the mini-batch's loss."""
