"""A run's launch token, and the message headers that it authenticates. Torch-free."""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

VERSION: Final = 6
MAX_BYTES: Final = 64 << 20
"""Most bytes of one frame's payload; a longer message is sent in parts."""
PREFIX: Final = struct.Struct("<4sHB")  # magic, version, kind: the same in all versions, so that errors can name both
HEADER: Final = struct.Struct("<4sHB8sQ16s")  # prefix, session, sequence number, MAC of these and the payload
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
        # Each direction has its own MAC, so that a message cannot be sent back to its sender.
        up, down = (blake2b(key=token, digest_size=MAC_SIZE, person=person) for person in (b"to-server", b"to-client"))
        self._outgoing, self._incoming = (down, up) if is_server else (up, down)

    def pack(self, kind: int, session: bytes, sequence: int, payload: bytes = b"") -> list[bytes]:
        head = HEADER.pack(MAGIC, VERSION, kind, session, sequence, bytes(MAC_SIZE))[:-MAC_SIZE]
        return [head + _mac(self._outgoing, head, payload), payload]

    def unpack(self, frames: list[bytes]) -> Message | str:
        """Returns the message, or the reason to reject it. Never raises, for any bytes."""
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
    """One side of a joined connection: numbers its messages, and accepts the other side's once each and in order."""

    def __init__(self, seal: Seal, session: bytes, max_bytes: int) -> None:
        self.id = session
        self._seal, self._max_bytes = seal, max_bytes
        self.num_received = 0
        self.num_bytes_sent = self.num_bytes_received = 0
        """Of all frames, headers included."""
        self._num_sent = 0
        self._heard = time.monotonic()
        self._parts: list[bytes] = []

    def pack(self, kind: int, payload: bytes = b"") -> list[bytes]:
        self._num_sent += 1
        self.num_bytes_sent += HEADER.size + len(payload)
        return self._seal.pack(kind, self.id, self._num_sent, payload)

    def pack_data(self, payload: bytes) -> Iterator[list[bytes]]:
        """Yields a message of any length in frames of at most `max_bytes`."""
        last = max(0, len(payload) - 1) // self._max_bytes * self._max_bytes
        for start in range(0, last, self._max_bytes):
            yield self.pack(PART, payload[start : start + self._max_bytes])
        yield self.pack(DATA, payload[last:])

    def takes(self, message: Message) -> bool:
        """Returns False for a repeated message. Raises ConnectionError if messages before this one are missing."""
        if message.sequence > self.num_received + 1:
            raise ConnectionError(f"messages {self.num_received + 1} to {message.sequence - 1} are missing")
        is_next = message.sequence > self.num_received
        if is_next:
            self.num_received, self._heard = message.sequence, time.monotonic()
            self.num_bytes_received += HEADER.size + len(message.payload)
        return is_next

    def join_parts(self, message: Message) -> bytes | None:
        """Returns the whole message when this is its last frame, None before."""
        self._parts.append(message.payload)
        if message.kind == PART:
            return None
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def silent_s(self, now: float, away_s: float) -> float:
        """Returns the seconds since the other side's last message, without the `away_s` of a pause of this process."""
        self._heard = min(now, self._heard + away_s)
        return now - self._heard


def _mac(keyed: blake2b, head: bytes, payload: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(head)
    mac.update(payload)
    return mac.digest()
