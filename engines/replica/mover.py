"""KV that leaves this replica's cache and comes back, here, in another replica or in another process: the one place
where a sequence's KV moves between a cache and a store.

KV is a cache of a sequence's state. What is lost, damaged, or of other weights, another dtype or other tokens is
computed again: a move never changes a token, and no error of a store is an error of the sequence.

*Which entries a handle has.* One for each group of KV heads that a shard holds (`kvcache/store.py` has the format);
shards that hold the same heads write them once. All shards of a replica store and take on alike, or none does.

*Who frees an entry.* A handle has one owner, who alone frees its entries, by `drop`. The owner is the replica while the
sequence waits there, and the coordinator while it has the sequence's `Work`. `load` frees what it has taken on and what
it could not use, an abort what the sequence held, the coordinator what belonged to a sequence that ended or was lost.

*What stays.* When a process dies, the entries that it made outlive it: their names tell the creator, and
`owned_files.reclaim` removes them, but not while their run goes on, since their owner may be in another process. A
store that is closed (new weights, an interrupted call, the end of a run) removes all that its process has made, whoever
owns it: the owner finds them gone, and the KV is computed again.

What goes in and out is plain data (tokens, block ids, handles), so that a replica needs no tensors.
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

    `policy_version` is everywhere that of the weights which the replica has now.
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
        """Without a store nothing is kept, and what sequences bring is computed again.

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
        """For a store that can only be made after the engine: a coordinated rollout's, of its own token."""
        self.store = store

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        """Stores the KV of sequences that leave; None for those of which some shard's part found no room."""
        if self.store is None:
            return [None] * len(leaving)
        handles = self._store_all(self.store, leaving, policy_version)
        self.moves.num_exported += sum(handle is not None for handle in handles)
        self.moves.num_refused += handles.count(None)
        return handles

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        """Stores the KV of a sequence that has lost its blocks, where the policy says so and there is room."""
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
        """Takes on the KV that admitted sequences bring, where every shard can read its heads, and frees its entries.

        Returns for how many tokens of each KV is in the cache now. A sequence's last token is left to be computed: its
        logits are wanted. Blocks of what was there before are not written to, since others may hold them, too.
        """
        mine = [self._load(one, policy_version) for one in arriving]
        # All shards must schedule alike, and a file may be gone for one of them only. After this all have read.
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
        """Frees the entries of a handle that nobody will ask for."""
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
            if None in by_shard:  # a part of the heads is of no use
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
        """Stores this shard's part, if it is this shard's to store; None when there is no room."""
        if not self._stores:
            return ()
        layers = to_host(read_kv(self._kv, cached.blocks, cached.num_tokens))
        part = store.export(self._content(cached.tokens, cached.num_tokens, policy_version), layers)
        return None if part is None else (part,)

    def _load(self, arriving: Sequence, policy_version: int) -> int:
        """For how many tokens this shard's KV is there then; 0 when what the sequence brings is unusable."""
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
        except ValueError:  # gone or damaged: recomputing is always right
            return 0
        fill_kv(self._kv, cached.blocks, num_tokens, layers, first=cached.num_tokens)
        return num_tokens

    def _content(self, tokens: list[int], num_tokens: int, policy_version: int) -> KVContent:
        """This shard's KV heads of the first tokens."""
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
