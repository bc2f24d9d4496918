"""The messages between a reward runner and its worker process: length-prefixed msgpack over a socket pair."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from engines.decoding import from_msgpack

Message = TypeVar("Message")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Worker to runner, once: the reward function's arguments, or why it could not be loaded."""

    error: str = ""
    is_async: bool = False
    accepted: list[str] | None = None
    """Keyword arguments that the function declares; None when it takes any (`**kwargs`)."""
    required: list[str] = field(default_factory=list)
    """Declared arguments without a default."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The keyword arguments of one call of the reward function: a list per name, all of length `num_items`."""

    num_items: int
    arguments: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Runner to worker: calls to make, all at the same time if the function is async."""

    parts: dict[int, Part]
    """Parts by a unique number, which the part's result repeats."""
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Worker to runner, one per part, in the order in which they finish."""

    part: int
    kind: Literal["ok", "raised", "timed_out"]
    values: list[float | None] = field(default_factory=list)
    """One per item when `kind` is "ok"; None stands for a value that is not a finite number."""
    error: str = ""
    """What was raised, or the first value that is not a finite number."""


def send(sock: socket.socket, message: object, *, deadline: float | None = None) -> None:
    """Sends. Raises `TimeoutError` when `deadline` (of `time.monotonic`) passes, `OSError` when the peer is gone."""
    _set_deadline(sock, deadline)
    payload = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


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
