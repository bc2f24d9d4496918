"""Text that grows with its tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"


class TextStream:
    """Parts of a completion's text, as its tokens come; together they are the text that the completion has.

    A part is kept back while it may still change: bytes that may be half a character, and, with stop strings, as many
    characters as could begin one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._num_held = max((len(stop) - 1 for stop in stops), default=0)
        self._tail: list[int] = []
        """The tokens of the last part that was whole, and those behind it: a decoder may drop a space that is first."""
        self._num_known = 0
        """Tokens of the tail whose text has been taken."""
        self._held = ""
        self._num_given = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Returns what these tokens add for certain."""
        self._tail += tokens
        known, text = self._decode(self._tail[: self._num_known]), self._decode(self._tail)
        if len(text) > len(known) and not text.endswith(_HALF):
            self._held += text[len(known) :]
            del self._tail[: self._num_known]
            self._num_known = len(self._tail)
        num_certain = len(self._held) - self._num_held
        part = self._held[:num_certain] if num_certain > 0 else ""
        self._held = self._held[len(part) :]
        self._num_given += len(part)
        return part

    def end(self, text: str) -> str:
        """Returns the rest of the completion's text."""
        return text[self._num_given :]
