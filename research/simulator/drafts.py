"""Drafts of a simulated replica: their tokens are right as often as a table of measured drafts says. Torch-free.

A real drafter estimates a token's chance by a share that it has counted, and is too sure. So is this one: most tokens
are clear, with a share of 1, the others doubtful, with one of 1/2; both are wrong more often than that.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul

import numpy as np

from engines.constraints import Count, Int64, check_fields
from engines.sequence import SequenceKey, SequenceState
from engines.speculation.drafter import Ask, Draft, DraftPass, News
from research.simulator.runner import token_of

SEER_TABLE_2 = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}
"""References -> tokens of a verification step; one path, on the paper's own text."""
CLEAR = 166 / 256
"""Share of the draft tokens that are clear; measured with suffix trees on text: docs/simulator.md."""
SPREAD = 1.5
"""The chance of a clear token is SPREAD p (1 - p) above that of a doubtful one, where p is the mean of all."""
_WRONG = 0  # no sequence generates this token


@dataclass(frozen=True, kw_only=True)
class DraftAcceptance:
    """How often a draft token is drawn, once all before it were, by the number of its sequence's references."""

    table: Mapping[int, float] = field(default_factory=lambda: SEER_TABLE_2)
    """References -> mean tokens of a step with a draft, the one that no guess precedes included."""
    length: Count = 8
    """Tokens of the drafts with which the table was measured."""
    seed: Int64 = 0

    def __post_init__(self) -> None:
        check_fields(self)
        most = 1 + self.length
        if not self.table or min(self.table) < 0 or not all(1 <= tokens <= most for tokens in self.table.values()):
            raise ValueError(
                f"DraftAcceptance.table={dict(self.table)}: give numbers of references, from 0, and for each the "
                f"tokens of a step, from 1 to {most}, one more than length={self.length}"
            )

    @cached_property
    def probabilities(self) -> list[float]:
        """Of a token, by references: interpolated between the table's entries, beyond them as at the nearest one."""
        counts = sorted(self.table)
        known = [_per_token(self.table[count], self.length) for count in counts]
        found: list[float] = np.interp(range(counts[-1] + 1), counts, known).tolist()
        return found

    @cached_property
    def chances(self) -> list[tuple[float, float]]:
        """Those of a doubtful and of a clear token, by references; their means are `probabilities`."""
        spreads = [SPREAD * mean * (1 - mean) for mean in self.probabilities]
        pairs = zip(self.probabilities, spreads, strict=True)
        return [(mean - CLEAR * spread, mean + (1 - CLEAR) * spread) for mean, spread in pairs]

    def draw(self, key: SequenceKey, position: int, num_tokens: int) -> tuple[float, list[bool]]:
        """Returns a number in [0, 1), and which tokens of a draft are clear: a function of the seed, the sequence and
        the position alone."""
        name = struct.pack("<5q", self.seed, key.policy_step, key.prompt_uid, key.sample_index, position)
        digest = hashlib.shake_128(name).digest(6 + num_tokens)
        return int.from_bytes(digest[:6], "little") / 2**48, [byte < 256 * CLEAR for byte in digest[6:]]


def _per_token(tokens: float, length: int) -> float:
    """Returns the p with 1 + p + ... + p^length = `tokens`, by bisection."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high and tokens > 1:
        if sum(middle**place for place in range(length + 1)) < tokens:
            low = middle
        else:
            high = middle
    return high if tokens > 1 else 0.0


class References:
    """How many tokens of each sequence of a group a drafter has seen; of those that have ended, infinitely many."""

    def __init__(self, has_ended: Callable[[SequenceState], bool]) -> None:
        self._has_ended = has_ended
        self._lengths = defaultdict[tuple[int, int], dict[int, float]](dict)

    def update(self, state: SequenceState) -> None:
        length = math.inf if self._has_ended(state) else len(state.tokens)
        self._lengths[state.key.policy_step, state.group_id][state.key.sample_index] = length

    def counts(self, state: SequenceState, num_tokens: int) -> list[int]:
        """Returns for each of the next tokens the number of sequences of the group that have ended, or hold a token at
        its position."""
        first = len(state.tokens)
        leads = [one - first for one in self._lengths[state.key.policy_step, state.group_id].values() if one > first]
        counts = [len(leads)] * num_tokens
        for lead in leads:
            if lead < num_tokens:  # which is rare
                counts[int(lead) :] = [count - 1 for count in counts[int(lead) :]]
        return counts


class SimulatedDrafter:
    """A `Drafter` that knows what is right, and guesses wrong by chance. It estimates chances as a suffix tree does."""

    def __init__(self, acceptance: DraftAcceptance, references: References) -> None:
        """Drafters that share `references` know the sequences of each other's replicas, as by a draft server."""
        self._acceptance, self._references = acceptance, references
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes = (DraftPass(len(asks)),)
        for ask in asks:
            self._references.update(ask.state)
        return [self._draft(ask.state, ask.limit) for ask in asks]

    def _draft(self, state: SequenceState, limit: int) -> Draft:
        drawn, clear = self._acceptance.draw(state.key, len(state.tokens), limit)
        counts, chances = self._references.counts(state, limit), self._acceptance.chances
        most, path, num_right = len(chances) - 1, 1.0, 0
        for count, one in zip(counts, clear, strict=True):
            path *= chances[count if count < most else most][one]
            if drawn >= path:
                break  # paths never become more probable
            num_right += 1
        shares = [1.0 if one else 0.5 for one in clear]
        return Draft([token_of(state.key)] * num_right + [_WRONG] * (limit - num_right), [*accumulate(shares, mul)])

    def follow(self, news: News) -> None:
        for state in news.ended:
            self._references.update(state)
