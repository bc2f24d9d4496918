"""The two ends of a control connection as their callers see them, and a pair of them inside one process. Torch-free."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """A message of a peer."""

    peer: str
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """A peer is there, and can be sent to."""

    peer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A peer is gone for good: a process that comes back under its name joins anew."""

    peer: str
    reason: str


Notice = Received | Joined | Lost


class ServerEnd(Protocol):
    """The coordinator's end. For one thread; `peers` and `send` know what `receive` has returned so far."""

    def receive(self, timeout_s: float) -> Notice | None:
        """The next notice, in order per peer; None when there was none in `timeout_s` seconds."""
        ...

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a message of any length. Raises ConnectionError for a peer that has not joined or has left, by name.
        A peer lost before it read the message shows as a later `Lost`."""
        ...

    def peers(self) -> list[str]: ...

    def close(self, reason: str = "the coordinator has closed") -> None:
        """Says goodbye, and why. May be called twice. What has not left in half a second is lost."""
        ...


class ClientEnd(Protocol):
    """A process's end. Messages sent before the coordinator was lost may not have arrived."""

    name: str

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; None when there was none in `timeout_s` seconds. Raises ConnectionError, after all
        messages that came before, when the coordinator is gone or has dropped this client."""
        ...

    def send(self, payload: bytes) -> None:
        """Queues a message of any length. Raises ConnectionError as `receive` does."""
        ...

    def close(self) -> None:
        """Says goodbye. May be called twice. What has not left in half a second is lost."""
        ...


class Inbox(Generic[Item]):
    """What has come, in order. An exception in it is the end, and every `get` from then on raises it."""

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


class Roster:
    """The peers and their sessions, as the notices tell that the caller has received."""

    def __init__(self) -> None:
        self.here: dict[str, bytes] = {}
        self._left: dict[str, str] = {}

    def note(self, notice: Notice, session: bytes) -> Notice:
        if isinstance(notice, Joined):
            self.here[notice.peer] = session
        elif isinstance(notice, Lost):
            del self.here[notice.peer]
            self._left[notice.peer] = notice.reason
        return notice

    def session(self, peer: str) -> bytes:
        if peer not in self.here:
            what = f"has left ({self._left[peer]})" if peer in self._left else "never joined"
            here = ", ".join(self.here) or "nobody"
            raise ConnectionError(f"peer: {peer!r} {what}; here: {here}; send after its Joined and before its Lost")
        return self.here[peer]


class _MemoryServer:
    """One end of `memory_pair`."""

    def __init__(self, client: _MemoryClient) -> None:
        self._client = client
        self._roster = Roster()
        self._is_open = True

    def receive(self, timeout_s: float) -> Notice | None:
        notice = self._client.outbox.get(timeout_s)
        return self._roster.note(notice, b"") if notice is not None else None

    def send(self, peer: str, payload: bytes) -> None:
        if not self._is_open:
            raise ConnectionError("the control connections in memory are closed")
        self._roster.session(peer)
        self._client.inbox.put(payload)

    def peers(self) -> list[str]:
        return list(self._roster.here)

    def close(self, reason: str = "the coordinator has closed") -> None:
        self._is_open = False
        self._client.outbox.put(ConnectionError("the control connections in memory are closed"))
        self._client.finish(reason)


class _MemoryClient:
    """The other end of `memory_pair`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox: Inbox[bytes] = Inbox()
        self.outbox: Inbox[Notice] = Inbox()
        self.outbox.put(Joined(peer=name))
        self._end = ""

    def receive(self, timeout_s: float) -> bytes | None:
        return self.inbox.get(timeout_s)

    def send(self, payload: bytes) -> None:
        if self._end:
            raise ConnectionError(self._end)
        self.outbox.put(Received(peer=self.name, payload=payload))

    def close(self) -> None:
        if not self._end:
            self.outbox.put(Lost(peer=self.name, reason="it left"))
            self.finish(f"{self.name!r} has closed its connection")

    def finish(self, end: str) -> None:
        if not self._end:
            self._end = end
            self.inbox.put(ConnectionError(end))


def memory_pair(name: str = "rank-0") -> tuple[ServerEnd, ClientEnd]:
    """Both ends inside one process, where the client `name` has joined: no sockets, threads or clocks."""
    client = _MemoryClient(name)
    return _MemoryServer(client), client
