"""Moves KV between the ranks' caches when they regroup, and gives the caches their new shapes (PAT §4.3).

A layer at a time, only blocks that hold KV of sequences that go on, and only heads that a rank lacks (or, as PAT does,
all heads of these blocks to all ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engines.config import Exchange
from engines.kvcache.kept import Source
from engines.kvcache.paged import PagedKVCache
from engines.parallel.collectives import Communicator
from engines.parallel.parts import Interval, Part, exchange, lacking, reuse_storage


@dataclass(frozen=True, kw_only=True)
class KVMove:
    """The caches of a group of ranks before and after a regroup; sequences are by rank of the group."""

    group: Communicator
    how: Exchange
    before: Sequence[int]
    """Replica of each rank; in `after`, too."""
    after: Sequence[int]
    heads_before: Sequence[Interval]
    heads_after: Sequence[Interval]
    arrivals: Mapping[int, Sequence[Source]]
    """For each replica after, the blocks that it gets."""

    def heads(self, holder: int, member: int) -> list[Interval]:
        """Returns the heads that a rank takes from the holder's blocks."""
        held = [
            heads if replica_id == self.before[holder] else (0, 0)
            for replica_id, heads in zip(self.before, self.heads_before, strict=True)
        ]
        wanted = lacking(held, self.heads_after[member], member)
        return [(start, stop) for source, start, stop in wanted if source == holder]

    def sent(self, holder: int) -> list[int]:
        """Returns the blocks of the holder's replica that any replica gets, each once."""
        mine = self.before[holder]
        return list(dict.fromkeys(block for gets in self.arrivals.values() for one, block in gets if one == mine))


@torch.inference_mode()
def migrate_kv(kv: PagedKVCache, move: KVMove, num_blocks: int, blocks: Sequence[int]) -> int:
    """Gives the cache `num_blocks` blocks with this rank's heads after, and writes its arrivals to `blocks`, bit for
    bit. All other contents are lost; memory that is released stays so. All ranks of the group call it together.

    Returns the bytes that this rank lacked.
    """
    me, members = move.group.rank, range(move.group.size)
    _, size, _, dim = kv.keys[0].shape
    sent = [move.sent(holder) for holder in members]
    heads = {(holder, member): move.heads(holder, member) for holder in members for member in members}

    def index(items: Sequence[int]) -> Tensor:
        return torch.tensor(items, dtype=torch.int64, device=kv.keys[0].device)

    places = [{block: number for number, block in enumerate(one)} for one in sent]

    def rows(holder: int, member: int) -> Tensor:
        """Returns the places among the holder's sent blocks of those that the member gets."""
        coming = move.arrivals[move.after[member]]
        return index([places[holder][block] for replica_id, block in coming if replica_id == move.before[holder]])

    taken = {pair: rows(*pair) for pair in heads if me in pair}
    gets = list(zip(move.arrivals[move.after[me]], blocks, strict=True))
    targets = [index([to for (one, _), to in gets if one == move.before[holder]]) for holder in members]

    def parts(holder: int, member: int) -> list[Part]:
        first, chosen = move.heads_before[holder][0], taken[holder, member]
        return [
            Part(
                array,
                partial(_take, rows=chosen, heads=(start - first, stop - first)),
                torch.Size((len(chosen), size, stop - start, dim)),
            )
            for start, stop in heads[holder, member]
            for array in (0, 1)
            if len(chosen)
        ]

    shapes = [
        [torch.Size((len(sent[holder]), size, last - first, dim))] * 2
        for holder, (first, last) in enumerate(move.heads_before)
    ]
    is_needed = any(heads[pair] and len(sent[pair[0]]) for pair in heads)
    mine, leaving = move.heads_after[me], index(sent[me])
    kept = (max(mine[0], move.heads_before[me][0]), min(mine[1], move.heads_before[me][1]))
    num_bytes = 0
    for caches in zip(kv.keys, kv.values, strict=True):
        arrays = [cache.index_select(0, leaving) for cache in caches]
        received = exchange(move.group, move.how, arrays, shapes, parts) if is_needed else [[] for _ in members]
        for cache, array in zip(caches, arrays, strict=True):
            is_released = not cache.untyped_storage().size()
            reuse_storage(cache, (num_blocks + 1, size, mine[1] - mine[0], dim))
            if is_released:
                cache.untyped_storage().resize_(0)
                continue
            if kept[0] < kept[1]:
                first = move.heads_before[me][0]
                piece = _take(array, taken[me, me], (kept[0] - first, kept[1] - first))
                _write(cache, targets[me], (kept[0] - mine[0], kept[1] - mine[0]), piece)
        for holder in members:
            intervals = [one for one in heads[holder, me] for _ in caches] if received[holder] else []
            for number, ((start, stop), piece) in enumerate(zip(intervals, received[holder], strict=True)):
                _write(caches[number % 2], targets[holder], (start - mine[0], stop - mine[0]), piece)
                num_bytes += piece.nbytes
    kv.scratch_block = num_blocks
    return num_bytes


def _write(cache: Tensor, rows: Tensor, heads: Interval, piece: Tensor) -> None:
    cache[:, :, heads[0] : heads[1]].index_copy_(0, rows, piece)


def _take(array: Tensor, rows: Tensor, heads: Interval) -> Tensor:
    return array[:, :, heads[0] : heads[1]].index_select(0, rows)
