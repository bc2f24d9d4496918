"""Drafts by prompt lookup (Saxena, 2023): a sequence goes on as it did after an earlier occurrence of its end."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engines.sequence import SequenceId, SequenceState
from engines.speculation.drafter import Ask, Draft, DraftPass, News


class NGramDrafter:
    """Proposes what followed the latest earlier occurrence of a sequence's last n tokens, for the largest n found.

    What follows may reach the sequence's end. It then repeats, as text with this period does. The work of a step is in
    proportion to the sequence's new tokens and to `max_n`; the memory is one entry per token. Drafts are a function of
    the states alone.
    """

    def __init__(self, max_n: int = 4, min_n: int = 2) -> None:
        assert 1 <= min_n <= max_n
        self._max_n, self._min_n = max_n, min_n
        self._indices: dict[SequenceId, _Index] = {}
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        self.passes = (DraftPass(len(asks)),)
        drafts = [self._propose(ask.state, ask.limit) for ask in asks]
        return [Draft(draft, [1.0] * len(draft)) for draft in drafts]

    def _propose(self, state: SequenceState, limit: int) -> list[int]:
        index = self._indices.get(state.sequence_id)
        if index is None or index.num_tokens >= len(state.tokens):
            index = self._indices[state.sequence_id] = _Index(self._max_n, self._min_n)
        start = index.find(state.tokens)
        if start is None:
            return []
        copied = state.tokens[start : start + limit]
        return (copied * -(-limit // len(copied)))[:limit]

    def follow(self, news: News) -> None:
        for state in news.ended:
            self._indices.pop(state.sequence_id, None)


class _Index:
    """Where n-grams of one sequence occurred last.

    Each place in the sequence has at most one entry: that of the shortest n-gram before it which has not occurred
    later. A later occurrence moves the place on to the n-gram that is one token longer.
    """

    def __init__(self, max_n: int, min_n: int) -> None:
        self._max_n, self._min_n = max_n, min_n
        self._places: dict[tuple[int, ...], int] = {}
        """n-gram -> the number of tokens before its end."""
        self.num_tokens = 0
        """The places of n-grams that end before this token are entered."""

    def find(self, tokens: list[int]) -> int | None:
        """Returns the place after the latest earlier occurrence of the longest n-gram that ends the tokens."""
        for place in range(max(self.num_tokens, 1), len(tokens)):
            self._enter(tokens, place)
        self.num_tokens = end = len(tokens)
        best = 0, 0
        for n in range(self._min_n, min(self._max_n, end) + 1):
            found = self._places.get(tuple(tokens[end - n :]), 0)
            if not found:
                break
            length = n
            while length < min(self._max_n, found) and tokens[found - length - 1] == tokens[end - length - 1]:
                length += 1
            best = max(best, (length, found))
        return best[1] or None

    def _enter(self, tokens: list[int], place: int) -> None:
        for n in range(self._min_n, self._max_n + 1):
            if place < n:
                return  # there is no earlier one, or it has no longer n-gram
            key = tuple(tokens[place - n : place])
            earlier = self._places.get(key, 0)
            self._places[key] = place
            place = earlier
