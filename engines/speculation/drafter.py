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
    start: int | None = None
    """Where the first token would be in the sequence; None: at its end. A draft for another place is dropped: its
    drafter has not heard of the last tokens yet."""
    holds: bool = False
    """Whether the sequence sits out this pass, as its draft is on its way. The draft has no tokens then."""

    def cut(self, length: int, lengths: Items[int] = ()) -> Draft:
        """Returns the first tokens of the draft and of each other path, as many as given; for others, 0 by default."""
        others = [one.cut(count) for one, count in zip(self.others, lengths, strict=False) if count]
        return self._replace(
            tokens=self.tokens[:length], probabilities=self.probabilities[:length], others=tuple(others)
        )


NO_DRAFT = Draft([], [])
HELD = Draft([], [], holds=True)


class Ask(NamedTuple):
    """A sequence that may take a draft in the next pass."""

    state: SequenceState
    """A drafter must not modify it."""
    limit: int
    """Most tokens of each path, at least 1."""
    ahead: bool = True
    """Whether a drafter on other ranks may go on drafting while these tokens are verified (SpecActor §4.1)."""


class Outcome(NamedTuple):
    """What a pass has added to a sequence."""

    state: SequenceState
    draft: Items[int] = ()
    """The first path of its draft, as far as it was in the pass."""
    num_accepted: int = 0
    """Tokens of this path that are now tokens of the sequence."""


class News(NamedTuple):
    """What has happened to the sequences of a replica."""

    drawn: Items[Outcome] = ()
    """All sequences of a pass that drew tokens in it, with a draft or without."""
    ended: Items[SequenceState] = ()
    """Sequences that have left the replica, or whose step has failed. They may come back, and are unknown then."""


class DraftPass(NamedTuple):
    """One pass of a small model, or one lookup."""

    num_rows: int
    """Tokens that it computed; sequences that it looked up."""
    num_context_tokens: int = 0
    """Sum of the sequences' contexts."""


def share_of(state: SequenceState, count: int) -> int:
    """Returns which of `count` drafters always drafts for a sequence."""
    return (state.key.prompt_uid * 1_000_003 + state.key.sample_index) % count


class Drafter(Protocol):
    """Guesses next tokens. A wrong guess costs time, and never changes a token. `NGramDrafter` is one."""

    @property
    def passes(self) -> Items[DraftPass]:
        """What the last `propose` has run on this replica, one after the other; nothing if no draft was looked up."""
        ...

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        """Returns a draft, or none, for each sequence: the tokens that may follow, on each path at most its limit. The
        list is empty if no draft was looked up.

        It is called once per step, for all sequences that may take a draft in this step. Without drafts the pass has
        `num_tokens` tokens and `num_draws` draws, those of the sequences that take no draft included.
        """
        ...

    def follow(self, news: News) -> None:
        """Is called after each pass, and for sequences that leave between two passes."""
        ...
