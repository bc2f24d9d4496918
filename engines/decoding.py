"""Values from bytes that another process, a socket or a file has given: the value, or one kind of error for any bytes.

Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec
from msgspec import DecodeError as DecodeError

T = TypeVar("T")


@overload
def from_msgpack(data: bytes | bytearray, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray, kind: Any) -> Any:
    """Returns the value of this type. Raises DecodeError, which is a ValueError, and nothing else."""
    return _decode(_msgpack(kind), data)


def from_json(data: bytes, kind: Any) -> Any:
    """Returns the value of this type. Raises DecodeError, which is a ValueError, and nothing else."""
    return _decode(_json(kind), data)


@functools.cache
def _msgpack(kind: Any) -> Callable[[bytes | bytearray], Any]:
    return msgspec.msgpack.Decoder(kind).decode


@functools.cache
def _json(kind: Any) -> Callable[[bytes | bytearray], Any]:
    return msgspec.json.Decoder(kind).decode


def _decode(decode: Callable[[bytes | bytearray], Any], data: bytes | bytearray) -> Any:
    try:
        return decode(data)
    except DecodeError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8; lists in lists in lists
        raise DecodeError(str(error)) from None
