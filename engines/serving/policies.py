"""What a serving process that lends memory and time asks: may the rollout step now, and how many pages may it have?
Torch-free.

A policy has no clock; what it sees carries `now`, in seconds of any clock that all of it is by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class QueuedRequest:
    """A sequence of a serving request that has no token yet."""

    arrived: float
    num_tokens: int
    """Tokens that must still be computed before its first token is drawn."""


@dataclass(frozen=True, kw_only=True)
class ServingView:
    """The serving model's sequences between two steps."""

    now: float
    queued: tuple[QueuedRequest, ...]
    """In the order of their arrival."""
    last_token_times: tuple[float, ...]
    """Of the sequences that decode: when each got its last token."""
    num_context_tokens: int
    """Tokens of the sequences that decode, in all."""
    busy_at: float
    """When the serving model had work last: `now` while it has some; -inf before the first request."""
    delayed_s: float
    """Since the beginning, the seconds in which the serving model had work, and no step of it ran. While it is alone
    these are the gaps between its steps."""
    delayed_before_s: float
    """`delayed_s` before the step in which the first of the queue came; without a queue, as it is now."""


class AdmissionPolicy(Protocol):
    """Decides when the rollout's model may step beside the serving model."""

    def admits(self, view: ServingView, seconds: float) -> bool:
        """Returns whether a step of the rollout that takes `seconds` may run now. Called before each of its steps."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemoryView:
    """The pages of a pool, which the serving model and a rollout's model share."""

    now: float
    num_pages: int
    num_serving: int
    """Pages that hold KV of the serving model's running sequences."""
    num_rollout: int
    """Pages that the rollout holds."""
    budget: int
    """Pages that the rollout may hold."""


class MemoryPolicy(Protocol):
    """Decides how many pages of the serving model's memory a rollout may hold."""

    def observe(self, view: MemoryView) -> None:
        """Called after each step of either model."""
        ...

    def begin(self, view: MemoryView) -> int:
        """Returns the budget of a phase of rollouts that begins now, in pages."""
        ...

    def cut(self, view: MemoryView) -> int | None:
        """Returns a lower budget, to which the rollout is cut at once; None to leave it. Called before each step."""
        ...

    def headroom(self, view: MemoryView) -> int:
        """Returns the pages that must stay available to the serving model when the rollout takes more."""
        ...
