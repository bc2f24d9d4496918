"""How control messages travel: bytes between one coordinator (`Server`) and its processes (`Client`s).

Over zmq between processes; through queues inside one it is `ends.memory_pair`. Callers hold a `ServerEnd` or a
`ClientEnd`. A payload is whatever bytes the caller encoded. On the wire a message is two frames, header and
payload, and the header's MAC is keyed with the launch token: what does not carry it is dropped and counted.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import zmq

from engines.control.ends import Inbox, Joined, Lost, Notice, Received, Roster
from engines.control.loop import Loop, bind, open_socket
from engines.control.sealing import (
    BEAT,
    BYE,
    DATA,
    HELLO,
    MAGIC,
    MAX_BYTES,
    PART,
    PREFIX,
    REFUSED,
    VERSION,
    WELCOME,
    Message,
    Seal,
)

REASONS: Final = (
    *("frames", "magic", "version", "header", "oversized", "truncated", "token", "forged", "kind", "name"),
    *("duplicate", "stale"),
)
"""Why a message is dropped: not two frames; not ours; another protocol's; a header of another length; more than
`max_bytes`; payload and header disagree about the length; another launch's; altered; unknown kind; a bad peer name;
a sequence number seen before; from a peer that is no longer one."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class _Peer:
    """What the server's thread knows of a joined client."""

    name: str
    session: bytes
    route: bytes
    heard: float
    num_received: int = 1
    num_sent: int = 0
    is_unreachable: bool = False
    parts: list[bytes] = field(default_factory=list)


class Server:
    """The coordinator's end of all control connections, on `host`:`port` (0: any free one; see `address`).

    Beats every `interval_s` seconds, and drops a peer that was silent for `patience_s`. Peers are distinguished by a
    session that each makes when it joins, inside the MAC: nobody without the token can speak under a peer's name.
    The inbox is not bounded: who has the token is trusted to send what is wanted.
    Raises OSError when the port is in use, ValueError for settings that cannot be.
    """

    def __init__(
        self,
        token: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        interval_s: float = 1.0,
        patience_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        _check_times(interval_s, patience_s)
        self._seal = Seal(token, is_server=True, max_bytes=max_bytes)
        self._patience_s = patience_s
        self.rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Dropped messages by reason. Larger frames than twice `max_bytes` never get here: zmq cuts the connection."""
        self._roster = Roster()  # the caller's
        self._reason = ""
        self._inbox: Inbox[tuple[Notice, bytes]] = Inbox()
        self._peers: dict[bytes, _Peer] = {}  # the thread's, as all below
        self._ended: deque[bytes] = deque(maxlen=4096)  # sessions whose hello, sent again, opens nothing
        self._told: deque[tuple[bytes, bytes]] = deque(maxlen=256)  # a refusal is said once, not once per message
        self._socket = open_socket(zmq.ROUTER, max_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a closed connection is an error, not a silent loss
        try:
            bind(self._socket, f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            if error.errno == errno.EADDRINUSE:
                message = f"port: {host}:{port} is in use; choose another, or 0 for any free one"
                raise OSError(errno.EADDRINUSE, message) from None
            message = f"host, port: cannot listen on {host}:{port} ({error}); give an IPv4 address of this machine"
            raise ValueError(message) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """For `Client`; of the form "tcp://127.0.0.1:40123"."""
        self._loop = Loop(self._socket, interval_s, self._on_item, self._on_frames, self._on_tick, self._on_end)

    def receive(self, timeout_s: float) -> Notice | None:
        item = self._inbox.get(timeout_s)
        return self._roster.note(*item) if item is not None else None

    def send(self, peer: str, payload: bytes) -> None:
        self._loop.put((self._roster.session(peer), payload))

    def peers(self) -> list[str]:
        return list(self._roster.here)

    def close(self, reason: str = "the coordinator has closed") -> None:
        self._reason = reason
        self._loop.close()

    def _on_item(self, item: tuple[bytes, bytes]) -> None:
        session, payload = item
        if session in self._peers:  # else its Lost is on the way to the caller
            for kind, part in self._seal.parts(payload):
                self._transmit(self._peers[session], kind, part)

    def _on_frames(self, frames: list[bytes]) -> None:
        route, *frames = frames
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self.rejected[message] += 1
            if message in ("version", "token"):
                refusal = PREFIX.pack(MAGIC, VERSION, REFUSED)  # not sealed: the other could not check it
                self._tell_once(route, b"", [refusal, b""])
            return
        peer = self._peers.get(message.session)
        if peer is None:
            self._on_stranger(route, message)
        elif message.sequence <= peer.num_received:
            self.rejected["duplicate"] += 1
        elif message.sequence > peer.num_received + 1:
            self._drop(peer, f"messages {peer.num_received + 1} to {message.sequence - 1} are missing")
        else:
            peer.num_received, peer.heard = message.sequence, time.monotonic()
            peer.route, peer.is_unreachable = route, False  # zmq may have connected anew
            if message.kind == PART:
                peer.parts.append(message.payload)
            elif message.kind == DATA:
                self._inbox.put((Received(peer=peer.name, payload=_join(peer.parts, message.payload)), peer.session))
            elif message.kind == BYE:
                self._drop(peer, message.payload.decode(errors="replace"))

    def _on_stranger(self, route: bytes, message: Message) -> None:
        if message.kind != HELLO or message.sequence != 1 or message.session in self._ended:
            self.rejected["stale"] += 1
            goodbye = self._seal.pack(BYE, message.session, 0, b"it was given up as lost before")
            self._tell_once(route, message.session, goodbye)
            return
        name = message.payload.decode(errors="replace")
        if not _NAME.fullmatch(name):
            self.rejected["name"] += 1
            return
        for other in [peer for peer in self._peers.values() if peer.name == name]:
            self._drop(other, "another client has joined under its name")
        peer = self._peers[message.session] = _Peer(name, message.session, route, time.monotonic())
        self._inbox.put((Joined(peer=name), peer.session))
        self._transmit(peer, WELCOME)

    def _on_tick(self, now: float, away_s: float) -> None:
        for peer in list(self._peers.values()):
            peer.heard = min(now, peer.heard + away_s)  # a pause of this process is not the peer's silence
            if now - peer.heard > self._patience_s:
                self._drop(peer, f"silent for {now - peer.heard:.1f} s")
            elif peer.is_unreachable:  # since the last tick, so that its last messages have been read
                self._drop(peer, "its connection was closed without a goodbye")
            else:
                self._transmit(peer, BEAT)

    def _on_end(self, problem: Exception | None) -> bool:
        reason = self._reason.encode()[: self._seal.max_bytes]
        for peer in self._peers.values() if problem is None else []:
            self._deliver(peer.route, self._seal.pack(BYE, peer.session, 0, reason))
        closed = ConnectionError(f"the control connections of {self.address} are closed")
        failed = RuntimeError(f"the control connections of {self.address} have failed: {problem!r}")
        self._inbox.put(closed if problem is None else failed)
        return problem is None

    def _drop(self, peer: _Peer, reason: str) -> None:
        del self._peers[peer.session]
        self._ended.append(peer.session)
        self._inbox.put((Lost(peer=peer.name, reason=reason), peer.session))
        self._deliver(peer.route, self._seal.pack(BYE, peer.session, 0, reason.encode()))

    def _transmit(self, peer: _Peer, kind: int, payload: bytes = b"") -> None:
        peer.num_sent += 1
        if not self._deliver(peer.route, self._seal.pack(kind, peer.session, peer.num_sent, payload)):
            peer.is_unreachable = True

    def _tell_once(self, route: bytes, session: bytes, frames: list[bytes]) -> None:
        if (route, session) not in self._told:
            self._told.append((route, session))
            self._deliver(route, frames)

    def _deliver(self, route: bytes, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            return False
        return True


class Client:
    """The end of the process `name` ("rank-3", "replica-7") of its connection to the coordinator at `address`.

    Returns joined. Raises ConnectionError when nobody answers for `patience_s` seconds, and ValueError when the
    coordinator refuses this client. It never joins again by itself: after a ConnectionError, make a new one.
    """

    def __init__(
        self,
        name: str,
        address: str,
        token: bytes,
        *,
        interval_s: float = 1.0,
        patience_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        _check_times(interval_s, patience_s)
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: {name!r} is no peer name; use 1 to 64 letters, digits, '.', '_' and '-'")
        self._seal = Seal(token, is_server=False, max_bytes=max_bytes)
        self.name, self.address, self._patience_s = name, address, patience_s
        self.rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._end: Exception | None = None  # the thread's, as all below; the caller may read it
        self._inbox: Inbox[bytes] = Inbox()
        self._session = os.urandom(8)
        self._parts: list[bytes] = []
        self._num_sent = self._num_received = 0
        self._heard = time.monotonic()
        self._socket = open_socket(zmq.DEALER, max_bytes)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ValueError(f"address: {address!r}: {error}; give the server's `address`") from None
        self._transmit(HELLO, name.encode())  # no other thread has the socket yet
        self._is_cut = False
        self._loop = Loop(
            self._socket,
            interval_s,
            self._on_item,
            self._on_frames,
            self._on_tick,
            self._on_end,
            on_cut=self._on_cut,
        )
        try:
            # The thread gives up first; it knows which of the time this process was stopped itself.
            if self._inbox.get(2 * patience_s) is None:
                raise ConnectionError(f"{address}: silent for {2 * patience_s:g} s; is the coordinator running there?")
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_s: float) -> bytes | None:
        return self._inbox.get(timeout_s)

    def send(self, payload: bytes) -> None:
        if self._end is not None:
            raise type(self._end)(*self._end.args)
        self._loop.put(payload)

    def close(self) -> None:
        self._loop.close()

    def _on_item(self, payload: bytes) -> None:
        if self._end is None:
            for kind, part in self._seal.parts(payload):
                self._transmit(kind, part)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self._end is not None:
            return
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self._on_unsealed(frames, message)
        elif message.session != self._session:
            self.rejected["stale"] += 1
        elif message.kind == BYE:
            reason = message.payload.decode(errors="replace")
            self._finish(ConnectionError(f"{self.address} dropped {self.name!r}: {reason}; join anew as a new Client"))
        elif message.sequence <= self._num_received:
            self.rejected["duplicate"] += 1
        elif message.sequence > self._num_received + 1:
            self._give_up(f"messages {self._num_received + 1} to {message.sequence - 1} are missing")
        else:
            self._num_received, self._heard = message.sequence, time.monotonic()
            if message.kind == PART:
                self._parts.append(message.payload)
            elif message.kind in (DATA, WELCOME):  # the empty welcome is the constructor's
                self._inbox.put(_join(self._parts, message.payload))

    def _on_unsealed(self, frames: list[bytes], reason: str) -> None:
        self.rejected[reason] += 1
        # A refusal cannot be checked. It can only end what has not begun, and its words are ours.
        if self._num_received or reason not in ("version", "header"):
            return
        _, version, kind = PREFIX.unpack_from(frames[0])
        if kind == REFUSED and version != VERSION:
            versions = f"the coordinator's is {version}, {self.name!r} has {VERSION}"
            self._finish(ValueError(f"protocol version: {versions}; start both from the same installation"))
        elif kind == REFUSED:
            self._finish(ValueError("launch token: not the coordinator's; start both from the same launcher"))

    def _on_tick(self, now: float, away_s: float) -> None:
        if self._end is not None:
            return
        self._heard = min(now, self._heard + away_s)  # a pause of this process is not the coordinator's silence
        silent_s = now - self._heard
        if self._is_cut:  # since the last tick, so that the last messages have been read
            self._give_up("its connection was closed without a goodbye")
        elif silent_s > self._patience_s:
            self._give_up(f"silent for {silent_s:.1f} s; is the coordinator running there?")
        elif self._num_received:
            self._transmit(BEAT)

    def _on_cut(self) -> None:
        if self._num_received:  # before, nobody may be listening yet
            self._is_cut = True

    def _on_end(self, problem: Exception | None) -> bool:
        if problem is not None:
            self._finish(RuntimeError(f"the control connection of {self.name!r} has failed: {problem!r}"))
        if self._end is not None:
            return False
        self._finish(ConnectionError(f"{self.name!r} has closed its connection to {self.address}"))
        self._transmit(BYE, b"it left")
        return True

    def _give_up(self, problem: str) -> None:
        self._finish(ConnectionError(f"{self.address}: {problem}"))
        self._transmit(BYE, f"it gave up: {problem}".encode())

    def _finish(self, end: Exception) -> None:
        if self._end is None:
            self._end = end
            self._inbox.put(end)

    def _transmit(self, kind: int, payload: bytes = b"") -> None:
        self._num_sent += 1
        self._socket.send_multipart(self._seal.pack(kind, self._session, self._num_sent, payload), zmq.NOBLOCK)


def _join(parts: list[bytes], last: bytes) -> bytes:
    """The whole message; `parts` is empty afterwards."""
    if not parts:
        return last
    whole = b"".join([*parts, last])
    parts.clear()
    return whole


def _check_times(interval_s: float, patience_s: float) -> None:
    if not 0 < interval_s < patience_s:
        raise ValueError(f"interval_s: {interval_s:g} must be above 0 and below patience_s, {patience_s:g}")
