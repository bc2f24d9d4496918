"""Drafts of a simulated replica: their tokens are right as often as a table of measured drafts says. Torch-free."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, repeat

import numpy as np

from engines.constraints import Count, Int64, check_fields
from engines.sequence import SequenceKey, SequenceState
from engines.speculation.drafter import Draft
from research.simulator.runner import token_of

SEER_TABLE_2 = {0: 1.70, 1: 2.04, 5: 2.32, 15: 2.53}
"""References -> tokens of a verification step; one path, on the paper's own text."""
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

    def draw(self, key: SequenceKey, position: int) -> float:
        """A number in [0, 1): a function of the seed, the sequence and the position alone."""
        name = struct.pack("<5q", self.seed, key.policy_step, key.prompt_uid, key.sample_index, position)
        return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little") / 2**48


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

    def count(self, state: SequenceState) -> int:
        """Returns the number of sequences of the group that have ended, or are longer than this one."""
        length = len(state.tokens)
        return sum(one > length for one in self._lengths[state.key.policy_step, state.group_id].values())


class SimulatedDrafter:
    """A `Drafter` that knows what is right, and guesses wrong by chance. Its estimates are the true probabilities."""

    def __init__(self, acceptance: DraftAcceptance, references: References) -> None:
        """Drafters that share `references` know the sequences of each other's replicas, as by a draft server."""
        self._acceptance, self._references = acceptance, references

    def propose(self, states: list[SequenceState], limits: list[int], num_tokens: int, num_draws: int) -> list[Draft]:
        for state in states:
            self._references.update(state)
        return [self._draft(state, limit) for state, limit in zip(states, limits, strict=True)]

    def _draft(self, state: SequenceState, limit: int) -> Draft:
        chances = self._acceptance.probabilities
        chance = chances[min(self._references.count(state), len(chances) - 1)]
        paths = list(accumulate(repeat(chance, limit), float.__mul__))
        drawn = self._acceptance.draw(state.key, len(state.tokens))
        num_right = sum(drawn < path for path in paths)
        return Draft([token_of(state.key)] * num_right + [_WRONG] * (limit - num_right), paths)

    def observe(self, states: list[SequenceState], drafts: Items[Items[int]], num_accepted: list[int]) -> None:
        """Nothing is learnt from it."""

    def add_reference(self, state: SequenceState) -> None:
        self._references.update(state)

    def finish(self, state: SequenceState) -> None:
        self._references.update(state)
