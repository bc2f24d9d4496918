"""Drafting windows: how far a drafter on other ranks runs ahead of its verifier (SpecActor §4.1). Torch-free.

Two state machines for one sequence, without a clock or a connection: `Guesses` is the drafter's, `Heard` the
verifier's. The drafter says all of its present guesses in each message, and the verifier all that the drafter may lack,
so that a late, doubled, reordered or lost message is made up for by the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from engines.speculation.drafter import Draft
from engines.speculation.verify import num_accepted


@dataclass
class Guesses:
    """What a drafter has guessed behind the tokens that it knows to be drawn."""

    num_known: int
    """Tokens of the sequence, prompt included, that the drafter knows to be drawn."""
    window: int
    """w; 0: nothing is drafted."""
    ahead: bool
    """Whether the next window is drafted while one is verified: then at most 2 w guesses are not verified, else w."""
    tokens: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of each guess: its probability, given the tokens before it."""
    most: int = 0
    """Guesses that were allowed at most since the first of the present ones was drafted."""

    @property
    def room(self) -> int:
        """Guesses that may be added now."""
        return max(0, (1 + self.ahead) * self.window - len(self.tokens))

    def add(self, tokens: Items[int], shares: Items[float]) -> None:
        assert len(tokens) <= self.room
        self.most = max(self.most, (1 + self.ahead) * self.window)
        self.tokens += tokens
        self.shares += shares

    def commit(self, drawn: Items[int]) -> int:
        """Takes the tokens that the verifier has drawn next. Returns the guesses that were in vain: those behind the
        first wrong one, of which there are at most 2 w - 1."""
        self.num_known += len(drawn)
        count = num_accepted(self.tokens, drawn)
        if count == len(drawn):
            del self.tokens[:count], self.shares[:count]
            return 0
        wasted = max(0, len(self.tokens) - count - 1)
        assert wasted <= max(0, self.most - 1)
        self.tokens, self.shares, self.most = [], [], 0
        return wasted


@dataclass
class Heard:
    """What a verifier has heard of its drafter about one sequence."""

    num_known: int = 0
    """Tokens of the sequence that the drafter knew."""
    tokens: Items[int] = ()
    """Its guesses behind them."""
    shares: Items[float] = ()
    is_all: bool = False
    """Whether no more follow before something is drawn."""

    def hear(self, num_known: int, tokens: Items[int], shares: Items[float], *, is_all: bool) -> None:
        """Takes the drafter's guesses; an older message than the last one changes nothing."""
        if (num_known, len(tokens), is_all) > (self.num_known, len(self.tokens), self.is_all):
            self.num_known, self.tokens, self.shares, self.is_all = num_known, tokens, shares, is_all

    def is_waiting(self, num_tokens: int) -> bool:
        """Whether the drafter knows all tokens of the sequence, and waits for the verifier."""
        return self.is_all and self.num_known == num_tokens

    def draft(self, tokens: Items[int], limit: int) -> Draft:
        """Returns the guesses behind these tokens, which the sequence has: at most `limit`, and none if one of those
        before them was wrong."""
        num_drawn = len(tokens) - self.num_known
        if num_drawn < 0 or [*self.tokens[:num_drawn]] != [*tokens[self.num_known : self.num_known + len(self.tokens)]]:
            return Draft([], [], start=len(tokens))
        end = num_drawn + limit
        shares = accumulate(self.shares[num_drawn:end], mul)
        return Draft([*self.tokens[num_drawn:end]], [*shares], start=len(tokens))
