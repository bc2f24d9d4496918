"""What makes a frame of a run's own: the launch token, and the header that it seals. Torch-free."""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

VERSION: Final = 1
MAX_BYTES: Final = 64 << 20
"""Of one frame's payload: a longer message travels in parts."""
PREFIX: Final = struct.Struct("<4sHB")  # magic, version, kind: the same in all versions, so that they can tell
HEADER: Final = struct.Struct("<4sHB8s8sQQ16s")  # prefix, token id, session, sequence number, payload length, MAC
MAC_SIZE: Final = 16
MAGIC: Final = b"CRTL"
HELLO, WELCOME, DATA, BEAT, BYE, REFUSED, PART = range(1, 8)
_SEALED: Final = (HELLO, WELCOME, DATA, BEAT, BYE, PART)


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

    def __init__(self, token: bytes, *, is_server: bool, max_bytes: int = MAX_BYTES) -> None:
        if len(token) != 32:
            raise ValueError(f"launch token: {len(token)} bytes, must be 32; use new_token()")
        self.max_bytes = max_bytes
        # A hash of 256 random bits betrays nothing, and tells another launch's message from an altered one.
        self._token_id = blake2b(token, digest_size=8, person=b"token-id").digest()
        # Each direction has its own MAC, so that nobody's messages can be sent back to them.
        up, down = (blake2b(key=token, digest_size=MAC_SIZE, person=person) for person in (b"to-server", b"to-client"))
        self._outgoing, self._incoming = (down, up) if is_server else (up, down)

    def pack(self, kind: int, session: bytes, sequence: int, payload: bytes = b"") -> list[bytes]:
        head = HEADER.pack(MAGIC, VERSION, kind, self._token_id, session, sequence, len(payload), bytes(MAC_SIZE))
        head = head[:-MAC_SIZE]
        return [head + _mac(self._outgoing, head, payload), payload]

    def unpack(self, frames: list[bytes]) -> Message | str:
        """The message, or the reason not to take it. Never raises, whatever the bytes."""
        if len(frames) != 2:
            return "frames"
        header, payload = frames
        if len(header) < PREFIX.size or not header.startswith(MAGIC):
            return "magic"
        if PREFIX.unpack_from(header)[1] != VERSION:
            return "version"
        if len(header) != HEADER.size:
            return "header"
        _, _, kind, token_id, session, sequence, length, mac = HEADER.unpack(header)
        if max(length, len(payload)) > self.max_bytes:
            return "oversized"
        if length != len(payload):
            return "truncated"
        if not hmac.compare_digest(token_id, self._token_id):
            return "token"
        if not hmac.compare_digest(mac, _mac(self._incoming, header[:-MAC_SIZE], payload)):
            return "forged"
        return Message(kind, session, sequence, payload) if kind in _SEALED else "kind"

    def parts(self, payload: bytes) -> list[tuple[int, bytes]]:
        """A message's payload as frames of at most `max_bytes`: kinds and payloads, the last of them `DATA`."""
        ends = range(self.max_bytes, max(1, len(payload)), self.max_bytes)
        pieces = [(PART, payload[end - self.max_bytes : end]) for end in ends]
        return [*pieces, (DATA, payload[len(pieces) * self.max_bytes :])]


def _mac(keyed: blake2b, head: bytes, payload: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(head)
    mac.update(payload)
    return mac.digest()
