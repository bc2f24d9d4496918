"""Transport of control messages: bytes between one coordinator (`Server`) and its processes (`Client`s), over zmq.

A payload is any bytes that the caller has encoded. On the wire a message is two frames, header and payload; the header
has a MAC keyed with the launch token, and a message without the right MAC is dropped and counted. Version, token, order
and completeness are checked here, and nowhere else.
"""

from __future__ import annotations

import errno
import os
import re
from collections import deque
from dataclasses import dataclass
from typing import Final

import zmq

from engines.control.ends import Inbox, Joined, Lost, Notice, Received, Woken
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
    Session,
)

REASONS: Final = ("header", "version", "token", "duplicate", "stale")
"""Why a message is dropped: it is not two frames with a header like ours; it has another version; it is altered, or
sealed with another token; its sequence number was received before; its sender is no longer a peer."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(slots=True)
class _Peer:
    """A joined client, as the server's thread knows it."""

    name: str
    session: Session
    route: bytes
    is_unreachable: bool = False


class Server:
    """The coordinator's end of all control connections, on `host`:`port` (0: any free one; see `address`).

    Only one thread may use it, but for `wake`; `peers` are those that `receive` has returned to this thread. Sends a
    heartbeat every `interval_s` seconds, and drops a peer that was silent for `patience_s`. Each client makes a session
    when it joins, and the MAC covers the session: nobody without the token can send under a peer's name. The inbox is
    unbounded, as all holders of the token are trusted. Raises OSError when the port is in use, ValueError for invalid
    settings.
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
        self._seal = Seal(token, is_server=True)
        self._patience_s, self._max_bytes = patience_s, max_bytes
        self.rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Dropped messages by reason. Frames of more than `max_bytes` never get here: zmq cuts the connection."""
        self._here: dict[str, bytes] = {}  # of the caller's thread: sessions by name
        self._left: dict[str, str] = {}
        self._reason = ""
        self._inbox: Inbox[tuple[Notice, bytes]] = Inbox()
        self._peers: dict[bytes, _Peer] = {}  # of the loop's thread, as all below
        self._ended: deque[bytes] = deque(maxlen=4096)  # sessions that a repeated HELLO does not open again
        self._told: deque[tuple[bytes, bytes]] = deque(maxlen=256)  # a refusal is sent once, not once per message
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
        """Returns the next notice, in order per peer; None when there was none in `timeout_s` seconds."""
        item = self._inbox.get(timeout_s)
        if item is None:
            return None
        notice, session = item
        if isinstance(notice, Joined):
            self._here[notice.peer] = session
        elif isinstance(notice, Lost):
            del self._here[notice.peer]
            self._left[notice.peer] = notice.reason
        return notice

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a message of any length. Raises ConnectionError, with the name, for a peer that has not joined or has
        left. If a peer is lost before it reads the message, `receive` later returns its `Lost`."""
        if peer not in self._here:
            what = f"has left ({self._left[peer]})" if peer in self._left else "never joined"
            here = ", ".join(self._here) or "nobody"
            raise ConnectionError(f"peer: {peer!r} {what}; here: {here}; send after its Joined and before its Lost")
        self._loop.put((self._here[peer], payload))

    def wake(self) -> None:
        """Makes `receive` return `Woken`. Any thread may call it."""
        self._inbox.put((Woken(), b""))

    def peers(self) -> list[str]:
        return list(self._here)

    def close(self, reason: str = "the coordinator has closed") -> None:
        """Sends a goodbye with the reason. May be called twice. Messages not sent within half a second are lost."""
        self._reason = reason
        self._loop.close()

    def _on_item(self, item: tuple[bytes, bytes]) -> None:
        session, payload = item
        if (peer := self._peers.get(session)) is not None:  # else its Lost is in the inbox already
            for frames in peer.session.pack_data(payload):
                self._transmit(peer, frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        route, *frames = frames
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self.rejected[message] += 1
            if message != "header":
                refusal = PREFIX.pack(MAGIC, VERSION, REFUSED)  # not sealed: the client could not check it
                self._tell_once(route, b"", [refusal, b""])
        elif (peer := self._peers.get(message.session)) is None:
            self._on_stranger(route, message)
        else:
            try:
                if peer.session.takes(message):
                    peer.route, peer.is_unreachable = route, False  # zmq may have reconnected
                    self._on_message(peer, message)
                else:
                    self.rejected["duplicate"] += 1
            except ConnectionError as error:
                self._drop(peer, str(error))

    def _on_message(self, peer: _Peer, message: Message) -> None:
        if message.kind == BYE:
            self._drop(peer, message.payload.decode(errors="replace"))
        elif message.kind in (PART, DATA) and (payload := peer.session.join_parts(message)) is not None:
            self._inbox.put((Received(peer=peer.name, payload=payload), peer.session.id))

    def _on_stranger(self, route: bytes, message: Message) -> None:
        if message.kind != HELLO or message.sequence != 1 or message.session in self._ended:
            self.rejected["stale"] += 1
            goodbye = self._seal.pack(BYE, message.session, 0, b"it was given up as lost before")
            self._tell_once(route, message.session, goodbye)
            return
        name = message.payload.decode(errors="replace")
        for other in [peer for peer in self._peers.values() if peer.name == name]:
            self._drop(other, "another client has joined under its name")
        session = Session(self._seal, message.session, self._max_bytes)
        session.takes(message)
        peer = self._peers[session.id] = _Peer(name, session, route)
        self._inbox.put((Joined(peer=name), session.id))
        self._transmit(peer, session.pack(WELCOME))

    def _on_tick(self, now: float, away_s: float) -> None:
        for peer in list(self._peers.values()):
            silent_s = peer.session.silent_s(now, away_s)
            if silent_s > self._patience_s:
                self._drop(peer, f"silent for {silent_s:.1f} s")
            elif peer.is_unreachable:  # since the last tick, so that its last messages have been read
                self._drop(peer, "its connection was closed without a goodbye")
            else:
                self._transmit(peer, peer.session.pack(BEAT))

    def _on_end(self, problem: Exception | None) -> bool:
        for peer in self._peers.values() if problem is None else []:
            self._say_goodbye(peer, self._reason)
        closed = ConnectionError(f"the control connections of {self.address} are closed")
        failed = RuntimeError(f"the control connections of {self.address} have failed: {problem!r}")
        self._inbox.put(closed if problem is None else failed)
        return problem is None

    def _drop(self, peer: _Peer, reason: str) -> None:
        del self._peers[peer.session.id]
        self._ended.append(peer.session.id)
        self._inbox.put((Lost(peer=peer.name, reason=reason), peer.session.id))
        self._say_goodbye(peer, reason)

    def _say_goodbye(self, peer: _Peer, reason: str) -> None:
        """Sends BYE with sequence number 0: the client accepts it even if messages before it were lost."""
        self._deliver(peer.route, self._seal.pack(BYE, peer.session.id, 0, reason.encode()[: self._max_bytes]))

    def _transmit(self, peer: _Peer, frames: list[bytes]) -> None:
        if not self._deliver(peer.route, frames):
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
    """The connection of the process `name` ("rank-3", "replica-7") to the coordinator at `address`.

    The constructor returns when it has joined. Raises ConnectionError without an answer for `patience_s` seconds, and
    ValueError when the coordinator refuses this client. It never rejoins by itself: after a ConnectionError, make a new
    one. Messages sent before the coordinator was lost may not have arrived.
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
        self._seal = Seal(token, is_server=False)
        self.name, self.address, self._patience_s = name, address, patience_s
        self.rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._end: Exception | None = None  # of the loop's thread, as all below; the caller may read it
        self._inbox: Inbox[bytes] = Inbox()
        self._session = Session(self._seal, os.urandom(8), max_bytes)
        self._is_cut = False
        self._socket = open_socket(zmq.DEALER, max_bytes)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ValueError(f"address: {address!r}: {error}; give the server's `address`") from None
        self._transmit(self._session.pack(HELLO, name.encode()))  # no other thread has the socket yet
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
            # The loop's thread times out first; it does not count time in which this process itself was stopped.
            if self._inbox.get(2 * patience_s) is None:
                raise ConnectionError(f"{address}: silent for {2 * patience_s:g} s; is the coordinator running there?")
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of all frames that were given to the socket; `num_bytes_received`: that came from it."""
        return self._session.num_bytes_sent

    @property
    def num_bytes_received(self) -> int:
        return self._session.num_bytes_received

    @property
    def is_lost(self) -> bool:
        """Whether `send` would raise ConnectionError."""
        return self._end is not None

    def receive(self, timeout_s: float) -> bytes | None:
        """Returns the next message; None when there was none in `timeout_s` seconds. When the coordinator is gone or
        has dropped this client, raises ConnectionError after all messages that came before."""
        return self._inbox.get(timeout_s)

    def send(self, payload: bytes) -> None:
        """Queues a message of any length. Raises ConnectionError as `receive` does."""
        if self._end is not None:
            raise type(self._end)(*self._end.args)
        self._loop.put(payload)

    def close(self) -> None:
        """Sends a goodbye. May be called twice. Messages not sent within half a second are lost."""
        self._loop.close()

    def _on_item(self, payload: bytes) -> None:
        if self._end is None:
            for frames in self._session.pack_data(payload):
                self._transmit(frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self._end is not None:
            return
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self._on_unsealed(frames, message)
        elif message.session != self._session.id:
            self.rejected["stale"] += 1
        elif message.kind == BYE:
            reason = message.payload.decode(errors="replace")
            self._finish(ConnectionError(f"{self.address} dropped {self.name!r}: {reason}; join anew as a new Client"))
        else:
            try:
                if not self._session.takes(message):
                    self.rejected["duplicate"] += 1
                # The empty payload of WELCOME is for the constructor.
                elif message.kind != BEAT and (payload := self._session.join_parts(message)) is not None:
                    self._inbox.put(payload)
            except ConnectionError as error:
                self._give_up(str(error))

    def _on_unsealed(self, frames: list[bytes], reason: str) -> None:
        self.rejected[reason] += 1
        # A refusal has no MAC: it can only end a session that has not begun, and the error's text is made here.
        if self._session.num_received or not frames or not frames[0].startswith(MAGIC):
            return
        if len(frames[0]) != PREFIX.size or PREFIX.unpack(frames[0])[2] != REFUSED:
            return
        version = PREFIX.unpack(frames[0])[1]
        if version != VERSION:
            versions = f"the coordinator's is {version}, {self.name!r} has {VERSION}"
            self._finish(ValueError(f"protocol version: {versions}; start both from the same installation"))
        else:
            self._finish(ValueError("launch token: not the coordinator's; start both from the same launcher"))

    def _on_tick(self, now: float, away_s: float) -> None:
        if self._end is not None:
            return
        silent_s = self._session.silent_s(now, away_s)
        if self._is_cut:  # since the last tick, so that the last messages have been read
            self._give_up("its connection was closed without a goodbye")
        elif silent_s > self._patience_s:
            self._give_up(f"silent for {silent_s:.1f} s; is the coordinator running there?")
        elif self._session.num_received:
            self._transmit(self._session.pack(BEAT))

    def _on_cut(self) -> None:
        if self._session.num_received:  # before, the server may not be listening yet
            self._is_cut = True

    def _on_end(self, problem: Exception | None) -> bool:
        if problem is not None:
            self._finish(RuntimeError(f"the control connection of {self.name!r} has failed: {problem!r}"))
        if self._end is not None:
            return False
        self._finish(ConnectionError(f"{self.name!r} has closed its connection to {self.address}"))
        self._transmit(self._session.pack(BYE, b"it left"))
        return True

    def _give_up(self, problem: str) -> None:
        self._finish(ConnectionError(f"{self.address}: {problem}"))
        self._transmit(self._session.pack(BYE, f"it gave up: {problem}".encode()))

    def _finish(self, end: Exception) -> None:
        if self._end is None:
            self._end = end
            self._inbox.put(end)

    def _transmit(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK)


def _check_times(interval_s: float, patience_s: float) -> None:
    if not 0 < interval_s < patience_s:
        raise ValueError(f"interval_s: {interval_s:g} must be above 0 and below patience_s, {patience_s:g}")
