"""A process's connection to a relay: requests, and messages in pieces. Torch-free."""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from engines.control.transport import Client
from engines.decoding import DecodeError, from_msgpack
from engines.relay.requests import (
    NUM_AHEAD,
    PIECE_BYTES,
    Answer,
    Ask,
    Data,
    Done,
    Entry,
    Put,
    Read,
    Request,
    State,
)

_PROBE_S = 1.0
LinkSeconds = Callable[[int], float]
"""How long bytes take at least on a link that is slower than this machine's."""
A = TypeVar("A")


class RefusedError(ValueError):
    """The relay has refused a request."""


class DroppedError(Exception):
    """A message was dropped while it was read."""


@dataclass(frozen=True)
class Relay:
    """Where a relay is, and what its clients need to reach it. Clients wait `patience_s` seconds for an answer, and
    `timeout_s` for a version that others push."""

    address: str
    """As "tcp://127.0.0.1:40123"."""
    token: bytes = field(repr=False)
    """The run's launch token."""
    patience_s: float = 10.0
    timeout_s: float = 600.0


def listens(address: str) -> bool:
    """Returns at once whether a process listens there, where `RelayClient` would wait for one."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


class RelayClient:
    """One connection, for one thread. After a ConnectionError it is of no use. With `link_seconds`, messages are sent
    no faster than that."""

    def __init__(self, relay: Relay, link_seconds: LinkSeconds | None = None) -> None:
        """Waits until the relay answers. Raises ConnectionError if it does not, ValueError for another token."""
        self._relay, self._link_seconds = relay, link_seconds
        patience_s = relay.patience_s
        self._client = Client(
            f"weights-{secrets.token_hex(8)}",
            relay.address,
            relay.token,
            interval_s=min(1.0, patience_s / 5),
            patience_s=patience_s,
        )
        self._free_at = 0.0
        self._due: deque[Callable[[], None] | None] = deque()
        """For each piece that was sent and not answered: what to call then."""

    @property
    def num_bytes_sent(self) -> int:
        """All bytes of frames that were given to the socket."""
        return self._client.num_bytes_sent

    @property
    def num_bytes_received(self) -> int:
        return self._client.num_bytes_received

    @property
    def is_lost(self) -> bool:
        return self._client.is_lost

    def ask(self, request: Request, kind: type[A], *, timeout_s: float | None = None) -> A:
        """Returns the answer. Raises RefusedError if the relay refuses; ConnectionError, with what the relay waits for,
        if it does not answer."""
        self.drain()
        self._client.send(msgspec.msgpack.encode(request))
        return self._receive(kind, request, timeout_s)

    def state(self) -> State:
        return self.ask(Ask(), State)

    def put(self, session: str, message: bytes, on_done: Callable[[], None]) -> None:
        """Sends a message; calls `on_done` once the relay has it, at the latest in `drain`. Raises RefusedError, which
        may be for a message that was sent before."""
        for start in range(0, len(message), PIECE_BYTES):
            piece = message[start : start + PIECE_BYTES]
            while len(self._due) >= NUM_AHEAD:
                self._take_answer()
            self._client.send(msgspec.msgpack.encode(Put(session, start, len(message), piece)))
            self._due.append(on_done if start + len(piece) == len(message) else None)
            self._wait_for_link(len(piece))

    def drain(self) -> None:
        """Waits until all that was put is answered."""
        while self._due:
            self._take_answer()

    def read(self, session: str, entries: Items[Entry]) -> Iterator[bytearray]:
        """Yields these messages, in order. Raises DroppedError if one is not there any more."""
        self.drain()
        asks = (
            Read(session, one.start, one.length, one.number, first, min(PIECE_BYTES, one.num_bytes - first))
            for one in entries
            for first in range(0, one.num_bytes, PIECE_BYTES)
        )
        due: deque[Read] = deque()
        for one in entries:
            message = bytearray(one.num_bytes)
            for first in range(0, one.num_bytes, PIECE_BYTES):
                while len(due) < NUM_AHEAD and (ask := next(asks, None)) is not None:
                    self._client.send(msgspec.msgpack.encode(ask))
                    due.append(ask)
                ask = due.popleft()
                data = self._receive(Data, ask, None).data
                if len(data) != ask.count:
                    raise DroppedError
                message[first : first + ask.count] = data
            yield message

    def _take_answer(self) -> None:
        on_done = self._due.popleft()
        self._receive(Done, Put, None)
        if on_done is not None:
            on_done()

    def _receive(self, kind: type[A], request: object, timeout_s: float | None) -> A:
        limit = self._relay.patience_s if timeout_s is None else timeout_s
        data = self._client.receive(limit)
        what = type(request).__name__ if not isinstance(request, type) else request.__name__
        if data is None:
            raise ConnectionError(f"relay {self._relay.address}: no answer to {what} for {limit:g} s")
        try:
            answer: Answer = from_msgpack(data, Answer)
        except DecodeError as error:
            raise ConnectionError(f"relay {self._relay.address}: {what}: {error}") from None
        if isinstance(answer, Done) and answer.problem:
            raise RefusedError(f"relay {self._relay.address}: {answer.problem}")
        if not isinstance(answer, kind):
            raise ConnectionError(f"relay {self._relay.address}: {what}: answered with {type(answer).__name__}")
        return answer

    def _wait_for_link(self, num_bytes: int) -> None:
        if self._link_seconds is None:
            return
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + self._link_seconds(num_bytes)
        time.sleep(self._free_at - now)

    def close(self) -> None:
        self._client.close()
