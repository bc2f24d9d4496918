"""KV across hosts: a process fetches entries directly from the process that keeps them, over a sealed connection.

No other process takes part, so that a sequence can move between two hosts while all other replicas step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from queue import SimpleQueue
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from torch import Tensor

from engines.control.ends import Received
from engines.control.transport import Client, Server
from engines.decoding import DecodeError, from_msgpack
from engines.kvcache.files import FileKVStore
from engines.kvcache.store import HEADER_BYTES, KVContent, Tier, entry_memory, layers_in
from engines.kvcache.tiers import TieredKVStore
from engines.sequence import KVPart

_PIECE_BYTES: Final = 4 << 20
_NUM_AHEAD: Final = 4  # pieces requested before the first arrives: hides the round trip
_POLL_S: Final = 1.0


class Read(msgspec.Struct, frozen=True, tag=True):
    """A request, answered with these bytes of an entry's file, or with none when the file is missing."""

    name: str
    start: Annotated[int, Meta(ge=0, lt=2**62)]
    count: int


class Drop(msgspec.Struct, frozen=True, tag=True):
    """A request to free an entry; it is not answered."""

    name: str


class PeerKVStore:
    """A host's store whose entries other hosts reach, too: each process serves the entries that it has made.

    A part's location has the entry's host, the address of the process that serves it, and the file's name.
    """

    def __init__(
        self,
        local: FileKVStore | TieredKVStore,
        *,
        host: str,
        address: str,
        token: bytes,
        patience_s: float = 10.0,
    ) -> None:
        """`host`: a name that no other host has; `address`: the IPv4 address at which other hosts reach this one.

        All processes of the run have the same `token`. Raises ValueError when `address` is not this machine's.
        """
        self._local = local
        self._host = host
        self._token = token
        self._patience_s = patience_s
        self.num_fetched = 0
        """Entries that were fetched from other hosts."""
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()  # a connection's answers come in the order of its requests
        self._dropped = SimpleQueue[KVPart | None]()
        self._is_closing = False
        self._server = Server(token, host=address, patience_s=patience_s)
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("kv-server", self._serve), ("kv-drops", self._send_drops))
        ]
        for thread in self._threads:
            thread.start()

    def tier_for(self, num_bytes: int) -> Tier | None:
        return self._local.tier_for(num_bytes)

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        part = self._local.export(content, layers)
        if part is None:
            return None
        return replace(part, location="|".join((self._host, self._server.address, part.location)))

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        host, address, name = _split(part)
        if host == self._host:
            return self._local.load(replace(part, location=name), content)
        try:
            memory = entry_memory(HEADER_BYTES + content.num_bytes)
            with self._lock:
                self._fetch(address, name, memory)
        except (OSError, ValueError) as error:  # the peer has ended, or has refused this process; or memory is short
            raise ValueError(f"{part.location}: cannot be fetched ({error}); recompute the KV") from None
        self.num_fetched += 1
        return layers_in(memory, content, part.location)

    def drop(self, part: KVPart) -> None:
        """Returns at once; another host's entry is dropped later, as a fetch from there may be under way."""
        with contextlib.suppress(ValueError):
            host, _, name = _split(part)
            if host == self._host:
                self._local.drop(replace(part, location=name))
            else:
                self._dropped.put(part)

    def close(self) -> None:
        """Ends all connections and removes the files that this process has made."""
        self._is_closing = True
        self._dropped.put(None)
        self._threads[1].join()
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()
        self._server.close()
        self._threads[0].join()
        self._local.close()

    def _send_drops(self) -> None:
        while (part := self._dropped.get()) is not None:
            _, address, name = _split(part)
            with contextlib.suppress(ValueError, ConnectionError), self._lock:
                if address in self._clients or not self._is_closing:  # a new connection may have to be waited for
                    self._client(address).send(msgspec.msgpack.encode(Drop(name=name)))

    def _fetch(self, address: str, name: str, memory: memoryview) -> None:
        """Fills `memory` with the first bytes of a peer's file. Raises ConnectionError when they do not arrive."""
        try:
            client = self._client(address)
            starts = range(0, len(memory), _PIECE_BYTES)
            asks = [Read(name=name, start=start, count=min(_PIECE_BYTES, len(memory) - start)) for start in starts]
            for ask in asks[:_NUM_AHEAD]:
                client.send(msgspec.msgpack.encode(ask))
            for index, ask in enumerate(asks):
                piece = client.receive(self._patience_s)
                if piece is None:
                    raise ConnectionError(f"{address}: no answer for {self._patience_s:g} s")
                if len(piece) != ask.count:
                    raise ConnectionError(f"{address}: has {len(piece)} of {ask.count} bytes from {ask.start} on")
                memory[ask.start : ask.start + ask.count] = piece
                for later in asks[index + _NUM_AHEAD : index + _NUM_AHEAD + 1]:
                    client.send(msgspec.msgpack.encode(later))
        except ConnectionError:
            # Late answers may still arrive, and must not be taken for answers to later requests.
            if address in self._clients:
                self._clients.pop(address).close()
            raise

    def _client(self, address: str) -> Client:
        """Returns the connection to a server, made at first use. Raises ConnectionError, or ValueError if refused."""
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
        """Sends exactly one answer to each `Read`: clients match answers to requests by their order."""
        try:
            request: Read | Drop = from_msgpack(payload, Read | Drop)
        except DecodeError:
            self._reply(peer, b"")
            return
        if isinstance(request, Read):
            self._reply(peer, self._read(request))
        else:
            self._local.drop(
                KVPart(first_token=0, num_tokens=0, first_head=0, num_heads=0, location=request.name, num_bytes=0)
            )

    def _read(self, request: Read) -> bytes:
        path = self._local.find(request.name)
        if path is None:
            return b""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return os.pread(descriptor, min(request.count, _PIECE_BYTES), request.start)
            finally:
                os.close(descriptor)
        except OSError:
            return b""

    def _reply(self, peer: str, piece: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the peer has ended meanwhile
            self._server.send(peer, piece)


def _split(part: KVPart) -> tuple[str, str, str]:
    fields = part.location.split("|")
    if len(fields) != 3:
        raise ValueError(f"KVPart.location={part.location!r}: is no part of a store of peers; recompute the KV")
    return fields[0], fields[1], fields[2]
