"""Text that grows with its tokens. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_HALF = "\ufffd"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


def byte_test(tokenizer: Any) -> Callable[[int], bool]:
    """Returns a function that says whether a token is one byte, as `<0x0A>` is in Llama 2's vocabulary."""
    return lambda token: bool(_BYTE.fullmatch(tokenizer.convert_ids_to_tokens(token) or ""))


class TextStream:
    """Parts of a completion's text, as its tokens come; together they are the text that the completion has.

    A part is kept back while it may still change: bytes that may be half a character, tokens of one byte each until
    another token follows, and, with stop strings, as many characters as could begin one.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        is_byte: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`is_byte`: see `byte_test`."""
        self._decode, self._is_byte = decode, is_byte
        self._num_held = max((len(stop) - 1 for stop in stops), default=0)
        self._tail: list[int] = []
        """The tokens of the last part that was whole, and those behind it: a decoder may drop a space that is first."""
        self._num_known = 0
        """Tokens of the tail whose text has been taken."""
        self._num_bytes = 0
        """Tokens at the tail's end that are one byte each, or have no text: if they are no UTF-8, all become U+FFFD."""
        self._held = ""
        self._num_given = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Returns what these tokens add for certain."""
        for token in tokens:
            goes_on = self._is_byte(token) or (self._num_bytes and not self._decode([token]))
            self._num_bytes = self._num_bytes + 1 if goes_on else 0
        self._tail += tokens
        end = len(self._tail) - self._num_bytes
        if end > self._num_known:
            known, text = self._decode(self._tail[: self._num_known]), self._decode(self._tail[:end])
            if len(text) > len(known) and not text.endswith(_HALF):
                self._held += text[len(known) :]
                del self._tail[: self._num_known]
                self._num_known = end - self._num_known
        num_certain = len(self._held) - self._num_held
        part = self._held[:num_certain] if num_certain > 0 else ""
        self._held = self._held[len(part) :]
        self._num_given += len(part)
        return part

    def end(self, text: str) -> str:
        """Returns the rest of the completion's text."""
        return text[self._num_given :]
