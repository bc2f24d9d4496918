"""How many of its proposed tokens each sequence tries: the protocol of the decision, and a drafter that obeys it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import Draft, Drafter

RowSeconds = Callable[[int], float]
"""Number of tokens, one row each -> seconds of a forward pass over them, with a draw at each."""


class RowTable:
    """The seconds of passes by their rows, each computed once; more rows never take less time."""

    def __init__(self, seconds: RowSeconds) -> None:
        self._compute = seconds
        self._seconds = np.zeros(1)

    def upto(self, rows: int) -> NDArray[np.float64]:
        """Returns the first `rows` + 1 entries, or more; entry i is of i rows."""
        known = len(self._seconds)
        if known <= rows:
            new = [self._compute(count) for count in range(known, rows + 1)]
            self._seconds = np.maximum.accumulate(np.concatenate([self._seconds, new]))
        return self._seconds


class SpeculationPolicy(Protocol):
    """Decides how many tokens and paths drafts have. It has no clock; all shards of a replica must decide alike."""

    def wants(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether drafts of `num_sequences` sequences are worth looking up for a pass of `num_tokens` tokens."""
        ...

    def shorten(self, num_tokens: int, num_draws: int, drafts: list[Draft]) -> list[Draft]:
        """Returns what of each draft joins a pass (`Draft.cut`) that without them has `num_tokens` tokens, and yields
        the next token of `num_draws` sequences: of those with a draft, and of others that may take none."""
        ...

    def observe(self, probabilities: list[float], num_accepted: int) -> None:
        """Learns from one path: its tokens' estimated probabilities, as in `Draft`, and how many were drawn."""
        ...


DraftPolicy = Callable[[RowSeconds], SpeculationPolicy]
"""Makes the policy of a replica, as a class that takes `RowSeconds` does."""


class AdaptedDrafter:
    """A drafter whose drafts a policy shortens."""

    def __init__(self, drafter: Drafter, policy: SpeculationPolicy) -> None:
        self._drafter = drafter
        self._policy = policy
        self._proposed: dict[SequenceId, list[float]] = {}

    def propose(self, states: list[SequenceState], limits: list[int], num_tokens: int, num_draws: int) -> list[Draft]:
        if not self._policy.wants(num_tokens, len(states)):
            return []
        drafts = self._drafter.propose(states, limits, num_tokens, num_draws)
        self._proposed = {
            state.sequence_id: draft.probabilities for state, draft in zip(states, drafts, strict=True) if draft.tokens
        }
        return self._policy.shorten(num_tokens, num_draws, drafts)

    def observe(self, states: list[SequenceState], drafts: Items[Items[int]], num_accepted: list[int]) -> None:
        self._drafter.observe(states, drafts, num_accepted)
        for state, draft, count in zip(states, drafts, num_accepted, strict=True):
            self._policy.observe(self._proposed[state.sequence_id][: len(draft)], count)

    def finish(self, state: SequenceState) -> None:
        self._drafter.finish(state)
