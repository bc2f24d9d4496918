"""The free memory of an accelerator or a host, for the ranks that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from engines.decoding import from_msgpack
from engines.memory.host_memory import free_host_bytes
from engines.parallel.collectives import Communicator


class Memory(msgspec.Struct, frozen=True):
    """The memory of one rank's device, as the rank sees it."""

    name: str
    """The same for ranks that share this memory, and only for them."""
    free: int | None
    """Bytes that can still be allocated; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """The memory that was free for all ranks before any of them allocated."""

    names: tuple[str, ...]
    """The name of each rank's memory."""
    num_bytes: Mapping[str, int | None]
    """Free bytes of each memory, by name; None if unknown."""

    @staticmethod
    def agree(world: Communicator, mine: Memory) -> FreeMemory:
        """Returns, on every rank, the least that any of a memory's ranks sees as free. All ranks call it together."""
        told = world.all_gather_bytes(msgspec.msgpack.encode(mine))
        everyone = [from_msgpack(one, Memory) for one in told]
        seen: dict[str, list[int]] = {memory.name: [] for memory in everyone}
        for memory in everyone:
            seen[memory.name] += [] if memory.free is None else [memory.free]
        num_bytes = {name: min(free, default=None) for name, free in seen.items()}
        return FreeMemory(names=tuple(memory.name for memory in everyone), num_bytes=num_bytes)

    @property
    def share(self) -> int | None:
        """Bytes that every rank can allocate at the same time; None if the free bytes of one memory are unknown."""
        if None in self.num_bytes.values():
            return None
        return min(free // self.names.count(name) for name, free in self.num_bytes.items() if free is not None)


def free_memory(device: torch.device, host: str = "this host") -> Memory:
    """Returns the device's free memory now; `host` is a name that no other host of the run has."""
    if device.type != "cuda":
        return Memory(host, free_host_bytes())
    free = torch.cuda.mem_get_info(device)[0]
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(f"{host}, GPU {torch.cuda.get_device_properties(device).uuid}", free + cached)
