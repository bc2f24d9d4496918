"""Collectives between ranks of one host through memory that all of them map: tens of microseconds where gloo takes
a millisecond, for any subgroup.

A rank writes its data, then its sequence number, by plain stores without fences. This is correct only if other cores
see the stores of a core in the order in which it made them (x86-64's total store order), and never see half of an
aligned 8-byte store. `supported()` returns whether this machine guarantees that; on others (ARM) use gloo.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engines.parallel.collectives import SUMMED_IN, as_bytes, bytes_of_source, gather_bytes, send_bytes

SLOT_BYTES = 2**18  # a chunk and its sum stay within a core's second-level cache
_LENGTH = struct.Struct("<q")  # the length of a broadcast's bytes, stored before them
LINE_BYTES = 64  # a cache line per rank: ranks that publish do not disturb each other
LINE_WORDS = LINE_BYTES // 8
PAGE_BYTES = 4096

# A waiting rank spins for some microseconds, then yields, then sleeps, so that an idle rank leaves its core to other
# threads. With more ranks than cores it sleeps early: sched_yield yields only within a session (Linux's autogroup), and
# torchrun gives each rank a session of its own, so that a yielding rank would keep its core for milliseconds.
NUM_SPINS = 40
YIELD_S, CROWDED_YIELD_S = 2e-3, 20e-6
SHORT_NAP_S, LONG_NAP_S = 50e-6, 1e-3
LONG_WAIT_S = 0.1

# From this size on, three or more ranks each sum one share and read the others' sums: one more wait, fewer additions.
SHARE_BYTES = 2**17

GAVE_UP = -1  # published instead of a sequence number
KINDS = ("all_reduce", "all_gather", "broadcast", "broadcast_bytes", "barrier", "all_to_all")
DTYPES = (*SUMMED_IN, torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)


def supported() -> bool:
    """Whether this machine keeps plain stores in order, as `SharedMemoryGroup` needs."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def region_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Returns a group's bytes in a segment: the ranks' lines, and two buffers, each of `size` slots and a result."""
    return _header_bytes(size) + 2 * (size + 1) * slot_bytes


class SharedMemoryGroup:
    """A `Communicator` for CPU tensors between ranks of one host.

    Each rank has a line (a sequence number and two tags) that it alone writes, and a slot in each of two buffers. A
    collective is one or two phases: write, publish the next sequence number, wait until all have published it, read.
    The buffers alternate: a rank that sees all ranks at phase n knows that all have read what was written before it.
    Messages longer than a slot are sent in chunks. Sums are taken in rank order, so every rank gets the same bits;
    bfloat16 and float16 are summed in float32 and rounded once.

    A tag encodes the collective, its dtype and its bytes: if ranks call different collectives, they raise RuntimeError
    instead of reading wrong data. After that, and after a timeout, the group refuses every call.
    """

    name = "shared memory"

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        slot_bytes: int,
        world_ranks: Sequence[int],
        crowded: bool,
    ) -> None:
        """`memory` is `region_bytes(size, slot_bytes)` of a segment, page-aligned and zero, the same on all ranks.

        Errors name `world_ranks` beside the group's own. `crowded` means that this host has more busy ranks than cores,
        so that a waiting rank must free its core. A wait longer than `timeout_s` raises RuntimeError.
        """
        assert size > 1 and slot_bytes % LINE_BYTES == 0 and len(memory) == region_bytes(size, slot_bytes)
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._yield_s = CROWDED_YIELD_S if crowded else YIELD_S
        self._slot_bytes = slot_bytes
        self._world_ranks = tuple(world_ranks)
        header = _header_bytes(size)
        # A memoryview's item is read and written by one aligned 8-byte move.
        self._words = memory[:header].cast("q")
        self._bytes = memory[header:]
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            self._slots = torch.frombuffer(memory[header:], dtype=torch.uint8).view(2, size + 1, slot_bytes)
        self._my_line = LINE_WORDS * rank
        self._lines = tuple(LINE_WORDS * other for other in range(size) if other != rank)
        self._phase = 0
        self._buffer = 0
        self._views: dict[tuple[torch.dtype, int], tuple[_Views, _Views]] = {}
        self._failure: str | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype in SUMMED_IN
        whole = _contiguous(tensor)
        flat = whole.view(-1)
        count, capacity = flat.numel(), self._slot_bytes // flat.element_size()
        tag = self._tag("all_reduce", flat)
        if count <= capacity:
            self._reduce_chunk(flat, tag)
        else:
            for chunk in flat.split(capacity):
                self._reduce_chunk(chunk, tag)
        return _into(tensor, whole)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self._tag("all_gather", tensor))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        assert 0 <= source < self.size
        whole = _contiguous(tensor)
        flat = as_bytes(whole)
        tag = self._tag("broadcast", tensor, source)
        for start in range(0, max(len(flat), 1), self._slot_bytes):
            chunk = flat[start : start + self._slot_bytes]
            slot = self._slots[self._next_buffer(), source, : len(chunk)]
            if self.rank == source:
                slot.copy_(chunk)
            self._meet(tag)
            if self.rank != source:
                chunk.copy_(slot)
        return _into(tensor, whole)

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Takes one phase for the ranks' counts, and one per `slot_bytes / (size - 1)` bytes of the largest part.

        If what a rank sends is not what the other expects, all ranks raise the same RuntimeError.
        """
        flat = _contiguous(tensor).view(-1)
        assert sum(sends) == len(flat) and len(sends) == len(receives) == self.size
        tag = self._tag("all_to_all", flat[:0])  # the ranks' bytes differ
        sent, expected = self._gather(torch.tensor([sends, receives]), tag).unbind(1)
        for source, target in (sent != expected.t()).nonzero().tolist():
            told = f"{self._named([source])} send {sent[source, target]} elements to {self._named([target])}"
            raise self._fail(f"all_to_all: {told}, which expect {expected[target, source]}")
        out = torch.empty(sum(receives), dtype=tensor.dtype)
        going, coming = _byte_parts(flat, sends), _byte_parts(out, receives)
        coming[self.rank].copy_(going[self.rank])
        largest = int(sent.fill_diagonal_(0).max()) * flat.element_size()
        room = self._slot_bytes // (self.size - 1)
        others = [rank for rank in range(self.size) if rank != self.rank]
        for start in range(0, largest, room):
            # A slot has one piece for each rank but its own: [from, to, bytes].
            slots = self._slots[self._next_buffer(), : self.size, : room * (self.size - 1)].unflatten(1, (-1, room))
            for other in others:
                chunk = going[other][start : start + room]
                slots[self.rank, other - (other > self.rank), : len(chunk)].copy_(chunk)
            self._meet(tag)
            for other in others:
                chunk = coming[other][start : start + room]
                chunk.copy_(slots[other, self.rank - (self.rank > other), : len(chunk)])
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return gather_bytes(data, self.all_gather)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Takes one phase if the bytes and their length fit into a slot, as a replica's commands of one step do."""
        mine = bytes_of_source(data) if self.rank == source else b""
        start = (self._next_buffer() * (self.size + 1) + source) * self._slot_bytes
        slot = self._bytes[start + _LENGTH.size : start + self._slot_bytes]
        if self.rank == source:
            _LENGTH.pack_into(self._bytes, start, len(mine))
            slot[: len(mine)] = mine[: len(slot)]
        self._meet(source << 8 | _KIND_CODES["broadcast_bytes"])
        (length,) = _LENGTH.unpack_from(self._bytes, start)
        head = bytes(slot[:length])
        if len(head) == length:
            return head
        return head + send_bytes(mine[len(head) :], partial(self.broadcast, source=source))

    def barrier(self) -> None:
        self._next_buffer()
        self._meet(_KIND_CODES["barrier"])

    def close(self) -> None:
        """Drops this rank's views of the segment. Others that still call will time out."""
        self._failure = self._failure or "it was closed"
        self._views.clear()
        self._slots = torch.empty(0, dtype=torch.uint8)
        self._bytes.release()
        self._words.release()

    def _gather(self, tensor: Tensor, tag: int) -> Tensor:
        mine = as_bytes(_contiguous(tensor))
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        out_bytes = as_bytes(out).view(self.size, -1) if len(mine) else out
        for start in range(0, max(len(mine), 1), self._slot_bytes):
            chunk = mine[start : start + self._slot_bytes]
            slots = self._slots[self._next_buffer(), : self.size, : len(chunk)]
            slots[self.rank].copy_(chunk)
            self._meet(tag)
            if len(chunk):
                out_bytes[:, start : start + len(chunk)].copy_(slots)
        return out

    def _reduce_chunk(self, chunk: Tensor, tag: int) -> None:
        buffer = self._next_buffer()
        views = self._views_of(chunk.dtype, chunk.numel())[buffer]
        views.slots[self.rank].copy_(chunk)
        self._meet(tag)
        if views.shares is None:
            _add_in_order(views.slots, chunk, views.wide)
            return
        # This rank writes its result, which all read after the next `_meet`; only it reads these parts of the slots.
        _add_in_order(views.shares, views.my_result, views.wide)
        self._meet(tag)
        chunk.copy_(views.result)

    def _next_buffer(self) -> int:
        """Returns 0 and 1 in turn. Raises RuntimeError when the group is closed or has failed."""
        if self._failure:
            raise RuntimeError(f"this group is of no use any more: {self._failure}")
        self._buffer ^= 1
        return self._buffer

    def _views_of(self, dtype: torch.dtype, count: int) -> tuple[_Views, _Views]:
        """Returns the views of both buffers; cached, since making them takes longer than a small sum."""
        key = (dtype, count)
        if key not in self._views:
            if len(self._views) >= 64:
                self._views.clear()
            with torch.inference_mode(False):
                self._views[key] = (self._make_views(0, dtype, count), self._make_views(1, dtype, count))
        return self._views[key]

    def _make_views(self, buffer: int, dtype: torch.dtype, count: int) -> _Views:
        rows = self._slots[buffer].view(dtype)[:, :count].unbind()
        slots, result = rows[: self.size], rows[self.size]
        start, stop = (count * self.rank // self.size, count * (self.rank + 1) // self.size)
        shared = self.size > 2 and count * dtype.itemsize >= SHARE_BYTES
        wide = None
        if SUMMED_IN[dtype] is not dtype:
            wide = torch.empty(stop - start if shared else count, dtype=SUMMED_IN[dtype])
        return _Views(
            slots=slots,
            result=result,
            shares=tuple(slot[start:stop] for slot in slots) if shared else None,
            my_result=result[start:stop],
            wide=wide,
        )

    def _meet(self, tag: int) -> None:
        """Publishes the next phase; returns when all ranks have, so that what they wrote before can be read."""
        words = self._words
        self._phase = phase = self._phase + 1
        # Two tags alternate: a rank may be at the next phase before another has compared this phase's tags.
        which = 1 + (phase & 1)
        words[self._my_line + which] = tag
        words[self._my_line] = phase
        for line in self._lines:
            if words[line] < phase:
                self._wait(line, phase, tag)
        for line in self._lines:
            if words[line + which] != tag:
                raise self._fail(self._mismatch(which))

    def _wait(self, line: int, phase: int, tag: int) -> None:
        words = self._words
        for _ in range(NUM_SPINS):
            if words[line] >= phase:
                return
        start = time.monotonic()
        while words[line] < phase:
            waited = time.monotonic() - start
            if words[line] == GAVE_UP or waited > self._timeout_s:
                failure = self._fail(self._absence(phase, tag))
                words[self._my_line] = GAVE_UP  # so that a rank that comes too late does not go on alone
                raise failure
            if waited < self._yield_s:
                os.sched_yield()
            else:
                time.sleep(SHORT_NAP_S if waited < LONG_WAIT_S else LONG_NAP_S)

    def _tag(self, kind: str, tensor: Tensor, source: int = 0) -> int:
        dtype = _DTYPE_CODES[tensor.dtype]
        return (tensor.nbytes * self.size + source) << 8 | dtype << 4 | _KIND_CODES[kind]

    def _describe(self, tag: int) -> str:
        kind = KINDS[tag & 15]
        if kind == "barrier":
            return kind
        if kind == "broadcast_bytes":
            return f"{kind} from {tag >> 8}"
        num_bytes, source = divmod(tag >> 8, self.size)
        dtype = str(DTYPES[tag >> 4 & 15]).removeprefix("torch.")
        if kind == "all_to_all":
            return f"{kind} of {dtype}"
        return f"{kind} of {num_bytes} bytes of {dtype}" + (f" from {source}" if kind == "broadcast" else "")

    def _absence(self, phase: int, tag: int) -> str:
        numbers = [self._words[LINE_WORDS * rank] for rank in range(self.size)]
        missing = [rank for rank, number in enumerate(numbers) if GAVE_UP < number < phase]
        gone = [rank for rank, number in enumerate(numbers) if number == GAVE_UP]
        parts = [f"{self._named(missing)} did not come within {self._timeout_s:g} s"] if missing else []
        parts += [f"{self._named(gone)} had given up waiting"] if gone else []
        return f"{KINDS[tag & 15]}: {'; '.join(parts)}"

    def _mismatch(self, which: int) -> str:
        calls: dict[int, list[int]] = {}
        for rank in range(self.size):
            calls.setdefault(self._words[LINE_WORDS * rank + which], []).append(rank)
        told = "; ".join(f"{self._named(ranks)} called {self._describe(tag)}" for tag, ranks in calls.items())
        return f"ranks called different collectives: {told}"

    def _named(self, ranks: Sequence[int]) -> str:
        return f"ranks {list(ranks)} (world ranks {[self._world_ranks[rank] for rank in ranks]})"

    def _fail(self, message: str) -> RuntimeError:
        self._failure = message
        return RuntimeError(message)


@dataclass(frozen=True)
class _Views:
    """One rank's views of one buffer, for a sum of `count` elements of one dtype."""

    slots: tuple[Tensor, ...]  # by rank, [count]
    result: Tensor  # [count]
    shares: tuple[Tensor, ...] | None  # the part of each slot that this rank sums; None if every rank sums all
    my_result: Tensor  # where this rank writes the sum of its shares
    wide: Tensor | None  # sums of 16-bit floats, before they are rounded


_KIND_CODES = {kind: code for code, kind in enumerate(KINDS)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def _add_in_order(parts: Sequence[Tensor], out: Tensor, wide: Tensor | None) -> None:
    if wide is None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return
    wide.copy_(parts[0])
    for part in parts[1:]:
        wide.add_(part)
    out.copy_(wide)


def _contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor if it is contiguous, else a copy; detached, as autograd must not see the slots."""
    assert tensor.is_cpu
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()


def _byte_parts(flat: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    return as_bytes(flat).split([count * flat.element_size() for count in counts])


def _into(tensor: Tensor, whole: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        tensor.detach().copy_(whole)
    return tensor


def _header_bytes(size: int) -> int:
    return -(-size * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
