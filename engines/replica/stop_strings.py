"""Finds the first stop string in a text that grows token by token. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engines.sequence import Detokenize, SamplingParams

_HALF = "\ufffd"
_SLACK = 8
"""Characters at the beginning of a tail that may differ from the whole text's: a leading space is dropped."""
_MOST_HALVES = 8
"""Steps after which bytes without a character count as invalid: a character has at most four bytes."""


def find_stop(text: str, stops: Items[str], free: int = 0) -> int:
    """Returns the index where the first stop string begins that ends behind `free` characters, -1 without one.

    U+FFFD at the text's end is ignored: it may be half a character, and become another one with the next token.
    """
    text = text.rstrip(_HALF)
    places = (text.find(stop, max(0, free + 1 - len(stop))) for stop in stops)
    return min((place for place in places if place >= 0), default=-1)


def cut_at_stop(text: str, params: SamplingParams, free: str) -> tuple[str, str | None]:
    """Returns the text, cut at the stop string that ended it, and that string; `free`: the text of the first
    `min_tokens` tokens."""
    num_free = len(free.rstrip(_HALF))
    place = find_stop(text, params.stop, num_free)
    if place < 0:
        return text, None
    found = (stop for stop in params.stop if text.startswith(stop, place) and place + len(stop) > num_free)
    stop = min(found, key=len)
    return text[: place + len(stop) if params.include_stop_str_in_output else place], stop


class StopSearch:
    """Decides after each token of a sequence whether `find_stop` finds a stop string in all of the generated text.

    Each time only a tail is decoded. It begins at least `_reach` characters before the newest token, however many
    tokens those are, and at the end of a whole character: a decoder may drop a run of bytes that begins within one. A
    match in the tail is checked in the whole text, so that both always agree.
    """

    def __init__(self, stops: Items[str], detokenize: Detokenize, generated: Items[int], *, num_free: int = 0) -> None:
        """`generated`: tokens that were generated before. A stop string counts if it ends behind the text of the first
        `num_free` tokens."""
        self._num_free = num_free
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
            generated = tokens[num_prompt_tokens:]
            free = len(self._detokenize(generated[: self._num_free]).rstrip(_HALF)) if self._num_free else 0
            if find_stop(self._detokenize(generated), self._stops, free) >= 0:
                return True
        self._num_halves = self._num_halves + 1 if text.endswith(_HALF) else 0
        if not self._num_halves and text == self._text and (text or not self._detokenize([tokens[-1]] * 2)):
            self._tail.pop()  # a special token: it adds no text, and is not a leading space, which would be dropped
        elif not 0 < self._num_halves < _MOST_HALVES and len(text) - self._mark[1] >= self._reach:
            del self._tail[: self._mark[0]]
            text = self._detokenize(self._tail)
            self._mark = len(self._tail), len(text)
        self._text = text
        return False
