"""How control messages travel: bytes between one coordinator (`Server`) and its processes (`Client`s).

Over zmq between processes (`Server`, `Client`), through queues inside one (`memory_pair`); callers hold a `ServerEnd`
or a `ClientEnd`. A payload is whatever bytes the caller encoded. On the wire a message is two frames, header and
payload, and the header's MAC is keyed with the launch token: what does not carry it is dropped and counted.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import math
import os
import queue
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import zmq

VERSION: Final = 1
TOKEN_VARIABLE: Final = "CURTAIL_TOKEN"
"""Environment variable of a launched process: the token in hex. (A command line could be read by every user.)"""
MAX_BYTES: Final = 64 << 20
REASONS: Final = (
    *("frames", "magic", "version", "header", "oversized", "truncated", "token", "forged", "kind", "name"),
    *("duplicate", "stale"),
)
"""Why a message is dropped: not two frames; not ours; another protocol's; a header of another length; more than
`max_bytes`; payload and header disagree about the length; another launch's; altered; unknown kind; a bad peer name;
a sequence number seen before; from a peer that is no longer one."""

_PREFIX: Final = struct.Struct("<4sHB")  # magic, version, kind: the same in all versions, so that they can tell
_HEADER: Final = struct.Struct("<4sHB8s8sQQ16s")  # prefix, token id, session, sequence number, payload length, MAC
_MAC_SIZE: Final = 16
_MAGIC: Final = b"CRTL"
_HELLO, _WELCOME, _DATA, _BEAT, _BYE, _REFUSED = range(1, 7)
_BURST: Final = 256  # messages read before the thread looks at its clock and outbox again: a flood starves neither
_LINGER_MS: Final = 500  # what close() waits at most for the last messages to leave
_BIND_S: Final = 1.0  # how long a port may still be in use
_CLOSE_S: Final = 2.0  # the longest that close() takes
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

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
    """The coordinator's end. To be used by one thread; `peers` and `send` know what `receive` has told."""

    def receive(self, timeout_s: float) -> Notice | None:
        """The next notice, in order per peer; None when there was none in `timeout_s` seconds."""
        ...

    def send(self, peer: str, payload: bytes) -> None:
        """Queues a message. Raises ConnectionError for a peer that has not joined or has left, by name, and ValueError
        for a payload that is too large. A peer lost before it read the message shows as a later `Lost`."""
        ...

    def peers(self) -> list[str]: ...

    def close(self) -> None:
        """Says goodbye. May be called twice. What has not left in half a second is lost."""
        ...


class ClientEnd(Protocol):
    """A process's end. Messages sent before the coordinator was lost may not have arrived."""

    name: str

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message; None when there was none in `timeout_s` seconds. Raises ConnectionError, after all
        messages that came before, when the coordinator is gone or has dropped this client."""
        ...

    def send(self, payload: bytes) -> None:
        """Queues a message. Raises ConnectionError as `receive` does, and ValueError for a payload too large."""
        ...

    def close(self) -> None:
        """Says goodbye. May be called twice. What has not left in half a second is lost."""
        ...


def new_token() -> bytes:
    """A launch token: 32 random bytes that authenticate every message of one run."""
    return os.urandom(32)


def write_token(path: Path, token: bytes) -> None:
    """Leaves the token in a new file that only this user can read. Raises FileExistsError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token.hex())


def read_token(path: Path | None = None) -> bytes:
    """The token in the file, or without one in the environment. Raises ValueError when it is missing or exposed."""
    where = str(path) if path else TOKEN_VARIABLE
    if path and path.stat().st_mode & 0o077:
        raise ValueError(f"launch token: {path} is open to other users; make it with write_token (mode 0600)")
    text = path.read_text() if path else os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError(f"launch token: {where} holds no 64 hex digits; start this process from the launcher")
    return bytes.fromhex(text)


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    session: bytes
    sequence: int
    payload: bytes


class Seal:
    """Makes and checks the two frames of a message, for one side."""

    def __init__(self, token: bytes, *, is_server: bool, max_bytes: int = MAX_BYTES) -> None:
        if len(token) != 32:
            raise ValueError(f"launch token: {len(token)} bytes, must be 32; use new_token() or read_token()")
        self.max_bytes = max_bytes
        # A hash of 256 random bits betrays nothing, and tells another launch's message from an altered one.
        self._token_id = blake2b(token, digest_size=8, person=b"token-id").digest()
        # Each direction has its own MAC, so that nobody's messages can be sent back to them.
        up, down = (blake2b(key=token, digest_size=_MAC_SIZE, person=person) for person in (b"to-server", b"to-client"))
        self._outgoing, self._incoming = (down, up) if is_server else (up, down)

    def pack(self, kind: int, session: bytes, sequence: int, payload: bytes = b"") -> list[bytes]:
        head = _HEADER.pack(_MAGIC, VERSION, kind, self._token_id, session, sequence, len(payload), bytes(_MAC_SIZE))
        head = head[:-_MAC_SIZE]
        return [head + _mac(self._outgoing, head, payload), payload]

    def unpack(self, frames: list[bytes]) -> _Message | str:
        """The message, or the reason not to take it. Never raises, whatever the bytes."""
        if len(frames) != 2:
            return "frames"
        header, payload = frames
        if len(header) < _PREFIX.size or not header.startswith(_MAGIC):
            return "magic"
        if _PREFIX.unpack_from(header)[1] != VERSION:
            return "version"
        if len(header) != _HEADER.size:
            return "header"
        _, _, kind, token_id, session, sequence, length, mac = _HEADER.unpack(header)
        if max(length, len(payload)) > self.max_bytes:
            return "oversized"
        if length != len(payload):
            return "truncated"
        if not hmac.compare_digest(token_id, self._token_id):
            return "token"
        if not hmac.compare_digest(mac, _mac(self._incoming, header[:-_MAC_SIZE], payload)):
            return "forged"
        return _Message(kind, session, sequence, payload) if _HELLO <= kind <= _BYE else "kind"

    def check_payload(self, payload: bytes) -> None:
        if len(payload) > self.max_bytes:
            raise ValueError(
                f"payload: {len(payload)} bytes, at most {self.max_bytes}; send parts, or raise max_bytes on both sides"
            )


def _mac(keyed: blake2b, head: bytes, payload: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(head)
    mac.update(payload)
    return mac.digest()


class _Inbox(Generic[Item]):
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


class _Roster:
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


class _Loop:
    """The thread that owns a zmq socket: it alone touches it, and it beats while the other threads compute.

    `on_item` gets what was `put`, `on_frames` what came, `on_tick(now, away_s)` a call per interval with the seconds
    by which it is late, and `on_end` the exception that ended the thread, None for `close`; it returns whether what it
    sent is to be waited for.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        interval_s: float,
        on_item: Callable[[Any], None],
        on_frames: Callable[[list[bytes]], None],
        on_tick: Callable[[float, float], None],
        on_end: Callable[[Exception | None], bool],
    ) -> None:
        self._socket, self._interval_s = socket, interval_s
        self._on_item, self._on_frames, self._on_tick, self._on_end = on_item, on_frames, on_tick, on_end
        self._outbox: deque[Any] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()  # nobody writes to the eventfd's number once it is closed
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="control-transport", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        with self._lock:
            if not self._is_open:
                raise ConnectionError("this end of the control connection is closed; make a new one")
            self._outbox.append(item)
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            os.eventfd_write(self._wake_fd, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def _run(self) -> None:
        problem = None
        try:
            self._serve()
        except Exception as error:
            problem = error
        linger_ms = 0
        try:
            linger_ms = _LINGER_MS if self._on_end(problem) else 0
        finally:
            self._socket.close(linger=linger_ms)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        due = time.monotonic()
        while self._is_open:
            if self._wake_fd in dict(poller.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))):
                os.eventfd_read(self._wake_fd)
            self._send_all()
            for frames in itertools.islice(iter(self._receive, None), _BURST):
                self._on_frames(frames)
            now = time.monotonic()
            if now >= due:
                self._on_tick(now, now - due)
                due = now + self._interval_s
        self._send_all()

    def _send_all(self) -> None:
        while self._outbox:
            self._on_item(self._outbox.popleft())

    def _receive(self) -> list[bytes] | None:
        try:
            frames = [self._socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while self._socket.rcvmore:
            frame = self._socket.recv()
            if len(frames) < 4:  # enough to see that there are too many
                frames.append(frame)
        return frames


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


class Server:
    """The coordinator's end of all control connections, on `host`:`port` (0: any free one; see `address`).

    Beats every `interval_s` seconds, and gives up a peer that was silent for `patience_s`. Peers are told apart by a
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
        self._roster = _Roster()  # the caller's
        self._inbox: _Inbox[tuple[Notice, bytes]] = _Inbox()
        self._peers: dict[bytes, _Peer] = {}  # the thread's, as all below
        self._ended: deque[bytes] = deque(maxlen=4096)  # sessions whose hello, sent again, opens nothing
        self._told: deque[tuple[bytes, bytes]] = deque(maxlen=256)  # a refusal is said once, not once per message
        self._socket = _open_socket(zmq.ROUTER, max_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a closed connection is an error, not a silent loss
        try:
            _bind(self._socket, f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            if error.errno == errno.EADDRINUSE:
                message = f"port: {host}:{port} is in use; choose another, or 0 for any free one"
                raise OSError(errno.EADDRINUSE, message) from None
            message = f"host, port: cannot listen on {host}:{port} ({error}); give an IPv4 address of this machine"
            raise ValueError(message) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """For `Client`; of the form "tcp://127.0.0.1:40123"."""
        self._loop = _Loop(self._socket, interval_s, self._on_item, self._on_frames, self._on_tick, self._on_end)

    def receive(self, timeout_s: float) -> Notice | None:
        item = self._inbox.get(timeout_s)
        return self._roster.note(*item) if item is not None else None

    def send(self, peer: str, payload: bytes) -> None:
        self._seal.check_payload(payload)
        self._loop.put((self._roster.session(peer), payload))

    def peers(self) -> list[str]:
        return list(self._roster.here)

    def close(self) -> None:
        self._loop.close()

    def _on_item(self, item: tuple[bytes, bytes]) -> None:
        session, payload = item
        if session in self._peers:  # else its Lost is on the way to the caller
            self._transmit(self._peers[session], _DATA, payload)

    def _on_frames(self, frames: list[bytes]) -> None:
        route, *frames = frames
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self.rejected[message] += 1
            if message in ("version", "token"):
                refusal = _PREFIX.pack(_MAGIC, VERSION, _REFUSED)  # not sealed: the other could not check it
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
            if message.kind == _DATA:
                self._inbox.put((Received(peer=peer.name, payload=message.payload), peer.session))
            elif message.kind == _BYE:
                self._drop(peer, message.payload.decode(errors="replace"))

    def _on_stranger(self, route: bytes, message: _Message) -> None:
        if message.kind != _HELLO or message.sequence != 1 or message.session in self._ended:
            self.rejected["stale"] += 1
            goodbye = self._seal.pack(_BYE, message.session, 0, b"it was given up as lost before")
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
        self._transmit(peer, _WELCOME)

    def _on_tick(self, now: float, away_s: float) -> None:
        for peer in list(self._peers.values()):
            peer.heard = min(now, peer.heard + away_s)  # a pause of this process is not the peer's silence
            if now - peer.heard > self._patience_s:
                self._drop(peer, f"silent for {now - peer.heard:.1f} s")
            elif peer.is_unreachable:  # since the last tick, so that its last messages have been read
                self._drop(peer, "its connection was closed without a goodbye")
            else:
                self._transmit(peer, _BEAT)

    def _on_end(self, problem: Exception | None) -> bool:
        for peer in self._peers.values() if problem is None else []:
            self._deliver(peer.route, self._seal.pack(_BYE, peer.session, 0, b"the coordinator has closed"))
        closed = ConnectionError(f"the control connections of {self.address} are closed")
        failed = RuntimeError(f"the control connections of {self.address} have failed: {problem!r}")
        self._inbox.put(closed if problem is None else failed)
        return problem is None

    def _drop(self, peer: _Peer, reason: str) -> None:
        del self._peers[peer.session]
        self._ended.append(peer.session)
        self._inbox.put((Lost(peer=peer.name, reason=reason), peer.session))
        self._deliver(peer.route, self._seal.pack(_BYE, peer.session, 0, reason.encode()))

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
        self._inbox: _Inbox[bytes] = _Inbox()
        self._session = os.urandom(8)
        self._num_sent = self._num_received = 0
        self._heard = time.monotonic()
        self._socket = _open_socket(zmq.DEALER, max_bytes)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ValueError(f"address: {address!r}: {error}; give the server's `address`") from None
        self._transmit(_HELLO, name.encode())  # no other thread has the socket yet
        self._loop = _Loop(self._socket, interval_s, self._on_item, self._on_frames, self._on_tick, self._on_end)
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
        self._seal.check_payload(payload)
        if self._end is not None:
            raise type(self._end)(*self._end.args)
        self._loop.put(payload)

    def close(self) -> None:
        self._loop.close()

    def _on_item(self, payload: bytes) -> None:
        if self._end is None:
            self._transmit(_DATA, payload)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self._end is not None:
            return
        message = self._seal.unpack(frames)
        if isinstance(message, str):
            self._on_unsealed(frames, message)
        elif message.session != self._session:
            self.rejected["stale"] += 1
        elif message.kind == _BYE:
            reason = message.payload.decode(errors="replace")
            self._finish(ConnectionError(f"{self.address} dropped {self.name!r}: {reason}; join anew as a new Client"))
        elif message.sequence <= self._num_received:
            self.rejected["duplicate"] += 1
        elif message.sequence > self._num_received + 1:
            self._give_up(f"messages {self._num_received + 1} to {message.sequence - 1} are missing")
        else:
            self._num_received, self._heard = message.sequence, time.monotonic()
            if message.kind in (_DATA, _WELCOME):  # the empty welcome is the constructor's
                self._inbox.put(message.payload)

    def _on_unsealed(self, frames: list[bytes], reason: str) -> None:
        self.rejected[reason] += 1
        # A refusal cannot be checked. It can only end what has not begun, and its words are ours.
        if self._num_received or reason not in ("version", "header"):
            return
        _, version, kind = _PREFIX.unpack_from(frames[0])
        if kind == _REFUSED and version != VERSION:
            versions = f"the coordinator's is {version}, {self.name!r} has {VERSION}"
            self._finish(ValueError(f"protocol version: {versions}; start both from the same installation"))
        elif kind == _REFUSED:
            self._finish(ValueError("launch token: not the coordinator's; start both from the same launcher"))

    def _on_tick(self, now: float, away_s: float) -> None:
        if self._end is not None:
            return
        self._heard = min(now, self._heard + away_s)  # a pause of this process is not the coordinator's silence
        silent_s = now - self._heard
        if silent_s > self._patience_s:
            self._give_up(f"silent for {silent_s:.1f} s; is the coordinator running there?")
        elif self._num_received:
            self._transmit(_BEAT)

    def _on_end(self, problem: Exception | None) -> bool:
        if problem is not None:
            self._finish(RuntimeError(f"the control connection of {self.name!r} has failed: {problem!r}"))
        if self._end is not None:
            return False
        self._finish(ConnectionError(f"{self.name!r} has closed its connection to {self.address}"))
        self._transmit(_BYE, b"it left")
        return True

    def _give_up(self, problem: str) -> None:
        self._finish(ConnectionError(f"{self.address}: {problem}"))
        self._transmit(_BYE, f"it gave up: {problem}".encode())

    def _finish(self, end: Exception) -> None:
        if self._end is None:
            self._end = end
            self._inbox.put(end)

    def _transmit(self, kind: int, payload: bytes = b"") -> None:
        self._num_sent += 1
        self._socket.send_multipart(self._seal.pack(kind, self._session, self._num_sent, payload), zmq.NOBLOCK)


class _MemoryServer:
    """One end of `memory_pair`."""

    def __init__(self, client: _MemoryClient) -> None:
        self._client = client
        self._roster = _Roster()
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

    def close(self) -> None:
        self._is_open = False
        self._client.outbox.put(ConnectionError("the control connections in memory are closed"))
        self._client.finish("the coordinator has closed")


class _MemoryClient:
    """The other end of `memory_pair`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inbox: _Inbox[bytes] = _Inbox()
        self.outbox: _Inbox[Notice] = _Inbox()
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


def _check_times(interval_s: float, patience_s: float) -> None:
    if not 0 < interval_s < patience_s:
        raise ValueError(f"interval_s: {interval_s:g} must be above 0 and below patience_s, {patience_s:g}")


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Also where another end of this process has just closed: zmq gives a port back a moment later."""
    deadline = time.monotonic() + _BIND_S
    while True:
        try:
            socket.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _open_socket(kind: int, max_bytes: int) -> zmq.Socket[bytes]:
    """A socket in the process's one context, which is never terminated: libzmq's term() was seen to hang, about once
    in 2000 closes that raced with a peer's own."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # A little above `max_bytes`, so that what is too large is seen and counted; far above, zmq cuts the connection.
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * max_bytes + _HEADER.size)
    # No limit on what waits to be sent: a peer that does not read is given up after its patience, not blocked on.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 100)  # per connection, of up to MAXMSGSIZE each
    return socket
