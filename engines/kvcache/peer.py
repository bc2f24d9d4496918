"""KV across hosts: a process fetches what it wants from the one that keeps it, over a sealed connection of their own.

Nobody else takes part, so that a sequence can move between two hosts while all other replicas step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from torch import Tensor

from engines.control.ends import Received
from engines.control.transport import Client, Server
from engines.kvcache.tiers import TieredKVStore
from engines.kvcache.transfer import HEADER_BYTES, HostKVStore, KVContent, Tier, layers_in
from engines.sequence import KVPart

_PIECE_BYTES: Final = 4 << 20
_NUM_AHEAD: Final = 4  # pieces asked for before the first has come: hides the way there and back
_POLL_S: Final = 1.0


class Read(msgspec.Struct, frozen=True, tag=True):
    """Answered with these bytes of a file of the run, or with none when it is gone."""

    path: str
    start: int
    count: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Not answered."""

    path: str


_decode_request = msgspec.msgpack.Decoder(Read | Drop).decode


class PeerKVStore:
    """A host's store whose parts the processes of other hosts reach, too: each serves those that it has made.

    A part's location says on which host it lies, who serves it and in which file.
    """

    def __init__(
        self,
        local: HostKVStore | TieredKVStore,
        *,
        host: str,
        address: str,
        token: bytes,
        patience_s: float = 10.0,
    ) -> None:
        """`host` tells hosts apart; `address` is this one's IPv4 address as the others reach it.

        All processes of the run have the same `token`. Raises ValueError when `address` is not this machine's.
        """
        self._local = local
        self._host = host
        self._token = token
        self._patience_s = patience_s
        self.num_fetched = 0
        """Parts that have come from other hosts."""
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()  # a connection's answers come in the order of its requests
        self._server = Server(token, host=address, patience_s=patience_s)
        self._thread = threading.Thread(target=self._serve, name="kv-server", daemon=True)
        self._thread.start()

    def tier_for(self, num_bytes: int) -> Tier | None:
        return self._local.tier_for(num_bytes)

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        part = self._local.export(content, layers)
        if part is None:
            return None
        return replace(part, location="|".join((self._host, self._server.address, part.location)))

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        host, address, path = _split(part)
        if host == self._host:
            return self._local.load(replace(part, location=path), content)
        num_bytes = HEADER_BYTES + content.num_bytes
        memory = mmap.mmap(-1, num_bytes)
        try:
            with self._lock:
                self._fetch(address, path, memory)
        except (ConnectionError, ValueError) as error:  # it is gone, or has refused this process
            raise ValueError(f"{part.location}: cannot be fetched ({error}); recompute the KV") from None
        self.num_fetched += 1
        return layers_in(memory, content, part.location)

    def drop(self, part: KVPart) -> None:
        with contextlib.suppress(ValueError, ConnectionError):
            host, address, path = _split(part)
            if host == self._host:
                self._local.drop(replace(part, location=path))
            else:
                with self._lock:
                    self._client(address).send(msgspec.msgpack.encode(Drop(path=path)))

    def close(self) -> None:
        """Ends all connections and removes the files that this process has made."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
        self._server.close()
        self._thread.join()
        self._local.close()

    def _fetch(self, address: str, path: str, memory: mmap.mmap) -> None:
        """Fills `memory` from the start of a file. Raises ConnectionError when it does not come."""
        try:
            client = self._client(address)
            starts = deque(range(0, len(memory), _PIECE_BYTES))
            wanted: deque[tuple[int, int]] = deque()
            while starts or wanted:
                while starts and len(wanted) < _NUM_AHEAD:
                    start = starts.popleft()
                    count = min(_PIECE_BYTES, len(memory) - start)
                    client.send(msgspec.msgpack.encode(Read(path=path, start=start, count=count)))
                    wanted.append((start, count))
                piece = client.receive(self._patience_s)
                start, count = wanted.popleft()
                if piece is None:
                    raise ConnectionError(f"{address}: no answer for {self._patience_s:g} s")
                if len(piece) != count:
                    raise ConnectionError(f"{address}: has {len(piece)} of {count} bytes from {start} on")
                memory[start : start + count] = piece
        except ConnectionError:
            # What was asked for may still come: it must not be taken for the answer to another question.
            if address in self._clients:
                self._clients.pop(address).close()
            raise

    def _client(self, address: str) -> Client:
        """The connection to that server; made when first needed. Raises ConnectionError, or ValueError if refused."""
        client = self._clients.get(address)
        if client is None:
            name = f"kv-{secrets.token_hex(8)}"
            client = self._clients[address] = Client(name, address, self._token, patience_s=self._patience_s)
        return client

    def _serve(self) -> None:
        with contextlib.suppress(ConnectionError):  # closed
            while True:
                notice = self._server.receive(_POLL_S)
                if isinstance(notice, Received):
                    self._answer(notice.peer, notice.payload)

    def _answer(self, peer: str, payload: bytes) -> None:
        """A `Read` has always one answer: those who asked tell answers apart by their order."""
        try:
            request = _decode_request(payload)
        except msgspec.MsgspecError:
            self._reply(peer, b"")
            return
        try:
            path: Path | None = self._local.path_of(request.path)
        except ValueError:
            path = None  # no file of this run
        if isinstance(request, Read):
            self._reply(peer, _read(path, request) if path is not None else b"")
        elif path is not None:
            self._local.drop(KVPart(first_head=0, num_heads=0, location=str(path), num_bytes=0))

    def _reply(self, peer: str, piece: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # it has gone meanwhile
            self._server.send(peer, piece)


def _read(path: Path, request: Read) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, min(request.count, _PIECE_BYTES), request.start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _split(part: KVPart) -> tuple[str, str, str]:
    fields = part.location.split("|")
    if len(fields) != 3:
        raise ValueError(f"KVPart.location={part.location!r}: is no part of a store of peers; recompute the KV")
    return fields[0], fields[1], fields[2]
