"""Messages between a run and a process of user code: length-prefixed msgpack over a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import TypeVar

import msgspec

from engines.decoding import DecodeError, from_msgpack

Message = TypeVar("Message")
_LENGTH = struct.Struct("<Q")


def encode(message: object) -> bytes:
    """Returns the bytes of a message. Raises what msgspec raises for text or data that cannot be encoded."""
    payload = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(payload)) + payload


async def read(stream: asyncio.StreamReader, kind: type[Message], most: int = 2**63) -> Message:
    """Returns the next message of at most so many bytes. Raises `EOFError` or `OSError` when the peer is gone, and
    `DecodeError` when the message is longer, or not of this kind."""
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if length > most:
        raise DecodeError(f"a message of {length} bytes")
    return from_msgpack(await stream.readexactly(length), kind)


def send(sock: socket.socket, message: object, *, deadline: float | None = None) -> None:
    """Sends. Raises `TimeoutError` when `deadline` (of `time.monotonic`) passes, `OSError` when the peer is gone."""
    _set_deadline(sock, deadline)
    sock.sendall(encode(message))


def receive(sock: socket.socket, kind: type[Message], *, deadline: float | None = None) -> Message:
    """Returns the next message. Raises `TimeoutError` when `deadline` (of `time.monotonic`) passes, `EOFError` when the
    peer is gone, `ConnectionError` when the peer is gone and had not read all data sent to it, and
    `DecodeError` when the message is not of this kind."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, deadline))
    return from_msgpack(_receive_exactly(sock, length, deadline), kind)


def _receive_exactly(sock: socket.socket, num_bytes: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        _set_deadline(sock, deadline)
        received = sock.recv(min(num_bytes - len(data), 1 << 20))
        if not received:
            raise EOFError("the other process has closed the connection")
        data += received
    return data


def _set_deadline(sock: socket.socket, deadline: float | None) -> None:
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError("the deadline has passed")
    sock.settimeout(remaining)
