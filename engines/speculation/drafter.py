"""What a replica asks of a drafter: guesses of the next tokens of its sequences. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from engines.sequence import SequenceState


class Draft(NamedTuple):
    """Guessed tokens."""

    tokens: list[int]
    probabilities: list[float]
    """For each token the drafter's estimate that it and all before it will be drawn; not increasing."""
    others: tuple[Draft, ...] = ()
    """Other paths from the same place, less likely ones, which may begin with the same tokens; they have no others."""

    def cut(self, length: int, lengths: Items[int] = ()) -> Draft:
        """Returns the first tokens of the draft and of each other path, as many as given; for others, 0 by default."""
        others = [one.cut(count) for one, count in zip(self.others, lengths, strict=False) if count]
        return Draft(self.tokens[:length], self.probabilities[:length], tuple(others))


NO_DRAFT = Draft([], [])


class Drafter(Protocol):
    """Guesses next tokens. A wrong guess costs time, and never changes a token.

    A drafter learns of new tokens by reading the states. It must not modify them. `NGramDrafter` is one.
    """

    def propose(self, states: list[SequenceState], limits: list[int], num_tokens: int, num_draws: int) -> list[Draft]:
        """Returns a draft for each sequence: the tokens that may follow, on each path at most its limit, or none. The
        list is empty if no draft was looked up.

        It is called once per step, for all sequences that may take a draft in this step; limits are at least 1.
        Without drafts the pass has `num_tokens` tokens and `num_draws` draws, those of the sequences that take no draft
        included.
        """
        ...

    def observe(self, states: list[SequenceState], drafts: Items[Items[int]], num_accepted: list[int]) -> None:
        """Is called after the pass for the sequences that had a draft in it.

        A draft, of whose paths only the first is given, may be shorter than the proposed one. Its first `num_accepted`
        tokens are now tokens of the sequence.
        """
        ...

    def finish(self, state: SequenceState) -> None:
        """Forgets a sequence that leaves the replica, or whose step has failed. It may come back, and be unknown."""
        ...
