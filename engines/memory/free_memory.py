"""How much memory is free for ranks that share it: an accelerator's, or a host's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from engines.memory.host_memory import free_host_bytes
from engines.parallel.collectives import Communicator


class Memory(msgspec.Struct, frozen=True):
    """That of one rank's device, as the rank sees it."""

    name: str
    """Ranks that share it give the same, no others."""
    free: int | None
    """Bytes that can still be taken; None where that cannot be known."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """What was free for all ranks before any of them took of it."""

    names: tuple[str, ...]
    """Of each rank's memory."""
    num_bytes: Mapping[str, int | None]
    """By those names."""

    @staticmethod
    def agree(world: Communicator, mine: Memory) -> FreeMemory:
        """The same on every rank: the least that any of a memory's ranks sees. All call it together."""
        told = world.all_gather_bytes(msgspec.msgpack.encode(mine))
        everyone = [msgspec.msgpack.decode(one, type=Memory) for one in told]
        seen: dict[str, list[int]] = {memory.name: [] for memory in everyone}
        for memory in everyone:
            seen[memory.name] += [] if memory.free is None else [memory.free]
        num_bytes = {name: min(free, default=None) for name, free in seen.items()}
        return FreeMemory(names=tuple(memory.name for memory in everyone), num_bytes=num_bytes)

    @property
    def share(self) -> int | None:
        """Bytes that every rank can have at once; None where one cannot be known."""
        if None in self.num_bytes.values():
            return None
        return min(free // self.names.count(name) for name, free in self.num_bytes.items() if free is not None)


def free_memory(device: torch.device, host: str = "this host") -> Memory:
    """Of the device, now; `host` is a name that no other host of the run has."""
    if device.type != "cuda":
        return Memory(host, free_host_bytes())
    free = torch.cuda.mem_get_info(device)[0]
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return Memory(f"{host}, GPU {torch.cuda.get_device_properties(device).uuid}", free + cached)
