"""Moves the KV of sequences between this replica's cache and a store, from which any replica or process can load it.

KV is a cache of a sequence's state. KV that is lost, damaged, or of other weights, another dtype or other tokens is
computed again: a move never changes a token, and an error of a store is never an error of the sequence.

*Which entries a handle has.* For each range of tokens, one for each group of KV heads that a shard holds
(`kvcache/store.py` has the format); shards with the same heads write them once. A sequence that leaves again adds the
range of the tokens that were computed since, so that each token's KV is written once, however many replicas generate
the sequence. Either all shards of a replica store or load a range, or none does.

*Who frees an entry.* A handle has one owner, and only the owner frees its entries, by `drop`. The owner is the replica
while it has the sequence, and the coordinator while it has the sequence's `Work`. Entries stay when they are loaded.
The replica frees them when the sequence ends or is aborted, and the coordinator when it aborts a sequence that waits
there. After `load` the replica frees those that cannot be used, all behind them, and those of a swap.

*What stays.* The entries that a process made outlive it. Their names contain the creator, and `owned_files.reclaim`
removes them, but not while their run goes on, since their owner may be in another process. Closing a store (new
weights, an interrupted call, the end of a run) removes all entries that its process has made, also those that another
process owns: the owner finds them missing, and the KV is computed again.

The interface is plain data (tokens, block ids, handles), so that a replica needs no tensors.
"""

from __future__ import annotations

import contextlib
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import torch
from torch import Tensor

from engines.config import ModelConfig
from engines.decoding import from_msgpack
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv, to_host
from engines.kvcache.store import KVContent, KVStore, load_heads, tokens_digests
from engines.parallel.collectives import Communicator
from engines.parallel.sharding import Shard, kv_heads
from engines.replica.kv_moves import KVMoves
from engines.replica.kv_thread import KVThread
from engines.replica.schedule import CachedKV, Sequence
from engines.replica.swap import SwapPolicy
from engines.sequence import KVHandle, KVPart


@dataclass(frozen=True, kw_only=True)
class _Written:
    """This shard's part of what was stored of a sequence's KV."""

    policy_version: int = 0
    parts: tuple[KVPart, ...] | None = None
    """() where another shard stores it; None when there was no room."""
    store: KVStore | None = None

    def drop(self) -> None:
        for part in self.parts or ():
            assert self.store is not None
            self.store.drop(part)


@dataclass(frozen=True, kw_only=True)
class _Ranges:
    """What was read of a sequence's KV, behind the first `num_known` tokens."""

    num_known: int = 0
    first_token: int = 0
    num_tokens: int
    """Leading tokens of the sequence that are usable: those that were read, and those before them."""
    layers: list[Tensor]
    """Each [2, num_tokens - first_token, heads, head_dim]; none where nothing was read."""


class KVMover:
    """Moves KV between this rank's cache and a store. All ranks of the replica make the same calls in the same order.

    In every method `policy_version` is the version of the replica's present weights.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        model: ModelConfig,
        shard: Shard,
        tensor_parallel: Communicator,
        swap_policy: SwapPolicy,
        store: KVStore | None = None,
    ) -> None:
        """Without a store no KV is kept, and KV that sequences bring is computed again.

        `tensor_parallel` is the group of the ranks that hold the model's shards.
        """
        assert tensor_parallel.size == shard.count
        self.store = store
        self.swap_policy = swap_policy
        self.moves = KVMoves()
        self._kv, self._group = kv, tensor_parallel
        self._dtype = str(kv.keys[0].dtype).removeprefix("torch.")
        self._heads = kv_heads(model, shard)
        earlier = kv_heads(model, replace(shard, index=shard.index - 1)) if shard.index else None
        self._reader = KVThread[_Ranges]("reading", tensor_parallel, undo=lambda _: None)
        self._writer = KVThread[_Written]("writing", tensor_parallel, undo=_Written.drop)
        self._in_background = True
        self.fetch_s: Callable[[int], float] = lambda num_tokens: 0.0
        """Seconds that it takes at least to read the KV of this many tokens ahead: of a paced run."""
        self._stores = earlier != self._heads  # else an earlier shard has the same heads, and stores them

    def use(self, store: KVStore, *, in_background: bool = True) -> None:
        """Sets a store that can be made only after the engine, as that of a coordinated rollout with its own token.

        Without `in_background`, KV is loaded and stored in the steps that need it.
        """
        self.store, self._in_background = store, in_background

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        """Stores the KV of leaving sequences. Returns for each what is stored of it then: what it had before where a
        shard's new part found no room."""
        before = [cached.stored for cached in leaving]
        if self.store is None:
            return before
        return self.moves.left(self._store_all(self.store, leaving, policy_version), before)

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        """Stores the KV of a preempted sequence; returns None when the policy is against it or there is no room."""
        if self.store is None or not cached.num_tokens:
            return None
        counts = cached.num_tokens, cached.num_common
        if not self.swap_policy.swaps(*counts, self.store, num_stored=cached.num_stored):
            return None
        num_bytes = self.moves.stored_bytes
        (handle,) = self._store_all(self.store, [cached], policy_version)
        if handle is not None:
            self.moves.num_swapped_out += 1
            self.moves.swapped_out_bytes += self.moves.stored_bytes - num_bytes
        return handle

    def fetch(self, sequence: Sequence, num_known: int, policy_version: int) -> bool:
        """See `Mover.fetch`."""
        handle, last = sequence.kv, len(sequence.state.tokens) - 1
        if self.store is None or handle is None or not self._in_background or not self._fits(handle, policy_version):
            return False
        lacking = handle.lacking(num_known, last)
        if not lacking:
            return False
        num_bytes = sum(part.num_bytes for parts in lacking for part in parts)
        if not self._reader.has_room(num_bytes):
            return False
        read = partial(self._read, self.store, handle, sequence.state.tokens, num_known)
        least_s = self.fetch_s(min(last, handle.num_tokens) - num_known)
        self._reader.start(sequence, read, num_bytes=num_bytes, least_s=least_s)
        return True

    def fetched(self, *, waits: bool) -> list[Sequence]:
        """See `Mover.fetched`."""
        ready, seconds = self._reader.ready(waits=waits)
        self.moves.waited_s += seconds
        return ready

    def hand_over(self, expected: Sequence, sequence: Sequence) -> None:
        """See `Mover.hand_over`."""
        self._reader.hand_over(expected, sequence)

    def store_later(self, sequence: Sequence, policy_version: int) -> bool:
        """See `Mover.store_later`. Its KV is copied at once, as its blocks are about to be others'."""
        cached = sequence.cached
        first = cached.num_stored
        if self.store is None or not self._in_background or first >= cached.num_tokens:
            return False
        content, store = self._content("", first, cached.num_tokens - first, policy_version), self.store
        num_bytes = content.num_bytes * self._group.size
        if not self._writer.has_room(num_bytes):
            return False
        stores, tokens = self._stores, cached.tokens[: cached.num_tokens]
        layers = list(to_host(read_kv(self._kv, cached.blocks, len(tokens), first=first))) if stores else []

        def write() -> _Written:
            if not stores:
                return _Written(policy_version=policy_version, parts=())
            (digest,) = tokens_digests(tokens, [len(tokens)])
            try:
                part = store.export(replace(content, tokens_digest=digest), layers)
            except Exception as error:  # of one shard alone, perhaps: all must hear that it has no part
                warnings.warn(f"KV of sequence {sequence.state.sequence_id}: cannot be stored: {error!r}", stacklevel=2)
                return _Written()
            return _Written(policy_version=policy_version, parts=None if part is None else (part,), store=store)

        self._writer.start(sequence, write, num_bytes=num_bytes)
        return True

    def stored(self, *, waits: bool) -> list[tuple[Sequence, KVHandle | None]]:
        """See `Mover.stored`."""
        ready, seconds = self._writer.ready(waits=waits)
        self.moves.waited_s += seconds
        written = [self._writer.take(one, given_up=_Written()) or _Written() for one in ready]
        before = [one.kv for one in ready]
        handles = self._agree(before, [one.parts for one in written], [one.policy_version for one in written])
        return list(zip(ready, self.moves.left(handles, before), strict=True))

    def is_storing(self, sequence: Sequence) -> bool:
        return self._writer.has(sequence)

    def forget(self, sequence: Sequence | None = None) -> None:
        self._reader.forget(sequence)
        self._writer.forget(sequence)

    def close(self, *, waits: bool = True) -> None:
        """Ends the threads that read ahead and that store; with `waits`, after waiting for what they do."""
        self._reader.close(waits=waits)
        self._writer.close(waits=waits)

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[tuple[int, KVHandle | None]]:
        """Loads the KV of admitted sequences, up to the first range that not every shard can read.

        Returns for each sequence the number of tokens whose KV is now in the cache, and what stays stored. Blocks that
        were filled before are not written: others may share them.
        """
        fetched = [self._fetched(one) for one in arriving]
        mine = array("q", (self._load(*pair, policy_version) for pair in zip(arriving, fetched, strict=True)))
        # All shards must schedule alike, but a file may be missing for one of them only. After this all have read.
        told = [array("q", data) for data in self._group.all_gather_bytes(mine.tobytes())]
        results = []
        for one, ranges, num_usable in zip(arriving, fetched, map(min, zip(*told, strict=True)), strict=True):
            num_tokens, kept, freed = self.moves.taken_on(one, num_usable, was_fetched=ranges is not None)
            self._free(freed)
            results.append((num_tokens, kept))
        return results

    def drop(self, handle: KVHandle | None) -> None:
        """Frees the entries of a handle that is no longer needed."""
        if handle is not None:
            self._free(handle.parts)

    def _fetched(self, one: Sequence) -> _Ranges | None:
        """Returns what was read ahead for an admitted sequence; None if that is nothing, or less than it needs."""
        ranges = self._reader.take(one, given_up=_Ranges(num_tokens=0, layers=[]))
        return ranges if ranges is not None and ranges.num_known <= one.num_computed else None

    def _free(self, parts: Iterable[KVPart]) -> None:
        if self._group.rank == 0:
            self._drop(parts)

    def _drop(self, parts: Iterable[KVPart]) -> None:
        if self.store is not None:
            for part in parts:
                self.store.drop(part)

    def _store_all(self, store: KVStore, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        mine = [self._store(store, cached, policy_version) for cached in leaving]
        return self._agree([cached.stored for cached in leaving], mine, [policy_version] * len(mine))

    def _agree(
        self,
        stored: Items[KVHandle | None],
        mine: Items[tuple[KVPart, ...] | None],
        policy_versions: Items[int],
    ) -> list[KVHandle | None]:
        """Returns handles of what was `stored` before and what each shard has stored now; None where one found no room.

        `mine` are this shard's parts, () where there are none.
        """
        if not mine:
            return []
        told = self._group.all_gather_bytes(msgspec.msgpack.encode(mine))
        everyone = [from_msgpack(one, list[tuple[KVPart, ...] | None]) for one in told]
        handles: list[KVHandle | None] = []
        for before, version, my_parts, *by_shard in zip(stored, policy_versions, mine, *everyone, strict=True):
            if None in by_shard:  # KV of only some heads is of no use
                self._drop(my_parts or ())
                handles.append(None)
                continue
            new = tuple(part for shard_parts in by_shard for part in shard_parts or ())
            self.moves.stored_tokens += new[0].num_tokens if new else 0
            self.moves.stored_bytes += sum(part.num_bytes for part in new)
            parts = new if before is None else before.parts + new
            handles.append(KVHandle(policy_version=version, dtype=self._dtype, parts=parts))
        return handles

    def _store(self, store: KVStore, cached: CachedKV, policy_version: int) -> tuple[KVPart, ...] | None:
        """Stores this shard's part of what is not stored yet, and returns it.

        Returns () when all is stored, or another shard stores it, and None when there is no room.
        """
        first = cached.num_stored
        if not self._stores or first >= cached.num_tokens:
            return ()
        layers = to_host(read_kv(self._kv, cached.blocks, cached.num_tokens, first=first))
        (digest,) = tokens_digests(cached.tokens, [cached.num_tokens])
        part = store.export(self._content(digest, first, cached.num_tokens - first, policy_version), layers)
        return None if part is None else (part,)

    def _load(self, arriving: Sequence, ranges: _Ranges | None, policy_version: int) -> int:
        """Loads this shard's part of what the prefix cache lacks, unless it has been read already. Returns how many
        leading tokens of what the sequence brings can be used, also those that the prefix cache has."""
        cached, handle = arriving.cached, arriving.kv
        if self.store is None or handle is None or not self._fits(handle, policy_version):
            return 0
        ranges = ranges or self._read(self.store, handle, cached.tokens, cached.num_tokens)
        first, last = max(ranges.first_token, cached.num_tokens), min(ranges.num_tokens, len(cached.tokens) - 1)
        if ranges.layers and first < last:
            fill_kv(self._kv, cached.blocks, last, ranges.layers, first=first, start=ranges.first_token)
        return ranges.num_tokens

    def _fits(self, handle: KVHandle, policy_version: int) -> bool:
        return handle.policy_version == policy_version and handle.dtype == self._dtype

    def _read(self, store: KVStore, handle: KVHandle, tokens: list[int], num_known: int) -> _Ranges:
        """Reads this shard's heads of the ranges that end behind the first `num_known` tokens, up to the first range
        that cannot be read: missing or damaged KV is computed again."""
        lacking = handle.lacking(num_known, len(tokens) - 1)
        if not lacking:
            return _Ranges(num_known=num_known, num_tokens=handle.num_tokens, layers=[])
        ends = [parts[0].first_token + parts[0].num_tokens for parts in lacking]
        num_tokens = first_token = lacking[0][0].first_token
        pieces: list[Iterator[Tensor]] = []
        with contextlib.suppress(ValueError):
            for parts, end, digest in zip(lacking, ends, tokens_digests(tokens, ends), strict=True):
                content = self._content(digest, num_tokens, end - num_tokens, handle.policy_version)
                pieces.append(load_heads(store, parts, content))
                num_tokens = end
        layers = [one[0] if len(one) == 1 else torch.cat(one, dim=1) for one in zip(*pieces, strict=True)]
        return _Ranges(num_known=num_known, first_token=first_token, num_tokens=num_tokens, layers=layers)

    def _content(self, digest: str, first_token: int, num_tokens: int, policy_version: int) -> KVContent:
        """Describes the KV of a range of tokens for this shard's KV heads; `digest`: of all tokens up to its end."""
        return KVContent(
            policy_version=policy_version,
            tokens_digest=digest,
            dtype=self._dtype,
            num_layers=len(self._kv.keys),
            first_token=first_token,
            num_tokens=num_tokens,
            first_head=self._heads.start,
            num_heads=self._heads.stop - self._heads.start,
            head_dim=self._kv.keys[0].shape[-1],
        )
