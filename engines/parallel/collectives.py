"""Collectives between ranks. Layers and loops get a `Communicator`; none asks torch.distributed for the world."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SUMMED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int64,
}
"""The dtype of a sum in rank order: 16-bit floats are summed in float32 and rounded once."""


class Communicator(Protocol):
    """An ordered group of `size` ranks, in which this process has number `rank`.

    Every member calls the same collectives in the same order, each with the same dtype and, except for `all_to_all`,
    number of elements. A `source` is a number within the group. Tensors may have any shape, and may be non-contiguous
    or empty.
    """

    rank: int
    size: int
    name: str
    """Name of the transport, for reports: "single", "gloo", "nccl" or "shared memory"."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the group, in place; the same bits on every rank."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns all ranks' tensors, [size, *tensor.shape] in rank order, bit for bit."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copies the `tensor` of `source` into every rank's `tensor`, in place, bit for bit."""

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Sends `sends[i]` elements of the flat `tensor`, one part after the other, to rank i.

        Returns the parts that came, flat and in rank order, bit for bit: `receives[i]` elements, which are what rank i
        sends to this rank. Parts may be empty; a rank's part for itself is copied.
        """

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns all ranks' bytes in rank order. Raises RuntimeError that names the ranks which do not call it."""

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Returns the bytes of `source`; other ranks' `data` is ignored. Raises as `all_gather_bytes` does."""

    def barrier(self) -> None:
        """Returns when all ranks have called it. Raises as `all_gather_bytes` does."""

    def close(self) -> None:
        """Releases the group's resources, after all members have left their last collective. It is unusable then."""


class SingleRank:
    """A group of one: every collective is the identity."""

    rank = 0
    size = 1
    name = "single"

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0).clone()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        assert [*sends] == [*receives] == [tensor.numel()]
        return tensor.flatten().clone()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        return bytes_of_source(data)

    def barrier(self) -> None:
        return None

    def close(self) -> None:
        return None


class TorchGroup:
    """A torch.distributed process group: its own backend for tensors, gloo for bytes and barriers.

    All ranks of the world make it, in the same order; a rank that is no member gets `rank` -1. `ranks` are world ranks
    in ascending order (by default all), `backend` is by default the world's own.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, timeout_s: float = 600.0, *, backend: str | None = None
    ) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self.name = backend or dist.get_backend()
        members = None if ranks is None else list(ranks)
        self._data = dist.new_group(members, backend=backend, timeout=self._timeout)
        # Decided by the name: a rank that is no member cannot ask the new group.
        gloo = self.name == "gloo"
        self._control = self._data if gloo else dist.new_group(members, backend="gloo", timeout=self._timeout)
        self.rank = dist.get_rank(self._data)
        self.size = dist.get_world_size(self._data)
        self._open = self.rank >= 0
        self._is_ordered = False

    def in_rank_order(self) -> TorchGroup:
        """Returns this group with sums in rank order, as over shared memory; gloo and NCCL choose an order by the
        size."""
        ordered = copy.copy(self)
        ordered._is_ordered = True
        return ordered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._is_ordered:
            total, *parts = self.all_gather(tensor).to(SUMMED_IN[tensor.dtype])
            for part in parts:
                total = total + part
            return tensor.copy_(total)
        summed = tensor.contiguous()
        dist.all_reduce(summed, group=self._data)
        return tensor if summed is tensor else tensor.copy_(summed)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self._data)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._broadcast(tensor, source, self._data)

    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        assert sum(sends) == tensor.numel() and sends[self.rank] == receives[self.rank]
        out = torch.empty(sum(receives), dtype=tensor.dtype, device=tensor.device)
        coming, going = ([count * tensor.element_size() for count in counts] for counts in (receives, sends))
        dist.all_to_all_single(as_bytes(out), as_bytes(tensor.contiguous()), coming, going, group=self._data)
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self.barrier()
        return gather_bytes(data, partial(self._gather, group=self._control))

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        self.barrier()
        mine = bytes_of_source(data) if self.rank == source else b""
        return send_bytes(mine, partial(self._broadcast, source=source, group=self._control))

    def barrier(self) -> None:
        # Gloo's other collectives time out without naming a rank; this one lists the missing ranks.
        dist.monitored_barrier(group=self._control, timeout=self._timeout, wait_all_ranks=True)

    def close(self) -> None:
        if self._open and dist.is_initialized():
            dist.destroy_process_group(self._data)
            if self._control is not self._data:
                dist.destroy_process_group(self._control)
        self._open = False

    def _gather(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel():
            parts = list(as_bytes(out).view(self.size, -1).unbind())
            dist.all_gather(parts, as_bytes(tensor.contiguous()), group=group)
        return out

    def _broadcast(self, tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
        assert 0 <= source < self.size
        whole = tensor.contiguous()
        if tensor.numel():
            dist.broadcast(as_bytes(whole), group_src=source, group=group)
        return tensor if whole is tensor else tensor.copy_(whole)


@contextmanager
def together(world: Communicator, what: str) -> Iterator[None]:
    """For code that all ranks of `world` run: if it fails on one rank, all raise, so that none waits for that rank.

    A rank that fails raises its own error; the others raise RuntimeError with the failed ranks and the first's error.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    told = b"" if mine is None else f"{type(mine).__name__}: {mine}".encode(errors="replace")
    everyone = world.all_gather_bytes(told)
    if mine is not None:
        raise mine
    if failed := [rank for rank, error in enumerate(everyone) if error]:
        raise RuntimeError(f"{what}: failed on ranks {failed}; on rank {failed[0]}: {everyone[failed[0]].decode()}")


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory, uint8 [bytes]; a transport that only moves it need not know its dtype."""
    # Not by `view(-1)`: one element counts as contiguous whatever its stride is, and would keep it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def gather_bytes(data: bytes, all_gather: Callable[[Tensor], Tensor]) -> list[bytes]:
    """`Communicator.all_gather_bytes` by two gathers of tensors: of lengths, then of bytes padded to the longest."""
    lengths = all_gather(torch.tensor(len(data))).tolist()
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(data)] = _tensor_of(data)
    everyone = all_gather(mine)
    return [part[:length].numpy().tobytes() for part, length in zip(everyone, lengths, strict=True)]


def send_bytes(data: bytes, broadcast: Callable[[Tensor], Tensor]) -> bytes:
    """`Communicator.broadcast_bytes` by two broadcasts of tensors; only the source's `data` is used."""
    length = int(broadcast(torch.tensor(len(data))))
    out = torch.zeros(length, dtype=torch.uint8)
    if len(data) == length:  # on the source; the other ranks pass no bytes
        out[:] = _tensor_of(data)
    return broadcast(out).numpy().tobytes()


def bytes_of_source(data: bytes | None) -> bytes:
    assert data is not None, "only those that are not the source may pass None"
    return data


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
