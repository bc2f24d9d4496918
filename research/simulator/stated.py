"""Drafts whose guesses are right as often as is stated, at the cost of a small model: for paced and simulated runs.
Torch-free."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from engines.sequence import SequenceId, SequenceKey, SequenceState
from engines.speculation.drafter import Ask, Draft, DraftPass, News
from engines.speculation.verify import num_accepted
from research.simulator.runner import token_of

TokenOf = Callable[[SequenceState, int], int]
"""State, position -> the token that the sequence has, or will have, there; past its end, any."""
Acceptance = Callable[[SequenceKey, int], float]
"""Sequence, tokens that it has generated -> the probability that a guess of the next one is right."""
_ESTIMATE = 0.5
"""Of each guess, whatever its chance: policies learn from outcomes alone."""


def simulated_token(state: SequenceState, position: int) -> int:
    """The `TokenOf` of the simulator, where all that a sequence generates is one token."""
    return token_of(state.key)


@dataclass
class _Copy:
    """What the small model has of a sequence."""

    num_known: int
    """Tokens that are known to be drawn; the guesses come behind them."""
    num_computed: int = 0
    """Tokens, guesses included, of which its KV is known."""
    guesses: list[int] = field(default_factory=list)
    is_right: bool = True
    """Whether no guess is wrong."""

    @property
    def length(self) -> int:
        return self.num_known + len(self.guesses)

    def follow(self, tokens: list[int]) -> None:
        """Takes the tokens that were drawn since. Guesses behind those that they confirm stay."""
        drawn = tokens[self.num_known :]
        count = num_accepted(self.guesses, drawn)
        if count < len(drawn):
            self.num_computed = min(self.num_computed, self.num_known + count)
            self.guesses, self.is_right = [], True
        del self.guesses[: len(drawn)]
        self.num_known = len(tokens)


class StatedDrafter:
    """A `Drafter` that costs what a small model does, and guesses right with a stated probability.

    Whether the guess at a place is right is a function of the seed, the sequence and the place. What follows a wrong
    guess is wrong. It computes each token once, as `ModelDrafter` does: guesses that were made before and still hold
    cost nothing, and a further token of all sequences is one pass.
    """

    def __init__(self, token_of: TokenOf, acceptance: Acceptance, *, seed: int = 0) -> None:
        """Draft models with seeds of their own are right at other places."""
        self._token_of, self._acceptance, self._seed = token_of, acceptance, seed
        self._copies: dict[SequenceId, _Copy] = {}
        self.passes: list[DraftPass] = []

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes = []
        copies = [self._follow(ask.state) for ask in asks]
        wanting = [pair for pair in zip(asks, copies, strict=True) if len(pair[1].guesses) < pair[0].limit]
        while wanting:
            num_rows = sum(copy.length - copy.num_computed for _, copy in wanting)
            self.passes.append(DraftPass(num_rows, sum(copy.length for _, copy in wanting)))
            for ask, copy in wanting:
                copy.num_computed = copy.length
                self._guess(ask.state, copy)
            wanting = [pair for pair in wanting if len(pair[1].guesses) < pair[0].limit]
        return [self._draft(copy, ask.limit) for ask, copy in zip(asks, copies, strict=True)]

    def _follow(self, state: SequenceState) -> _Copy:
        copy = self._copies.get(state.sequence_id)
        if copy is None or len(state.tokens) < copy.num_known:
            copy = self._copies[state.sequence_id] = _Copy(len(state.tokens))
        copy.follow(state.tokens)
        return copy

    def _guess(self, state: SequenceState, copy: _Copy) -> None:
        position = copy.length
        if copy.is_right:
            chance = self._acceptance(state.key, position - state.num_prompt_tokens)
            copy.is_right = _number(self._seed, state.key, position) < chance
        token = self._token_of(state, position)
        copy.guesses.append(token if copy.is_right else token - 1 if token else 1)

    @staticmethod
    def _draft(copy: _Copy, limit: int) -> Draft:
        tokens = copy.guesses[:limit]
        return Draft(tokens, [_ESTIMATE ** (place + 1) for place in range(len(tokens))], start=copy.num_known)

    def follow(self, news: News) -> None:
        for state in news.ended:
            self._copies.pop(state.sequence_id, None)


def _number(seed: int, key: SequenceKey, position: int) -> float:
    """Returns a number in [0, 1)."""
    name = struct.pack("<5q", seed, key.policy_step, key.prompt_uid, key.sample_index, position)
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little") / 2**48
