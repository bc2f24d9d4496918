"""What ranks know of each other when they leave their replicas together and form new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engines.config import Exchange, ModelConfig
from engines.decoding import from_msgpack
from engines.kvcache.kept import KeptKV, Source, kept_kv
from engines.kvcache.migrate import KVMove
from engines.models.reshard import WeightMove
from engines.parallel.collectives import Communicator
from engines.parallel.layout import Layout, ReplicaSpec
from engines.parallel.sharding import Shard, kv_heads
from engines.replica.replica import Replica
from engines.sequence import SequenceId


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A group of ranks that all leave their replicas and form new ones; the sequences are by rank of the group."""

    group: Communicator
    before: Sequence[ReplicaSpec]
    after: Sequence[ReplicaSpec]
    shards_before: Sequence[Shard]
    shards_after: Sequence[Shard]

    @classmethod
    def of(cls, group: Communicator, ranks: Sequence[int], before: Layout, after: Layout, *, max_tp_size: int) -> Joint:
        """`ranks` are the group's world ranks; each has a replica in both layouts."""
        sides = []
        for layout in (before, after):
            specs = [spec for rank in ranks if (spec := layout.replica_of(rank)) is not None]
            shards = [
                Shard(index=spec.ranks.index(rank), count=spec.tp_size, max_count=max_tp_size)
                for rank, spec in zip(ranks, specs, strict=True)
            ]
            sides.append((specs, shards))
        (old, old_shards), (new, new_shards) = sides
        return cls(group=group, before=old, after=new, shards_before=old_shards, shards_after=new_shards)

    @property
    def mine(self) -> ReplicaSpec:
        """This rank's next place."""
        return self.after[self.group.rank]

    def weights(self, how: Exchange) -> WeightMove:
        return WeightMove(group=self.group, how=how, before=self.shards_before, after=self.shards_after)

    def kv(self, how: Exchange, model: ModelConfig, arrivals: Mapping[int, Sequence[Source]]) -> KVMove:
        heads = [
            [(one.start, one.stop) for one in (kv_heads(model, shard) for shard in shards)]
            for shards in (self.shards_before, self.shards_after)
        ]
        return KVMove(
            group=self.group,
            how=how,
            before=[spec.id for spec in self.before],
            after=[spec.id for spec in self.after],
            heads_before=heads[0],
            heads_after=heads[1],
            arrivals=arrivals,
        )

    def gather_kept(self, replica: Replica) -> dict[SequenceId, KeptKV]:
        """Returns what the group's replicas keep in their caches; `replica` is this rank's. All call it together."""
        me = self.group.rank
        mine = []
        if self.shards_before[me].index == 0:
            mine = list(kept_kv(replica.kept, replica.scheduler.blocks, self.before[me].id).items())
        return {
            sequence_id: kept
            for data in self.group.all_gather_bytes(msgspec.msgpack.encode(mine))
            for sequence_id, kept in from_msgpack(data, list[tuple[SequenceId, KeptKV]])
        }
