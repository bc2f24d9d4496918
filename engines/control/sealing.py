"""What makes a frame of a run's own: the launch token, and the header that it seals. Torch-free."""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

VERSION: Final = 2
MAX_BYTES: Final = 64 << 20
"""Of one frame's payload: a longer message travels in parts."""
PREFIX: Final = struct.Struct("<4sHB")  # magic, version, kind: the same in all versions, so that each is named
HEADER: Final = struct.Struct("<4sHB8sQ16s")  # prefix, session, sequence number, MAC of all that and the payload
MAC_SIZE: Final = 16
MAGIC: Final = b"CRTL"
HELLO, WELCOME, DATA, BEAT, BYE, REFUSED, PART = range(1, 8)


def new_token() -> bytes:
    """A launch token: 32 random bytes that authenticate every message of one run."""
    return os.urandom(32)


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    session: bytes
    sequence: int
    payload: bytes


class Seal:
    """Makes and checks the two frames of a message, for one side."""

    def __init__(self, token: bytes, *, is_server: bool) -> None:
        if len(token) != 32:
            raise ValueError(f"launch token: {len(token)} bytes, must be 32; use new_token()")
        # Each direction has its own MAC, so that nobody's messages can be sent back to them.
        up, down = (blake2b(key=token, digest_size=MAC_SIZE, person=person) for person in (b"to-server", b"to-client"))
        self._outgoing, self._incoming = (down, up) if is_server else (up, down)

    def pack(self, kind: int, session: bytes, sequence: int, payload: bytes = b"") -> list[bytes]:
        head = HEADER.pack(MAGIC, VERSION, kind, session, sequence, bytes(MAC_SIZE))[:-MAC_SIZE]
        return [head + _mac(self._outgoing, head, payload), payload]

    def unpack(self, frames: list[bytes]) -> Message | str:
        """The message, or the reason not to take it. Never raises, whatever the bytes."""
        if len(frames) != 2 or len(frames[0]) < PREFIX.size or not frames[0].startswith(MAGIC):
            return "header"
        header, payload = frames
        if PREFIX.unpack_from(header)[1] != VERSION:
            return "version"
        if len(header) != HEADER.size:
            return "header"
        _, _, kind, session, sequence, mac = HEADER.unpack(header)
        if not hmac.compare_digest(mac, _mac(self._incoming, header[:-MAC_SIZE], payload)):
            return "token"
        return Message(kind, session, sequence, payload)


class Session:
    """One side of a connection that has been joined: numbers what it sends, takes what comes once and in order."""

    def __init__(self, seal: Seal, session: bytes, max_bytes: int) -> None:
        self.id = session
        self._seal, self._max_bytes = seal, max_bytes
        self.num_received = 0
        self._num_sent = 0
        self._heard = time.monotonic()
        self._parts: list[bytes] = []

    def pack(self, kind: int, payload: bytes = b"") -> list[bytes]:
        self._num_sent += 1
        return self._seal.pack(kind, self.id, self._num_sent, payload)

    def pack_data(self, payload: bytes) -> Iterator[list[bytes]]:
        """A message of any length, in frames of at most `max_bytes`."""
        last = max(0, len(payload) - 1) // self._max_bytes * self._max_bytes
        for start in range(0, last, self._max_bytes):
            yield self.pack(PART, payload[start : start + self._max_bytes])
        yield self.pack(DATA, payload[last:])

    def takes(self, message: Message) -> bool:
        """False for one that came before. Raises ConnectionError where some are missing in front of it."""
        if message.sequence > self.num_received + 1:
            raise ConnectionError(f"messages {self.num_received + 1} to {message.sequence - 1} are missing")
        is_next = message.sequence > self.num_received
        if is_next:
            self.num_received, self._heard = message.sequence, time.monotonic()
        return is_next

    def join_parts(self, message: Message) -> bytes | None:
        """The whole message, once its last frame is here."""
        self._parts.append(message.payload)
        if message.kind == PART:
            return None
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def silent_s(self, now: float, away_s: float) -> float:
        """How long the other side has been silent; a pause of this process, of `away_s`, is not the other's silence."""
        self._heard = min(now, self._heard + away_s)
        return now - self._heard


def _mac(keyed: blake2b, head: bytes, payload: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(head)
    mac.update(payload)
    return mac.digest()
