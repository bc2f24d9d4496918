"""What ranks say to each other. Layers and loops get a `Communicator`; none asks torch.distributed for the world."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Communicator(Protocol):
    """An ordered group of ranks, this process being number `rank` of `size`."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the group, in place."""
        ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's bytes in rank order. A rank that does not come is named in a RuntimeError."""
        ...

    def barrier(self) -> None:
        """Returns when all have come. A rank that does not come is named in a RuntimeError."""
        ...


class SingleRank:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return None


class TorchGroup:
    """A torch.distributed process group: its own backend for tensors, gloo for bytes and barriers.

    To be made by all ranks of the world, in the same order.
    """

    def __init__(self, ranks: list[int] | None = None, timeout_s: float = 600.0) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._data = dist.new_group(ranks, timeout=self._timeout)
        gloo = dist.get_backend(self._data) == "gloo"
        self._control = self._data if gloo else dist.new_group(ranks, backend="gloo", timeout=self._timeout)
        self.rank = dist.get_rank(self._data)
        self.size = dist.get_world_size(self._data)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._data)
        return tensor

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.barrier()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(data)
        dist.all_reduce(lengths, group=self._control)
        longest = int(lengths.max())
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._control)
        return [part[:length].numpy().tobytes() for part, length in zip(everyone, lengths.tolist(), strict=True)]

    def barrier(self) -> None:
        # Gloo's own collectives time out without a name; this one lists the ranks that did not come.
        dist.monitored_barrier(group=self._control, timeout=self._timeout, wait_all_ranks=True)
