"""Sums over a group in the order of its ranks, whatever their size: gloo and NCCL choose an order by the size."""

from __future__ import annotations

from torch import Tensor

from engines.parallel.collectives import Communicator
from engines.parallel.shared_memory import SUMMED_IN


def in_rank_order(communicator: Communicator) -> Communicator:
    """The group itself where its sums are so already, as those over shared memory are; they have the same bits."""
    return communicator if communicator.name in ("single", "shared memory") else _InRankOrder(communicator)


class _InRankOrder:
    """Gathers and adds where the group would reduce; passes on all else."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size
        self.name = group.name
        self.all_gather = group.all_gather
        self.broadcast = group.broadcast
        self.all_gather_bytes = group.all_gather_bytes
        self.broadcast_bytes = group.broadcast_bytes
        self.barrier = group.barrier
        self.close = group.close

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._group.all_gather(tensor)
        total = parts[0].to(SUMMED_IN[tensor.dtype])
        for part in parts[1:]:
            total = total + part
        return tensor.copy_(total)
