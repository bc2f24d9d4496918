"""Completions of earlier rollouts, so that the first members of a group have something to copy when RL meets its prompt
again: the policy moves slowly. Torch-free.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from engines.decoding import DecodeError, from_msgpack

_TOKEN = np.dtype("<i4")
_ENTRY_BYTES, _COMPLETION_BYTES = 512, 64
"""What Python takes beside the tokens, about."""
NEW = "new"
"""In the place of an age: there was no earlier completion."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What one call of `generate` has made of one prompt."""

    step: int
    """The policy step of the call."""
    prompt: bytes
    """A digest of the prompt's tokens."""
    completions: tuple[bytes, ...]
    """The generated tokens of each sample, as `_TOKEN`."""

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + sum(_COMPLETION_BYTES + len(one) for one in self.completions)

    def tokens(self) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Returns the tokens of each sample."""
        return [np.frombuffer(one, _TOKEN) for one in self.completions]


class DraftHistory:
    """The completions of a run in at most `max_bytes` of memory; the oldest are dropped first.

    `LLM.generate` gives every rank all completions, in the order of the prompts, when all have ended. So all ranks have
    the same history, and drafts do not depend on which replica has generated what, nor on when.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # the oldest first
        self._by_prompt: defaultdict[bytes, list[int]] = defaultdict(list)
        self._next = self.num_bytes = 0
        self.yields = Counter[str]()
        """Of this rank's replica since its start, by `age_of`: "<age>/passes" counts each sequence in each pass that
        draws, "<age>/accepted" the draft tokens that were drawn."""

    def keep(self, prompt: Items[int], step: int, completions: Items[Items[int]]) -> None:
        """Adds the completions of a call of `generate` to a prompt."""
        entry = Entry(step, _digest(prompt), tuple(np.array(one, _TOKEN).tobytes() for one in completions))
        self._add(entry)

    def find(self, prompt: Items[int]) -> list[Entry]:
        """Returns what is kept of a prompt, the newest first."""
        return [self._entries[number] for number in reversed(self._by_prompt.get(_digest(prompt), []))]

    def to_bytes(self) -> bytes:
        """As msgpack: a list of entries, the oldest first."""
        return msgspec.msgpack.encode(list(self._entries.values()))

    def restore(self, data: bytes) -> None:
        """Replaces all entries by those of `to_bytes`. Raises DecodeError for other bytes."""
        entries = from_msgpack(data, list[Entry])
        if any(len(one) % _TOKEN.itemsize for entry in entries for one in entry.completions):
            raise DecodeError("a completion is no whole number of tokens")
        self._entries.clear()
        self._by_prompt.clear()
        self.num_bytes = 0
        for entry in entries:
            self._add(entry)

    def _add(self, entry: Entry) -> None:
        self._entries[self._next] = entry
        self._by_prompt[entry.prompt].append(self._next)
        self._next += 1
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            numbers = self._by_prompt[oldest.prompt]
            del numbers[0]
            if not numbers:
                del self._by_prompt[oldest.prompt]


def age_of(step: int, entries: Items[Entry]) -> str:
    """Returns the class of a group's age at this policy step: "age_4" for 4 to 7 steps since the newest entry."""
    if not entries:
        return NEW
    age = max(0, step - entries[0].step)
    return f"age_{1 << age.bit_length() - 1 if age else 0}"


def tokens_per_step(yields: Mapping[str, int]) -> dict[str, float]:
    """Returns the tokens of a sequence and pass by age, from `DraftHistory.yields`."""
    counts = ((name.removesuffix("/passes"), count) for name, count in yields.items() if name.endswith("/passes"))
    return {age: 1 + yields.get(f"{age}/accepted", 0) / count for age, count in counts if count}


def _digest(prompt: Items[int]) -> bytes:
    return hashlib.blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest()
