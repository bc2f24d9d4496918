"""KV that leaves a cache and comes back, here, in another replica or in another process of the host.

A sequence's KV is a cache of its state: whatever goes wrong here is answered by recomputing it, never by other tokens.
Layers are handled one at a time, each [2 (keys, values), num_tokens, num_heads, head_dim], so that a move takes one
layer of extra memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import re
import shutil
import struct
import tempfile
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engines.kvcache.files import FileLedger, FileNames, family, free_memory_bytes
from engines.kvcache.paged import PagedKVCache, write_kv
from engines.parallel.segment import DEV_SHM, start_time
from engines.sequence import KVPart

MAGIC = b"curtailK"
FORMAT = 2
HEADER_BYTES = 512
_PREFIX = struct.Struct("<8sIII")  # magic, format, CRC-32 of the layers, bytes of the encoded KVContent that follows


@dataclass(frozen=True, kw_only=True)
class KVContent:
    """What a piece of stored KV must be to be of use: two pieces of equal content are interchangeable."""

    policy_version: int
    tokens_digest: str
    """`tokens_digest` of the tokens: KV of other ones is never taken for theirs."""
    dtype: str
    num_layers: int
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


class Tier(Protocol):
    """One kind of storage, of which all parts cost about the same. `export`, `load` and `drop`: see `KVStore`."""

    name: str

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None: ...

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]: ...

    def drop(self, part: KVPart) -> None: ...


class KVStore(Protocol):
    """Keeps KV outside of the caches. All replicas that move sequences to each other reach the same parts."""

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        """Keeps a copy of the layers, each `content.layer_shape`; None when there is no room."""
        ...

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        """The layers, each `content.layer_shape` on the CPU; not to be written to, but usable after a `drop`.

        Raises ValueError when the part is gone, damaged, or of other content.
        """
        ...

    def tier_for(self, num_bytes: int) -> Tier | None:
        """The tier that would now take a part of this many bytes; None when no tier has room."""
        ...

    def drop(self, part: KVPart) -> None:
        """Gives its room back; a part that is gone already, or not this store's, is no error."""
        ...


def tokens_digest(tokens: Items[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


# -- between a cache and layers


def read_kv(kv: PagedKVCache, blocks: list[int], num_tokens: int) -> Iterator[Tensor]:
    """Of each layer the KV of the first `num_tokens` tokens of a block table, [2, num_tokens, num_heads, head_dim]."""
    slots = _token_slots(kv, blocks, num_tokens)
    for keys, values in zip(kv.keys, kv.values, strict=True):
        layer = keys.new_empty((2, num_tokens, *keys.shape[2:]))
        for cache, out in zip((keys, values), layer, strict=True):
            torch.index_select(cache.view(-1, *cache.shape[2:]), 0, slots, out=out)
        yield layer


def fill_kv(kv: PagedKVCache, blocks: list[int], num_tokens: int, layers: Iterable[Tensor], *, first: int = 0) -> None:
    """Writes tokens `first` to `num_tokens` of each layer, as `read_kv` gives them, where the block table says.

    The blocks of the tokens before are left alone: others may hold them, too.
    """
    slots = _token_slots(kv, blocks, num_tokens)[first:]
    for keys, values, layer in zip(kv.keys, kv.values, layers, strict=True):
        for cache, new in zip((keys, values), layer, strict=True):
            write_kv(cache, slots, new[first:num_tokens].to(cache.device))


def to_host(layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """The layers on the CPU. From CUDA they come through pinned memory, the next one while one is being used."""
    ahead: tuple[Tensor, torch.cuda.Event] | None = None
    for layer in layers:
        if not layer.is_cuda:
            yield layer
            continue
        staged = torch.empty(layer.shape, dtype=layer.dtype, pin_memory=True).copy_(layer, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        if ahead is not None:
            ahead[1].synchronize()
            yield ahead[0]
        ahead = staged, arrived
    if ahead is not None:
        ahead[1].synchronize()
        yield ahead[0]


def _token_slots(kv: PagedKVCache, blocks: list[int], num_tokens: int) -> Tensor:
    """int64 [num_tokens]: block * block_size + offset of each token."""
    block_size, device = kv.keys[0].shape[1], kv.keys[0].device
    starts = torch.tensor(blocks, dtype=torch.int64, device=device) * block_size
    slots = (starts[:, None] + torch.arange(block_size, device=device)).flatten()
    assert num_tokens <= len(slots), f"{num_tokens} tokens in {len(blocks)} blocks of {block_size}"
    return slots[:num_tokens]


def load_heads(store: KVStore, parts: Items[KVPart], wanted: KVContent) -> Iterator[Tensor]:
    """The wanted KV heads, layer by layer, from whichever parts hold them, however these are cut.

    Raises ValueError, before the first layer is asked for, when a part cannot be used or a head is in none.
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


# -- files


class HostKVStore:
    """Parts as files in /dev/shm, which every process of the host and user that knows the run's token reads.

    Where /dev/shm is missing or full, in the temporary folder, with one warning. Names tell the creator, so that
    `reclaim` finds what a kill has left. What `load` has returned stays readable after a `drop`.
    """

    name = "host"

    def __init__(self, token: str, capacity_bytes: int, folders: Items[Path] | None = None) -> None:
        """Of all files that this process has made at most `capacity_bytes` bytes exist at any time.

        All processes of a run have the same `token`, which nobody else can guess.
        """
        self._names = FileNames("HostKVStore", token)
        self.files = FileLedger("HostKVStore", capacity_bytes)
        self._token = token
        self._folders = _resolve(folders)
        self._has_warned = False

    @property
    def capacity_bytes(self) -> int:
        return self.files.capacity_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of this process's files."""
        return self.files.num_bytes

    def tier_for(self, num_bytes: int) -> Tier | None:
        return self if self.files.has_room(HEADER_BYTES + num_bytes) else None

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        num_bytes = HEADER_BYTES + content.num_bytes
        if not self.files.has_room(num_bytes):
            return None
        for folder in self._folders:
            path = folder / self._names.new()
            try:
                with self.files.making(path, num_bytes):
                    _write(_create(path, num_bytes), content, layers)
            except OSError as error:
                self._warn(folder, num_bytes, error)
            else:
                return part_of(content, path)
        return None

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        path = self.path_of(part.location)
        with opened(path, content) as descriptor:
            # A private mapping: torch wants writable memory, the file stays as it is.
            memory = mmap.mmap(descriptor, HEADER_BYTES + content.num_bytes, access=mmap.ACCESS_COPY)
        layers = layers_in(memory, content, str(path))
        self.files.touch(path)
        return layers

    def drop(self, part: KVPart) -> None:
        with contextlib.suppress(ValueError):
            self.files.remove(self.path_of(part.location))

    def close(self) -> None:
        """Removes the files that this process has made, handed over or not."""
        self.files.clear()

    def path_of(self, location: str) -> Path:
        """Raises ValueError for a location that is not a file of this run: it came from outside."""
        path = Path(location)
        if path.parent not in self._folders or not self._names.has(path.name):
            raise ValueError(
                f"KVPart.location={location!r}: is no file of this run in {' or '.join(map(str, self._folders))}; "
                f"give all processes of a run the same token and TMPDIR"
            )
        return path

    def _warn(self, folder: Path, num_bytes: int, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        free = f", {shutil.disk_usage(folder).free / 2**20:.1f} MiB are free" if error.errno == errno.ENOSPC else ""
        warnings.warn(
            f"KV store: cannot take {num_bytes / 2**20:.1f} MiB in {folder} ({error.strerror}{free}); trying "
            f"{self._folders[-1]}, then recomputing. Give the machine a larger /dev/shm (docker run --shm-size) or the "
            f"store a smaller capacity_bytes than {self.capacity_bytes}",
            stacklevel=4,
        )


def reclaim(folders: Items[Path] | None = None, *, keep_token: str | None = None) -> list[Path]:
    """Removes this user's files of dead creators, never those of living ones; returns which.

    Keeps those of the run `keep_token`: its sequences may have moved on, and their creator be gone by right. What a
    process in another container has made cannot be judged, and stays.
    """
    pattern = re.compile(rf"{family()}-(\d+)-(\d+)-([0-9a-zA-Z]+)-[0-9a-f]+")
    removed = []
    for folder in _resolve(folders):
        for path in sorted(folder.glob(f"{family()}-*")):
            named = pattern.fullmatch(path.name)
            if named and named[3] != keep_token and start_time(int(named[1])) != int(named[2]):
                path.unlink(missing_ok=True)
                removed.append(path)
    return removed


def _resolve(folders: Items[Path] | None) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(folders if folders is not None else (DEV_SHM, Path(tempfile.gettempdir()))))


def part_of(content: KVContent, path: Path) -> KVPart:
    return KVPart(
        first_head=content.first_head,
        num_heads=content.num_heads,
        location=str(path),
        num_bytes=content.num_bytes,
    )


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    """A new file, mapped. Raises OSError where there is no room."""
    if path.parent == DEV_SHM and num_bytes > free_memory_bytes():
        raise OSError(errno.ENOMEM, "the machine's memory is in use")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Takes the pages now: a file that were only truncated to size would kill its writer by SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _write(memory: mmap.mmap, content: KVContent, layers: Iterable[Tensor]) -> None:
    for view, layer in zip(_layer_views(memory, content), layers, strict=True):
        view.copy_(layer)
    with memoryview(memory)[HEADER_BYTES:] as payload:
        header = encode_header(content, zlib.crc32(payload))
    memory[: len(header)] = header  # last: without it nobody takes the file


@contextlib.contextmanager
def opened(path: Path, content: KVContent) -> Iterator[int]:
    """A descriptor of a part's file. Raises ValueError when it cannot be read, or is not as long as it should be."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            num_bytes, wanted = os.fstat(descriptor).st_size, HEADER_BYTES + content.num_bytes
            if num_bytes != wanted:
                raise ValueError(f"{path}: has {num_bytes} bytes, {wanted} wanted; it is damaged, recompute the KV")
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); recompute the KV") from None


def encode_header(content: KVContent, checksum: int) -> bytes:
    """What a part's file begins with; `checksum` is the CRC-32 of its layers' bytes."""
    encoded = msgspec.msgpack.encode(content)
    assert _PREFIX.size + len(encoded) <= HEADER_BYTES
    return _PREFIX.pack(MAGIC, FORMAT, checksum, len(encoded)) + encoded


def _layer_views(memory: mmap.mmap, content: KVContent) -> list[Tensor]:
    """The file's layers, each `content.layer_shape`. They keep the mapping alive."""
    payload = torch.frombuffer(memory, dtype=getattr(torch, content.dtype), offset=HEADER_BYTES)
    return list(payload.view(content.num_layers, *content.layer_shape))


def layers_in(memory: mmap.mmap, content: KVContent, location: str) -> list[Tensor]:
    """The layers of a part's bytes, each `content.layer_shape`.

    Raises ValueError when they are of other content, or not what was written.
    """
    with memoryview(memory)[HEADER_BYTES:] as payload:
        _check_header(memory[:HEADER_BYTES], content, location, zlib.crc32(payload))
    return _layer_views(memory, content)


def _check_header(header: bytes, content: KVContent, path: str, found_checksum: int) -> None:
    magic, version, checksum, length = _PREFIX.unpack_from(header)
    if magic != MAGIC or version != FORMAT:
        raise ValueError(f"{path}: is no KV of format {FORMAT}; recompute the KV")
    try:
        found = msgspec.msgpack.decode(header[_PREFIX.size : _PREFIX.size + length], type=KVContent)
    except msgspec.MsgspecError:
        raise ValueError(f"{path}: its header is damaged; recompute the KV") from None
    for field in fields(KVContent):
        have, want = getattr(found, field.name), getattr(content, field.name)
        if have != want:
            raise ValueError(f"{path}: {field.name}={have!r}, wanted {want!r}; recompute the KV")
    if checksum != found_checksum:
        raise ValueError(f"{path}: its content is damaged; recompute the KV")
