"""Finds the first stop string in a text that grows token by token. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engines.sequence import Detokenize

_HALF = "\ufffd"
_SLACK = 8
"""Characters at the beginning of a tail that may differ from the whole text's: a leading space is dropped."""
_MOST_HALVES = 8
"""Steps after which bytes without a character count as invalid: a character has at most four bytes."""


def find_stop(text: str, stops: Items[str]) -> int:
    """Returns the index where the first stop string begins, -1 without one.

    U+FFFD at the text's end is ignored: it may be half a character, and become another one with the next token.
    """
    text = text.rstrip(_HALF)
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=-1)


class StopSearch:
    """Decides after each token of a sequence whether `find_stop` finds a stop string in all of the generated text.

    Each time only a tail is decoded. It begins at least `_reach` characters before the newest token, however many
    tokens those are, and at the end of a whole character: a decoder may drop a run of bytes that begins within one. A
    match in the tail is checked in the whole text, so that both always agree.
    """

    def __init__(self, stops: Items[str], detokenize: Detokenize, generated: Items[int]) -> None:
        """`generated`: tokens that were generated and searched before."""
        self._stops = stops
        self._detokenize = detokenize
        self._reach = max(map(len, stops)) + _SLACK
        self._tail = list(generated)
        self._text = ""
        self._num_halves = 0
        self._mark = 0, 0
        """Tokens and characters of the tail before the place where it may begin next."""

    def hits(self, tokens: Items[int], num_prompt_tokens: int) -> bool:
        """Returns whether a stop string was found. Must be called after each token, with all tokens of the sequence."""
        self._tail.append(tokens[-1])
        text = self._detokenize(self._tail)
        if find_stop(text, self._stops) >= 0:
            return find_stop(self._detokenize(tokens[num_prompt_tokens:]), self._stops) >= 0
        self._num_halves = self._num_halves + 1 if text.endswith(_HALF) else 0
        if not self._num_halves and text == self._text and (text or not self._detokenize([tokens[-1]] * 2)):
            self._tail.pop()  # a special token: it adds no text, and is not a leading space, which would be dropped
        elif not 0 < self._num_halves < _MOST_HALVES and len(text) - self._mark[1] >= self._reach:
            del self._tail[: self._mark[0]]
            text = self._detokenize(self._tail)
            self._mark = len(self._tail), len(text)
        self._text = text
        return False
