"""The header of a bucket's message: which bucket it is, on which base it stands, and checksums of both.

A *bucket* is a run of logical elements in a model's canonical flat order. Torch-free.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from engines.constraints import WholeNumber, check_fields

DType = Literal["bfloat16", "float16", "float32"]
Model = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", description="32 hexadecimal digits")]
Length = Annotated[int, Meta(ge=1, le=2**32, description="an integer from 1 to 2^32")]

BIT_TYPES: Final[dict[DType, Any]] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
"""Weights are arrays of their bits."""
FORMAT: Final = 2
MAGIC: Final = b"curtailW"
DENSE, SPARSE, PAPER, RAW = range(4)
_DTYPES: Final[tuple[DType, ...]] = ("bfloat16", "float16", "float32")
_HEADER = struct.Struct("<8sHBBB16sQQqqQQQI")
_CRC = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Names a bucket at a version, and the version that its receiver must have. Raises ValueError for a bad field."""

    model: Model
    """Fingerprint of the model: its names and shapes, in the canonical order."""
    dtype: DType
    start: WholeNumber
    """Its first logical element."""
    length: Length
    """Logical elements in it."""
    version: WholeNumber
    base_version: WholeNumber | None = None
    """The version whose bits are the base. None: no base is needed, or there is none."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of its bits."""
        return self.length * np.dtype(BIT_TYPES[self.dtype]).itemsize


class Header(NamedTuple):
    magic: bytes
    format: int
    dtype: int
    coding: int
    low_planes: int
    """Low bytes of a gap that are in planes of their own."""
    model: bytes
    start: int
    length: int
    base_version: int
    """-1: none."""
    version: int
    num_changed: int
    gap_bytes: int
    payload_bytes: int
    payload_checksum: int


def read_bucket(data: bytes | bytearray | memoryview) -> Bucket:
    """Returns what a whole, undamaged message is, by its header; its `base_version` is None where it is dense.

    Raises ValueError for any other bytes. Nothing is decoded, so a relay can check what it keeps.
    """
    return bucket_of(checked_header(memoryview(data)))


def dtype_of(name: str, value: str) -> DType:
    """Returns the dtype. Raises ValueError, with the option's name, for one that no relay takes."""
    for dtype in _DTYPES:
        if value == dtype:
            return dtype
    raise ValueError(f"{name}={value!r}: weights travel by a relay in 16 or 32 bits; give bfloat16 or float32")


def num_written(message: bytes) -> int | None:
    """Returns the elements that a message of ours changes; None if it is dense."""
    header = Header(*_HEADER.unpack_from(message))
    return None if header.coding in (DENSE, RAW) else header.num_changed


def seal(bucket: Bucket, payload: bytes | memoryview, *, coding: int, **sizes: int) -> bytes:
    fields = Header(
        magic=MAGIC,
        format=FORMAT,
        dtype=_DTYPES.index(bucket.dtype),
        coding=coding,
        low_planes=sizes.get("low_planes", 0),
        model=bytes.fromhex(bucket.model),
        start=bucket.start,
        length=bucket.length,
        base_version=-1 if bucket.base_version is None else bucket.base_version,
        version=bucket.version,
        num_changed=sizes.get("num_changed", 0),
        gap_bytes=sizes.get("gap_bytes", 0),
        payload_bytes=memoryview(payload).nbytes,
        payload_checksum=zlib.crc32(payload),
    )
    header = _HEADER.pack(*fields)
    return b"".join((header, _CRC.pack(zlib.crc32(header)), payload))


def checked_header(view: memoryview) -> Header:
    """Raises ValueError unless the header is one of this format, undamaged, and the payload is what it says."""
    if len(view) < HEADER_BYTES:
        raise bad("header", len(view), f"a message has at least {HEADER_BYTES} bytes")
    header = Header(*_HEADER.unpack_from(view))
    if (header.magic, header.format) != (MAGIC, FORMAT):
        raise bad("format", header.format, f"expected {FORMAT}, behind the mark {MAGIC!r}, not {header.magic!r}")
    if _CRC.unpack_from(view, _HEADER.size)[0] != zlib.crc32(view[: _HEADER.size]):
        raise bad("header_checksum", _CRC.unpack_from(view, _HEADER.size)[0], "the header is damaged")
    if header.payload_bytes != len(view) - HEADER_BYTES:
        raise bad("payload_bytes", header.payload_bytes, f"{len(view) - HEADER_BYTES} bytes came")
    if header.payload_checksum != zlib.crc32(view[HEADER_BYTES:]):
        raise bad("payload_checksum", header.payload_checksum, "the payload is damaged")
    if header.coding > RAW:
        raise bad("coding", header.coding, "unknown")
    if (header.coding in (DENSE, RAW)) != (header.base_version == -1):
        raise bad("base_version", header.base_version, "dense buckets have none (-1), all others have one")
    return header


def bucket_of(header: Header) -> Bucket:
    if header.dtype >= len(_DTYPES):
        raise bad("dtype", header.dtype, "unknown")
    return Bucket(
        model=header.model.hex(),
        dtype=_DTYPES[header.dtype],
        start=header.start,
        length=header.length,
        version=header.version,
        base_version=None if header.base_version == -1 else header.base_version,
    )


def bad(field: str, value: object, problem: str) -> ValueError:
    return ValueError(f"bucket of weights: {field}={value!r}: {problem}")
