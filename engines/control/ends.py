"""What the two ends of a control connection return to their callers. Torch-free."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message of a peer."""

    peer: str
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A peer has joined: messages can be sent to it."""

    peer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A peer is gone for good; a process that comes back under its name joins as a new peer."""

    peer: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Woken:
    """`Server.wake` was called, so that whoever awaits a notice looks at what else has come."""


Notice = Received | Joined | Lost | Woken


class Inbox(Generic[Item]):
    """Received items, in order. An exception ends it: from then on, every `get` raises that exception."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()
        self._end: Exception | None = None
        self.put = self._queue.put

    def get(self, timeout_s: float) -> Item | None:
        if self._end is None:
            try:
                item = self._queue.get(timeout=max(0.0, timeout_s))
            except queue.Empty:
                return None
            if not isinstance(item, Exception):
                return item
            self._end = item
        raise type(self._end)(*self._end.args)
