"""Which ranks form which replicas: a value that every rank can hold, compare and send. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec:
    """One tensor-parallel group. The order of `ranks` is the order of the shards."""

    id: int
    ranks: tuple[int, ...]
    role: str = "rollout"

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
        if not all(replica.ranks for replica in self.replicas):
            raise ValueError("Layout.replicas: a replica has no ranks; leave it out")

    def replica_of(self, rank: int) -> ReplicaSpec | None:
        """The replica that a rank belongs to; None when it is idle."""
        return next((replica for replica in self.replicas if rank in replica.ranks), None)

    def check_places(self, num_ranks: int) -> None:
        """Raises ValueError when a rank below `num_ranks` has no replica, or a replica has other ranks."""
        placed = sorted(rank for replica in self.replicas for rank in replica.ranks)
        if placed != list(range(num_ranks)):
            raise ValueError(f"layout: places ranks {placed}; give each of the {num_ranks} ranks a replica")


def nested_layout(ranks: Sequence[int], tp_size: int, *, epoch: int = 0) -> Layout:
    """Strided replicas: rank i of the list is shard i // dp of replica i % dp.

    When `tp_size` grows 1 -> 2 -> 4, each rank's new shard is a part of its old shard, so no weight has to move.
    Raises ValueError when `tp_size` does not divide the number of ranks.
    """
    dp_size = _dp_size(ranks, tp_size)
    return _layout([tuple(ranks[replica::dp_size]) for replica in range(dp_size)], epoch)


def contiguous_layout(ranks: Sequence[int], tp_size: int, *, epoch: int = 0) -> Layout:
    """Neighbouring ranks form a replica: rank i of the list is shard i % tp_size of replica i // tp_size.

    Raises ValueError when `tp_size` does not divide the number of ranks.
    """
    _dp_size(ranks, tp_size)
    return _layout([tuple(ranks[start : start + tp_size]) for start in range(0, len(ranks), tp_size)], epoch)


def _layout(groups: list[tuple[int, ...]], epoch: int) -> Layout:
    return Layout(epoch=epoch, replicas=tuple(ReplicaSpec(id=index, ranks=ranks) for index, ranks in enumerate(groups)))


def _dp_size(ranks: Sequence[int], tp_size: int) -> int:
    if tp_size < 1 or len(ranks) % tp_size:
        raise ValueError(
            f"tensor_parallel_size={tp_size}: does not divide the {len(ranks)} ranks; use a divisor of {len(ranks)}"
        )
    return len(ranks) // tp_size
