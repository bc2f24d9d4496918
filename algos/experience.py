"""Data that goes from rollout to trainer: experiences with per-token values, and the inputs and outputs of a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One sequence to train on. Per-token lists align with the completion, `tokens[num_prompt_tokens:]`."""

    tokens: list[int]
    num_prompt_tokens: int
    rollout_logprobs: list[float]
    loss_mask: list[bool]
    """False for tokens that must not be trained on (a tool's output, an overlong completion)."""
    advantage: float

    def __post_init__(self) -> None:
        assert 1 <= self.num_prompt_tokens <= len(self.tokens)
        assert len(self.rollout_logprobs) == len(self.loss_mask) == self.num_completion_tokens

    @property
    def num_completion_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """One micro-batch, shape suffix _BT: B sequences, T positions; position t predicts token t + 1.

    Prompt and padding positions hold zeros and a False `loss_mask_BT`.
    """

    logprobs_BT: Tensor
    """Log-probs under the policy being trained; they carry the gradient."""
    trainer_logprobs_BT: Tensor
    """Log-probs under the policy before this rollout's first update, as the trainer computes them. Detached."""
    rollout_logprobs_BT: Tensor
    """Log-probs under the policy that sampled the tokens, as the rollout engine computed them."""
    ref_logprobs_BT: Tensor | None
    """Log-probs under the frozen reference model; None when the KL term is off."""
    entropy_BT: Tensor
    """Entropy of the policy at the sampling temperature, in nats; carries the gradient."""
    advantages_BT: Tensor
    loss_mask_BT: Tensor
    num_tokens: int
    """Unmasked tokens of the whole mini-batch over all ranks: the divisor of token-mean."""
    num_sequences: int
    """Sequences with an unmasked token in the whole mini-batch over all ranks: the divisor of sequence-mean."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """`loss` is this micro-batch's share: over micro-batches and ranks the shares *sum* to the mini-batch's loss."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """Detached shares under verl's names; like the loss shares, they sum to the mini-batch's value."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Detached metrics whose mini-batch value is the maximum over micro-batches and ranks."""
