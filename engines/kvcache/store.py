"""Stored KV: the interface of a store, and the format of its entries.

An *entry* is one piece of stored KV: all layers of some neighbouring KV heads, for a range of a sequence's tokens. A
`KVPart` names it. An entry begins with a header of `HEADER_BYTES` bytes: a mark, the format's number, a checksum, and
the entry's `KVContent`. Then follow the layers, each [2 (keys, values), num_tokens, num_heads, head_dim]. Entries are
cut by heads, so that replicas of any TP degree can read the entries of any other (`load_heads`), and each range of
tokens is cut by heads as the replica that wrote it was. An entry of another format is refused, and its KV computed
again.
"""

from __future__ import annotations

import errno
import hashlib
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from engines.decoding import DecodeError, from_msgpack
from engines.sequence import KVPart

MAGIC = b"curtailK"
FORMAT = 3
HEADER_BYTES = 512
_PREFIX = struct.Struct("<8sIII")  # magic, format, CRC-32 of the layers, bytes of the encoded KVContent that follows


@dataclass(frozen=True, kw_only=True)
class KVContent:
    """Describes an entry's KV: two entries of equal content are interchangeable."""

    policy_version: int
    tokens_digest: str
    """Of all tokens up to the range's end, on which its KV depends: see `tokens_digests`."""
    dtype: str
    num_layers: int
    first_token: int
    num_tokens: int
    first_head: int
    num_heads: int
    head_dim: int

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        return (2, self.num_tokens, self.num_heads, self.head_dim)

    @property
    def num_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return 2 * self.num_layers * self.num_tokens * self.num_heads * self.head_dim * dtype.itemsize

    def part(self, location: str) -> KVPart:
        return KVPart(
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            first_head=self.first_head,
            num_heads=self.num_heads,
            location=location,
            num_bytes=self.num_bytes,
        )


class KVStore(Protocol):
    """Keeps KV outside of the caches. Replicas that move sequences to each other must reach the same entries."""

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        """Stores a copy of the layers, each `content.layer_shape` on the CPU; returns None when there is no room."""
        ...

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        """Returns the layers, each `content.layer_shape` on the CPU: read-only, and usable even after a `drop`.

        Raises ValueError when the entry is missing, damaged, or of other content.
        """
        ...

    def drop(self, part: KVPart) -> None:
        """Frees the entry; a missing entry, or an entry of another store, is no error."""
        ...

    def tier_for(self, num_bytes: int) -> Tier | None:
        """Returns the tier that would now store an entry of this many bytes; None when no tier has room."""
        ...


class Tier(NamedTuple):
    """A store whose entries all cost about the same."""

    name: str
    store: KVStore


def tokens_digests(tokens: Items[int], ends: Iterable[int]) -> list[str]:
    """Returns a digest of the tokens up to each of these ends, which must ascend."""
    digests, hashed, start = [], hashlib.blake2b(digest_size=16), 0
    for end in ends:
        hashed.update(array("q", tokens[start:end]).tobytes())
        digests.append(hashed.hexdigest())
        start = end
    return digests


def load_heads(store: KVStore, parts: Items[KVPart], wanted: KVContent) -> Iterator[Tensor]:
    """Returns an iterator over the layers of the wanted KV heads, joined from a range's parts, cut in any way.

    Raises ValueError at once, before the first layer, when a needed part is unusable or a head is in no part.
    """
    pieces: list[tuple[Items[Tensor], slice]] = []
    head, stop = wanted.first_head, wanted.first_head + wanted.num_heads
    while head < stop:
        part = next((p for p in parts if p.first_head <= head < p.first_head + p.num_heads), None)
        if part is None:
            raise ValueError(f"KVHandle.parts: KV head {head} is in none of {len(parts)} parts; recompute the KV")
        layers = store.load(part, replace(wanted, first_head=part.first_head, num_heads=part.num_heads))
        end = min(stop, part.first_head + part.num_heads)
        pieces.append((layers, slice(head - part.first_head, end - part.first_head)))
        head = end
    return (_join([layers[i][:, :, heads] for layers, heads in pieces]) for i in range(wanted.num_layers))


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def encode_header(content: KVContent, checksum: int) -> bytes:
    """Returns an entry's header; `checksum` is the CRC-32 of its layers' bytes."""
    encoded = msgspec.msgpack.encode(content)
    assert _PREFIX.size + len(encoded) <= HEADER_BYTES
    return _PREFIX.pack(MAGIC, FORMAT, checksum, len(encoded)) + encoded


def entry_memory(num_bytes: int) -> memoryview:
    """Returns memory for an entry that is read. Raises OSError when there is none.

    It is memory that the allocator has used before, if possible: a new mapping takes ten times as long to fill, since
    each of its pages is first made by the kernel.
    """
    try:
        return np.empty(num_bytes, np.uint8).data
    except MemoryError:
        raise OSError(errno.ENOMEM, f"no memory for {num_bytes} bytes") from None


def layers_in(memory: memoryview, content: KVContent, location: str) -> list[Tensor]:
    """Returns the layers of an entry's bytes, each `content.layer_shape`; they keep the memory alive.

    Raises ValueError when the entry is of other content, or damaged.
    """
    _check_header(bytes(memory[:HEADER_BYTES]), content, location, zlib.crc32(memory[HEADER_BYTES:]))
    layers = torch.frombuffer(memory, dtype=getattr(torch, content.dtype), offset=HEADER_BYTES)
    return list(layers.view(content.num_layers, *content.layer_shape))


def _check_header(header: bytes, content: KVContent, location: str, found_checksum: int) -> None:
    magic, version, checksum, length = _PREFIX.unpack_from(header)
    if magic != MAGIC or version != FORMAT:
        raise ValueError(f"{location}: is no KV of format {FORMAT}; recompute the KV")
    try:
        found = from_msgpack(header[_PREFIX.size : _PREFIX.size + length], KVContent)
    except DecodeError:
        raise ValueError(f"{location}: its header is damaged; recompute the KV") from None
    for field in fields(KVContent):
        have, want = getattr(found, field.name), getattr(content, field.name)
        if have != want:
            raise ValueError(f"{location}: {field.name}={have!r}, wanted {want!r}; recompute the KV")
    if checksum != found_checksum:
        raise ValueError(f"{location}: its content is damaged; recompute the KV")
