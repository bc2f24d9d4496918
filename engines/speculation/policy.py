"""How many of its proposed tokens each sequence tries: the protocol of the decision, and a drafter that obeys it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import NO_DRAFT, Ask, Draft, Drafter, DraftPass, News

RowSeconds = Callable[[int], float]
"""Number of tokens, one row each -> seconds of a forward pass over them, with a draw at each."""
DraftSeconds = Callable[[int, int], float]
"""Number of sequences, tokens of the longest draft -> seconds in which the replica drafts them before a pass."""


def _free(num_sequences: int, length: int) -> float:
    return 0.0


def elsewhere(num_sequences: int, length: int) -> float:
    """The `DraftSeconds` of a replica for which other ranks draft."""
    return 0.0


class Prices(NamedTuple):
    """What drafts cost a replica."""

    verify: RowSeconds
    draft: DraftSeconds = _free


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

    def wants(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Ask]:
        """Returns those of the sequences, in this order, for which a draft is worth looking up, and how; their limits
        may be lower. See `Drafter.propose`."""
        ...

    def shorten(self, states: list[SequenceState], drafts: list[Draft], num_tokens: int, num_draws: int) -> list[Draft]:
        """Returns what of each sequence's draft joins a pass (`Draft.cut`) that without drafts has `num_tokens` tokens
        and yields the next token of `num_draws` sequences: of these, and of others that may take none."""
        ...

    def observe(self, state: SequenceState, probabilities: list[float], num_accepted: int) -> None:
        """Learns from one path: its tokens' estimated probabilities, as in `Draft`, and how many were drawn."""
        ...


DraftPolicy = Callable[[Prices], SpeculationPolicy]
"""Makes the policy of a replica, as a class that takes `Prices` does."""


class AdaptedDrafter:
    """A drafter whose drafts a policy shortens."""

    def __init__(self, drafter: Drafter, policy: SpeculationPolicy) -> None:
        self._drafter = drafter
        self._policy = policy
        self._proposed: dict[SequenceId, list[float]] = {}
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes, self._proposed = (), {}
        wanted = self._policy.wants(asks, num_tokens, num_draws)
        if not wanted:
            return []
        drafts = self._drafter.propose(wanted, num_tokens, num_draws)
        self.passes = self._drafter.passes
        states = [ask.state for ask in wanted]
        self._proposed = {
            state.sequence_id: draft.probabilities for state, draft in zip(states, drafts, strict=True) if draft.tokens
        }
        shortened = self._policy.shorten(states, drafts, num_tokens, num_draws)
        if len(wanted) == len(asks):
            return shortened
        found = {state.sequence_id: draft for state, draft in zip(states, shortened, strict=True)}
        return [found.get(ask.state.sequence_id, NO_DRAFT) for ask in asks]

    def follow(self, news: News) -> None:
        self._drafter.follow(news)
        for state, draft, num_accepted in news.drawn:
            if draft:
                self._policy.observe(state, self._proposed[state.sequence_id][: len(draft)], num_accepted)
