"""Moves the KV of sequences between this replica's cache and a store, from which any replica or process can load it.

KV is a cache of a sequence's state. KV that is lost, damaged, or of other weights, another dtype or other tokens is
computed again: a move never changes a token, and an error of a store is never an error of the sequence.

*Which entries a handle has.* One for each group of KV heads that a shard holds (`kvcache/store.py` has the format);
shards with the same heads write them once. Either all shards of a replica store or load a sequence's KV, or none does.

*Who frees an entry.* A handle has one owner, and only the owner frees its entries, by `drop`. The owner is the replica
while the sequence waits there, and the coordinator while it has the sequence's `Work`. The replica frees the entries
after `load`, whether the KV could be used or not, and when a sequence is aborted; the coordinator frees the entries of
a sequence that ended or was lost.

*What stays.* The entries that a process made outlive it. Their names contain the creator, and `owned_files.reclaim`
removes them, but not while their run goes on, since their owner may be in another process. Closing a store (new
weights, an interrupted call, the end of a run) removes all entries that its process has made, also those that another
process owns: the owner finds them missing, and the KV is computed again.

The interface is plain data (tokens, block ids, handles), so that a replica needs no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import msgspec

from engines.config import ModelConfig
from engines.kvcache.paged import PagedKVCache, fill_kv, read_kv, to_host
from engines.kvcache.store import KVContent, KVStore, load_heads, tokens_digest
from engines.parallel.collectives import Communicator
from engines.parallel.sharding import Shard, kv_heads
from engines.replica.moves import KVMoves
from engines.replica.scheduler import CachedKV, Sequence
from engines.replica.swap import SwapPolicy
from engines.sequence import KVHandle, KVPart


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
        self._stores = earlier != self._heads  # else an earlier shard has the same heads, and stores them

    def use(self, store: KVStore) -> None:
        """Sets a store that can be made only after the engine, as that of a coordinated rollout with its own token."""
        self.store = store

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        """Stores the KV of leaving sequences. Returns a handle for each, None where a shard's part found no room."""
        if self.store is None:
            return [None] * len(leaving)
        handles = self._store_all(self.store, leaving, policy_version)
        self.moves.num_exported += sum(handle is not None for handle in handles)
        self.moves.num_refused += handles.count(None)
        return handles

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        """Stores the KV of a preempted sequence; returns None when the policy is against it or there is no room."""
        if self.store is None or not cached.num_tokens:
            return None
        if not self.swap_policy.swaps(cached.num_tokens, cached.num_common, self.store):
            return None
        (handle,) = self._store_all(self.store, [cached], policy_version)
        if handle is not None:
            self.moves.num_swapped_out += 1
            self.moves.swapped_out_bytes += handle.num_bytes
        return handle

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[int]:
        """Loads the KV of admitted sequences where every shard can read its heads; frees its entries in any case.

        Returns for each sequence the number of tokens whose KV is now in the cache. A sequence's last token is not
        loaded, since its logits are needed. Blocks that were filled before are not written: others may share them.
        """
        mine = [self._load(one, policy_version) for one in arriving]
        # All shards must schedule alike, but a file may be missing for one of them only. After this all have read.
        told = self._group.all_gather_bytes(bytes(num > 0 for num in mine))
        agreed = [all(flags) for flags in zip(*told, strict=True)]
        for one, usable in zip(arriving, agreed, strict=True):
            assert one.kv is not None
            if one.is_swapped_out:
                self.moves.num_swapped_in += usable
                self.moves.swapped_in_bytes += usable * one.kv.num_bytes
            else:
                self.moves.num_imported += usable
                self.moves.num_recomputed += not usable
            self.moves.moved_tokens += usable * max(0, one.kv.num_tokens - one.num_computed)
            self.drop(one.kv)
        return [num if usable else one.num_computed for one, num, usable in zip(arriving, mine, agreed, strict=True)]

    def drop(self, handle: KVHandle | None) -> None:
        """Frees the entries of a handle that is no longer needed."""
        if handle is not None and self.store is not None and self._group.rank == 0:
            for part in handle.parts:
                self.store.drop(part)

    def _store_all(self, store: KVStore, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        if not leaving:
            return []
        mine = [self._store(store, cached, policy_version) for cached in leaving]
        decode = msgspec.msgpack.Decoder(list[tuple[KVPart, ...] | None]).decode
        everyone = [decode(told) for told in self._group.all_gather_bytes(msgspec.msgpack.encode(mine))]
        handles: list[KVHandle | None] = []
        for cached, my_parts, *by_shard in zip(leaving, mine, *everyone, strict=True):
            if None in by_shard:  # KV of only some heads is of no use
                for part in my_parts or ():
                    store.drop(part)
                handles.append(None)
                continue
            self.moves.moved_tokens += cached.num_tokens
            parts = tuple(part for shard_parts in by_shard for part in shard_parts or ())
            handles.append(
                KVHandle(num_tokens=cached.num_tokens, policy_version=policy_version, dtype=self._dtype, parts=parts)
            )
        return handles

    def _store(self, store: KVStore, cached: CachedKV, policy_version: int) -> tuple[KVPart, ...] | None:
        """Stores this shard's part, and returns it; () when another shard stores it, None when there is no room."""
        if not self._stores:
            return ()
        layers = to_host(read_kv(self._kv, cached.blocks, cached.num_tokens))
        part = store.export(self._content(cached.tokens, cached.num_tokens, policy_version), layers)
        return None if part is None else (part,)

    def _load(self, arriving: Sequence, policy_version: int) -> int:
        """Loads this shard's part. Returns the number of tokens then in the cache, 0 when the stored KV is unusable."""
        cached, handle = arriving.cached, arriving.kv
        if self.store is None or handle is None:
            return 0
        num_tokens = min(handle.num_tokens, len(cached.tokens) - 1)
        if num_tokens < 1 or handle.policy_version != policy_version or handle.dtype != self._dtype:
            return 0
        if num_tokens <= cached.num_tokens:
            return cached.num_tokens  # all that it brings was found in the prefix cache
        try:
            wanted = self._content(cached.tokens, handle.num_tokens, policy_version)
            layers = load_heads(self.store, handle.parts, wanted)
        except ValueError:  # missing or damaged: recomputing is always right
            return 0
        fill_kv(self._kv, cached.blocks, num_tokens, layers, first=cached.num_tokens)
        return num_tokens

    def _content(self, tokens: list[int], num_tokens: int, policy_version: int) -> KVContent:
        """Describes the KV of the first `num_tokens` tokens for this shard's KV heads."""
        return KVContent(
            policy_version=policy_version,
            tokens_digest=tokens_digest(tokens[:num_tokens]),
            dtype=self._dtype,
            num_layers=len(self._kv.keys),
            num_tokens=num_tokens,
            first_head=self._heads.start,
            num_heads=self._heads.stop - self._heads.start,
            head_dim=self._kv.keys[0].shape[-1],
        )
