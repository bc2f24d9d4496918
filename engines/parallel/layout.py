"""Which ranks form which replicas: a value that every rank can hold, compare and send. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["rollout", "draft"]


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One tensor-parallel group. The order of `ranks` is the order of the shards."""

    id: int
    ranks: tuple[int, ...]
    role: Role = "rollout"
    """A "draft" replica gets no sequences: each of its ranks drafts for those of others."""

    @property
    def tp_size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Disjoint replicas; ranks in none of them are idle (an `LLM` gives each rank a replica). `epoch` counts the
    layouts of a run."""

    epoch: int
    replicas: tuple[ReplicaSpec, ...]

    def __post_init__(self) -> None:
        ids = [replica.id for replica in self.replicas]
        ranks = [rank for replica in self.replicas for rank in replica.ranks]
        if len(set(ids)) != len(ids):
            raise ValueError(f"Layout.replicas: ids {ids} repeat; give each replica its own")
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ValueError(f"Layout.replicas: ranks {ranks} repeat or are negative; a rank serves one replica")
        if self.replicas and all(replica.role == "draft" for replica in self.replicas):
            raise ValueError("Layout.replicas: all have role='draft'; at least one must have 'rollout'")
        if not all(replica.ranks for replica in self.replicas):
            raise ValueError("Layout.replicas: a replica has no ranks; leave it out")

    def has_draft_model(self, rank: int) -> bool:
        """Whether a rank draws drafts with a small model, if there is one: all that only draft, or else all."""
        spec = self.replica_of(rank)
        return spec is not None and (spec.role == "draft" or all(one.role != "draft" for one in self.replicas))

    def replica_of(self, rank: int) -> ReplicaSpec | None:
        """The replica that a rank belongs to; None when it is idle."""
        return next((replica for replica in self.replicas if rank in replica.ranks), None)

    def check_places(self, num_ranks: int) -> None:
        """Raises ValueError when a rank below `num_ranks` has no replica, or a replica has other ranks."""
        placed = sorted(rank for replica in self.replicas for rank in replica.ranks)
        if placed != list(range(num_ranks)):
            raise ValueError(f"layout: places ranks {placed}; give each of the {num_ranks} ranks a replica")


def drafters_of(layout: Layout, spec: ReplicaSpec) -> tuple[int, ...]:
    """Returns the draft ranks that draft for a rollout replica; none if the layout has none. Verifiers share drafters
    evenly, or the other way round."""
    drafters = [one for one in layout.replicas if one.role == "draft"]
    verifiers = [one.id for one in layout.replicas if one.role == "rollout"]
    if not drafters or spec.id not in verifiers:
        return ()
    place, count = verifiers.index(spec.id), len(verifiers)
    if len(drafters) <= count:
        return drafters[place % len(drafters)].ranks
    return tuple(rank for number, one in enumerate(drafters) if number % count == place for rank in one.ranks)


def joint_groups(before: Layout, after: Layout) -> list[tuple[int, ...]]:
    """Returns the ranks that exchange weights and KV when one layout becomes the other: the ranks of replicas that only
    one of the two has, in sets that no such replica joins, ascending. A rank that keeps its replica is in none.
    """
    groups: list[set[int]] = []
    for spec in set(before.replicas) ^ set(after.replicas):
        touching = [group for group in groups if group & set(spec.ranks)]
        groups = [group for group in groups if group not in touching] + [set(spec.ranks).union(*touching)]
    return sorted(tuple(sorted(group)) for group in groups)


def share_lacked(before: ReplicaSpec | None, after: ReplicaSpec, rank: int) -> float:
    """Returns the share of an array, cut evenly over a replica's ranks, that a rank of `after` needs and does not hold
    from being a rank of `before`; all of its part if that is None, or another replica."""
    start, stop = after.ranks.index(rank) / after.tp_size, (after.ranks.index(rank) + 1) / after.tp_size
    if before is None or rank not in before.ranks:
        return stop - start
    first, last = before.ranks.index(rank) / before.tp_size, (before.ranks.index(rank) + 1) / before.tp_size
    return stop - start - max(0.0, min(stop, last) - max(start, first))


def nested_layout(ranks: Sequence[int], tp_size: int, *, epoch: int = 0) -> Layout:
    """Strided replicas: rank i of the list is shard i // dp of the replica whose id is the rank number i % dp of it.

    When `tp_size` grows 1 -> 2 -> 4, each rank's new shard is a part of its old shard, so no weight has to move.
    Raises ValueError when `tp_size` does not divide the number of ranks.
    """
    dp_size = _dp_size(ranks, tp_size)
    replicas = [ReplicaSpec(id=ranks[place], ranks=tuple(ranks[place::dp_size])) for place in range(dp_size)]
    return Layout(epoch=epoch, replicas=tuple(replicas))


def contiguous_layout(ranks: Sequence[int], tp_size: int, *, epoch: int = 0) -> Layout:
    """Neighbouring ranks form a replica: rank i of the list is shard i % tp_size of replica i // tp_size.

    Raises ValueError when `tp_size` does not divide the number of ranks.
    """
    groups = [tuple(ranks[place * tp_size : (place + 1) * tp_size]) for place in range(_dp_size(ranks, tp_size))]
    return Layout(epoch=epoch, replicas=tuple(ReplicaSpec(id=id_, ranks=group) for id_, group in enumerate(groups)))


def nested_on_hosts(hosts: Sequence[Sequence[int]], tp_sizes: Sequence[int], *, epoch: int = 0) -> Layout:
    """Returns the union of nested layouts, one within the ranks of each host, with its TP size."""
    nested = [nested_layout(ranks, size) for ranks, size in zip(hosts, tp_sizes, strict=True)]
    return Layout(epoch=epoch, replicas=tuple(spec for one in nested for spec in one.replicas))


def _dp_size(ranks: Sequence[int], tp_size: int) -> int:
    if tp_size < 1 or len(ranks) % tp_size:
        raise ValueError(
            f"tensor_parallel_size={tp_size}: does not divide the {len(ranks)} ranks; use a divisor of {len(ranks)}"
        )
    return len(ranks) // tp_size
