"""The process of a relay, `python -m engines.relay.server`; `RelayProcess` starts it. Torch-free.

All requests are answered in their order by one thread, so that `RelayStore` needs no locks.
"""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec

from engines.control.ends import Lost, Received
from engines.control.transport import Server
from engines.decoding import DecodeError, from_msgpack
from engines.lifetime import die_with
from engines.relay.requests import (
    Answer,
    Ask,
    Commit,
    Data,
    Done,
    List,
    Open,
    Opened,
    Put,
    Read,
    Request,
)
from engines.relay.store import RelayStore

_POLL_S = 1.0


class RelayOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What the process reads as a line of JSON from stdin."""

    token: bytes
    host: str
    port: int
    max_bytes: int
    patience_s: float
    model: tuple[str, str, int] | None = None
    """See `RelayStore`."""
    parent_pid: int = msgspec.field(default_factory=os.getpid)


class RelayServer:
    """Answers trainers and replicas; forgets those that have left."""

    def __init__(self, server: Server, max_bytes: int, model: tuple[str, str, int] | None = None) -> None:
        self._server = server
        self._store = RelayStore(max_bytes, model)
        self._uploads: dict[str, bytearray] = {}
        self._waiting: dict[str, List] = {}

    def serve(self) -> None:
        """Returns when the server is closed."""
        with contextlib.suppress(ConnectionError):
            while True:
                notice = self._server.receive(_POLL_S)
                if isinstance(notice, Received):
                    self._hear(notice.peer, notice.payload)
                elif isinstance(notice, Lost):
                    self._uploads.pop(notice.peer, None)
                    self._waiting.pop(notice.peer, None)

    def _hear(self, peer: str, payload: bytes) -> None:
        try:
            request: Request = from_msgpack(payload, Request)
        except DecodeError as error:
            self._say(peer, Done(f"request: {error}"))
            return
        self._obey(peer, request)

    def _obey(self, peer: str, request: Request) -> None:
        try:
            answer = self._answer(peer, request)
        except ValueError as error:
            answer = Done(str(error))
        if answer is not None:
            self._say(peer, answer)

    def _answer(self, peer: str, request: Request) -> Answer | None:
        """Returns None for a request that waits."""
        if isinstance(request, Put):
            return self._take(peer, request)
        if isinstance(request, Read):
            return Data(self._store.read(request))
        if isinstance(request, Ask):
            return self._store.state()
        if isinstance(request, Open):
            self._store.open(request)
            return Opened(self._store.name)
        if isinstance(request, Commit):
            self._store.commit(request)
            self._answer_waiting()
            return Done()
        if (listing := self._store.list(request)) is None:
            self._waiting[peer] = request
        return listing

    def _take(self, peer: str, piece: Put) -> Done:
        """Adds a piece to the peer's message. A piece that does not continue it begins again, or is refused."""
        upload = self._uploads.setdefault(peer, bytearray())
        if piece.start == 0:
            upload.clear()
        if piece.start != len(upload) or piece.start + len(piece.data) > piece.total:
            have = len(upload)
            del self._uploads[peer]
            raise ValueError(f"Put.start={piece.start}: {have} bytes came before it; send the message again from 0 on")
        upload += piece.data
        if len(upload) == piece.total:
            del self._uploads[peer]
            self._store.put(piece.session, bytes(upload))
            self._answer_waiting()
        return Done()

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for peer, request in waiting.items():
            self._obey(peer, request)

    def _say(self, peer: str, answer: Answer) -> None:
        with contextlib.suppress(ConnectionError):  # it has left meanwhile
            self._server.send(peer, msgspec.msgpack.encode(answer))


def main() -> int:
    """Prints the address, then serves until its parent ends or kills it."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelayOrders)
    die_with(orders.parent_pid)
    patience_s = orders.patience_s
    server = Server(
        orders.token, host=orders.host, port=orders.port, interval_s=min(1.0, patience_s / 5), patience_s=patience_s
    )
    print(server.address, flush=True)
    RelayServer(server, orders.max_bytes, orders.model).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
