"""Buckets of weights as bytes: what changed since a named base, without a lost bit (ROSE §4.2, "Sparsity-aware").

A *bucket* is a run of logical elements in a model's canonical flat order, as NumPy arrays of their bits: uint16 for
bfloat16 and float16, uint32 for float32. NaN, -0.0 and infinities are bits like others. `encode` makes the smaller of
two messages:

- *sparse*: the gaps between changed positions, and what is added there to the bits as integers, modulo 2^16 or 2^32.
  A weight that moves to its neighbour changes by 1 or -1, which takes one bit; the XOR of the bits takes two.
- *dense*: all bits. It needs no base, so late joiners, and receivers that missed a version, can use it, too.

The paper's own form, `mode="paper"`, adds bfloat16 values in coordinates (COO). Its sums are rounded, so bits are lost.

A message is a header of `HEADER_BYTES` bytes and sections. A section is one array of bytes, deflated where that makes
it smaller. Receivers check all of it; damage is a ValueError that names the field of the header. What is decoded takes
memory in proportion to the expected bucket's length, whatever the bytes say. Torch-free.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engines.native.bits import changes
from engines.relay.message import (
    BIT_TYPES,
    DENSE,
    HEADER_BYTES,
    PAPER,
    RAW,
    SPARSE,
    Bucket,
    Header,
    bad,
    bucket_of,
    checked_header,
    seal,
)

Bits = NDArray[np.unsignedinteger[Any]]
Mode = Literal["lossless", "raw", "paper"]

_SECTION = struct.Struct("<Q")
_ESCAPE = 255
_MEAN_GAP = 369
"""Mean gap from which gaps lose a byte to a plane of its own: half of them then exceed a byte, and the shortest code of
Huffman, one bit, fits best."""
_SPARSE_ENOUGH = 4
"""A sparse message this many times smaller than the bits is not compared with a dense one, which costs ten times as
much to make: trained weights do not deflate so far."""
_RAW_FROM = 8
"""In raw mode, a bucket of which this many times the changed elements are more than all is dense: deflating them takes
longer than a fast link."""
_PROBE = 1 << 14


@dataclass(frozen=True)
class Update:
    """A message that was decoded and checked: new bits, or what makes them of old ones."""

    bucket: Bucket
    """Its `base_version` is None where no base is needed."""
    positions: NDArray[np.int64] | None
    """Changed elements, ascending, from the bucket's start. None: all elements."""
    values: Bits
    """Per changed element: what is added to its bits; in paper mode, the bits of the bfloat16 that is added to its
    value. Where `positions` is None: its bits."""
    is_rounded: bool = False
    """In paper mode."""

    def new_bits(self, old: Bits, which: Any = slice(None)) -> Bits:
        """Returns the new bits of changed elements; `which` indexes `positions`, and `old` has the bits there before.

        So a shard patches the elements that it holds. Only a checksum of all weights tells whether the base was right.
        """
        values = self.values[which]
        if self.positions is None:
            return values
        if not self.is_rounded:
            return old + values
        with np.errstate(invalid="ignore", over="ignore"):
            return _bf16(_float32(old) + _float32(values))


def encode(bits: Bits, bucket: Bucket, base: Bits | None = None, *, mode: Mode = "lossless") -> bytes:
    """Returns the message that makes `bits` [length] of `base` [length], or of nothing where `base` is None.

    The message says by its header whether a base is needed: it is dense where that is smaller. Raw mode is for links
    that are faster than zlib: dense bits are not deflated, and many changes are dense. Raises ValueError for arrays
    that are not the bucket's, and in paper mode for a dtype other than bfloat16.
    """
    _check_bits("bits", bits, bucket)
    if (base is None) != (bucket.base_version is None):
        raise ValueError(f"base_version={bucket.base_version!r}: give it together with the base's bits, or neither")
    if mode == "paper":
        if base is None or bucket.dtype != "bfloat16":
            raise ValueError(f"mode='paper': adds bfloat16 to a base; this bucket is {bucket.dtype}, base={base!r:.30}")
        return _encode_paper(bits, bucket, base)
    if base is None:
        return _encode_dense(bits, bucket, mode)
    _check_bits("base", base, bucket)
    positions, differences = changes(bits, base)
    if mode == "raw" and _RAW_FROM * len(positions) > len(bits):
        return _encode_dense(bits, replace(bucket, base_version=None), mode)
    gaps, low_planes = _gap_sections(positions)
    added = _planes(_zigzag(differences))
    payload = _pack(*gaps, *added)
    coded = {"coding": SPARSE, "low_planes": low_planes, "num_changed": len(positions), "gap_bytes": len(gaps[0])}
    if _SPARSE_ENOUGH * len(payload) > bucket.num_bytes:
        dense = _encode_dense(bits, replace(bucket, base_version=None), mode)
        if len(dense) < HEADER_BYTES + len(payload):
            return dense
    return seal(bucket, payload, **coded)


def read_update(data: bytes | bytearray | memoryview, expected: Bucket) -> Update:
    """Returns what the message changes. Raises ValueError, which names the field, unless it is undamaged and for this
    bucket at this version, and needs no base or the one of `expected.base_version`."""
    view = memoryview(data)
    header = checked_header(view)
    found = bucket_of(header)
    for name in ("model", "dtype", "start", "length", "version"):
        if (value := getattr(found, name)) != (wanted := getattr(expected, name)):
            raise bad(name, value, f"expected {wanted!r}")
    if found.base_version not in (None, expected.base_version):
        have = "no version" if expected.base_version is None else f"version {expected.base_version}"
        raise bad("base_version", found.base_version, f"the receiver has {have}; ask for a dense bucket")
    payload = view[HEADER_BYTES:]
    if header.coding == RAW:
        if len(payload) != found.num_bytes:
            raise bad("payload_bytes", len(payload), f"raw bits have {found.num_bytes}")
        return Update(found, None, np.frombuffer(payload, BIT_TYPES[found.dtype]))
    if header.coding == DENSE:
        sections = _unpack(payload, [header.length] * np.dtype(BIT_TYPES[found.dtype]).itemsize)
        return Update(found, None, _join(sections, BIT_TYPES[found.dtype]))
    if header.num_changed > header.length:
        raise bad("num_changed", header.num_changed, f"more than the length {header.length}")
    if header.coding == PAPER:
        return _read_paper(found, header, payload)
    return _read_sparse(found, header, payload)


def apply(update: Update, base: Bits | None = None) -> Bits:
    """Returns the bucket's new bits [length], in an array of their own; `base` [length] stays as it is.

    With another base than the sender's they are wrong. Raises ValueError for none, or one of another length.
    """
    if update.positions is None:
        return update.values
    if base is None:
        raise bad("base_version", update.bucket.base_version, "give the base's bits, or ask for a dense bucket")
    _check_bits("base", base, update.bucket)
    bits = base.copy()
    bits[update.positions] = update.new_bits(base[update.positions])
    return bits


def _encode_dense(bits: Bits, bucket: Bucket, mode: Mode) -> bytes:
    if mode == "raw":
        return seal(bucket, bits.data, coding=RAW)
    return seal(bucket, _pack(*_planes(bits)), coding=DENSE)


def _encode_paper(bits: Bits, bucket: Bucket, base: Bits) -> bytes:
    """Coordinates: 4 bytes of index and 2 of bfloat16 for each element whose value changes."""
    _check_bits("base", base, bucket)
    with np.errstate(invalid="ignore", over="ignore"):
        added = _bf16(_float32(bits) - _float32(base))
    positions = np.flatnonzero(added & 0x7FFF)
    payload = positions.astype("<u4").tobytes() + added[positions].tobytes()
    return seal(bucket, payload, coding=PAPER, num_changed=len(positions))


def _read_paper(bucket: Bucket, header: Header, payload: memoryview) -> Update:
    count = header.num_changed
    if len(payload) != 6 * count:
        raise bad("num_changed", count, f"{6 * count} bytes, but the payload has {len(payload)}")
    positions = np.frombuffer(payload, "<u4", count).astype(np.int64)
    _check_positions(positions, header.length)
    values = np.frombuffer(payload, "<u2", count, 4 * count)
    return Update(bucket, positions, values, is_rounded=True)


def _read_sparse(bucket: Bucket, header: Header, payload: memoryview) -> Update:
    count, kind = header.num_changed, BIT_TYPES[bucket.dtype]
    if header.low_planes > 3:
        raise bad("low_planes", header.low_planes, "at most 3")
    if not count <= header.gap_bytes <= count + header.length // _ESCAPE:
        raise bad("gap_bytes", header.gap_bytes, f"impossible for {count} gaps in {header.length} elements")
    planes = header.low_planes + np.dtype(kind).itemsize
    gaps, *others = _unpack(payload, [header.gap_bytes, *[count] * planes])
    ends = gaps != _ESCAPE
    if np.count_nonzero(ends) != count or (count and not ends[-1]):
        raise bad("num_changed", count, "the gaps are not as many")
    positions = np.cumsum(gaps, dtype=np.int64)[ends] << (8 * header.low_planes)
    positions += np.arange(count)
    for plane, low in enumerate(others[: header.low_planes]):
        positions += np.cumsum(low, dtype=np.int64) << (8 * plane)
    _check_positions(positions, header.length)
    values = _unzigzag(_join(others[header.low_planes :], kind))
    return Update(bucket, positions, values)


def _check_positions(positions: NDArray[np.int64], length: int) -> None:
    if len(positions) and (positions.min() < 0 or positions.max() >= length or (np.diff(positions) <= 0).any()):
        raise bad("length", length, "the changed positions do not ascend within it")


def _gap_sections(positions: NDArray[np.int64]) -> tuple[list[NDArray[np.uint8]], int]:
    """Returns the unchanged elements before each changed one as sections, and how many of these are planes.

    The low bytes are planes of their own, where gaps are long. The rest is a byte, with as many bytes of 255 before it
    as it takes: for random positions, these are independent of the byte, so that Huffman's code loses little.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    low_planes, mean = 0, gaps.mean() if len(gaps) else 0.0
    while mean >= _MEAN_GAP:
        low_planes, mean = low_planes + 1, mean / 256
    lows = [(gaps >> (8 * plane)).astype(np.uint8) for plane in range(low_planes)]
    escapes, rest = np.divmod(gaps >> (8 * low_planes), _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    coded = np.full(ends[-1] + 1 if len(ends) else 0, _ESCAPE, np.uint8)
    coded[ends] = rest
    return [coded, *lows], low_planes


def _zigzag(values: Bits) -> Bits:
    """0, -1, 1, -2, 2 ... as 0, 1, 2, 3, 4 ..., so that small changes of either sign have a high byte of 0."""
    return (values << 1) ^ np.negative(values >> (8 * values.itemsize - 1))


def _unzigzag(values: Bits) -> Bits:
    return (values >> 1) ^ np.negative(values & 1)


def _planes(values: Bits) -> Iterator[NDArray[np.uint8]]:
    """The lowest byte of each value, then the next one of each, and so on."""
    table = values.view(np.uint8).reshape(-1, values.itemsize)
    return (np.ascontiguousarray(table[:, plane]) for plane in range(values.itemsize))


def _join(planes: list[NDArray[np.uint8]], kind: Any) -> Bits:
    table = np.empty((len(planes[0]), len(planes)), np.uint8)
    for index, plane in enumerate(planes):
        table[:, index] = plane
    return table.reshape(-1).view(kind)


def _pack(*sections: NDArray[np.uint8]) -> bytes:
    packed = [_deflate(section) for section in sections]
    return b"".join(part for section in packed for part in (_SECTION.pack(len(section)), section))


def _deflate(section: NDArray[np.uint8]) -> bytes | memoryview:
    """Returns the section deflated, or as it is: where that is smaller, or where pieces of it do not shrink.

    Runs and Huffman's code only: these bytes repeat nothing else, and other matches made them larger.
    """
    if len(section) > 8 * _PROBE:
        pieces = [section[start : start + _PROBE] for start in range(0, len(section), len(section) // 4)]
        if all(len(_deflated(piece)) >= len(piece) for piece in pieces):
            return section.data
    deflated = _deflated(section)
    return deflated if len(deflated) < len(section) else section.data


def _deflated(section: NDArray[np.uint8]) -> bytes:
    stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return stream.compress(section.data) + stream.flush()


def _unpack(payload: memoryview, sizes: list[int]) -> list[NDArray[np.uint8]]:
    """Returns a section for each of these sizes, and takes no more memory than they say."""
    sections, start = [], 0
    for size in sizes:
        start, head = start + _SECTION.size, payload[start : start + _SECTION.size]
        packed = _SECTION.unpack(head)[0] if len(head) == _SECTION.size else len(payload) + 1
        part = payload[start : start + packed]
        if packed > size or len(part) != packed:
            raise bad("payload_bytes", len(payload), f"a section of {size} bytes cannot be in {packed} of them")
        start += packed
        sections.append(np.frombuffer(part if packed == size else _inflated(part, size), np.uint8))
    if start != len(payload):
        raise bad("payload_bytes", len(payload), f"its sections have {start}")
    return sections


def _inflated(part: memoryview, size: int) -> bytes:
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        section = stream.decompress(part, size + 1)
    except zlib.error as error:
        raise bad("payload", len(part), f"cannot be inflated ({error})") from None
    if len(section) != size or not stream.eof or stream.unused_data:
        raise bad("payload", len(part), f"does not inflate to the {size} bytes that its header says")
    return section


def _check_bits(name: str, bits: Bits, bucket: Bucket) -> None:
    if bits.dtype != BIT_TYPES[bucket.dtype] or bits.shape != (bucket.length,) or not bits.flags.c_contiguous:
        wanted = f"{np.dtype(BIT_TYPES[bucket.dtype])} [{bucket.length}], contiguous"
        raise ValueError(f"{name}: {bits.dtype} {[*bits.shape]}: must be {wanted}, for a bucket of {bucket.dtype}")


def _float32(bits: Bits) -> NDArray[np.float32]:
    """The values of these bits of bfloat16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bf16(values: NDArray[np.float32]) -> Bits:
    """The bits of bfloat16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
