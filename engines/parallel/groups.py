"""All groups of ranks that a run may use, made once, at start, in the same order on every rank, and kept."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from engines.config import Transport
from engines.decoding import from_msgpack
from engines.parallel.collectives import Communicator, SingleRank, TorchGroup
from engines.parallel.layout import Layout, contiguous_layout, joint_groups, nested_layout
from engines.parallel.owned_files import reclaim
from engines.parallel.segment import Segment
from engines.parallel.shared_memory import SLOT_BYTES, SharedMemoryGroup, region_bytes, supported


def all_layouts(ranks: Sequence[int]) -> Iterator[Layout]:
    """The nested and the contiguous layout for every tensor-parallel size that divides the ranks, smallest first.

    No two have the same replicas.
    """
    seen = set()
    for tp_size in range(1, len(ranks) + 1):
        if len(ranks) % tp_size:
            continue
        for layout in (nested_layout(ranks, tp_size), contiguous_layout(ranks, tp_size)):
            if layout.replicas not in seen:
                seen.add(layout.replicas)
                yield layout


def nested_groups(ranks: Sequence[int], tp_sizes: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """The groups of ranks for replicas of any of these TP sizes, without the layouts that are made of them: neighbours
    form blocks of the largest size, and within a block the groups are those of its nested layouts.

    Each group lies within one of the next larger size. So the ranks that exchange weights and KV where some of them
    form others are one of these groups, too, and `GroupCache` needs no more. Raises ValueError for sizes that do not
    divide each other, or the number of ranks.
    """
    sizes = sorted(set(tp_sizes), reverse=True)
    wholes = [len(ranks), *sizes]
    if wrong := [(whole, size) for whole, size in pairwise(wholes) if size < 1 or whole % size]:
        raise ValueError(
            f"tp_sizes={sizes[::-1]}: {wrong[0][1]} does not divide {wrong[0][0]}; each must divide the next larger "
            f"one, and the largest the {len(ranks)} ranks"
        )
    for size in sizes:
        for start in range(0, len(ranks), sizes[0]):
            block = ranks[start : start + sizes[0]]
            yield from (spec.ranks for spec in nested_layout(block, size).replicas)


def num_torchrun_ranks() -> int:
    """Ranks that torchrun has started, this one included; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_world(layouts: Iterable[Layout], *, on_cuda: bool) -> GroupCache:
    """Makes the groups of torchrun's ranks. All ranks call it together.

    Starts torch.distributed if it is not started; it then lasts as long as the process. With `on_cuda`, each rank uses
    the GPU with its local rank's number, if there are GPUs.
    """
    on_cuda = on_cuda and torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_cuda else "gloo")
        atexit.register(_end_world)
    return GroupCache(TorchGroup(), layouts)


def _end_world() -> None:
    if dist.is_initialized():  # otherwise its threads would abort the process
        dist.destroy_process_group()


class GroupCache:
    """The groups of some layouts, each over the fastest transport that is available to it.

    On CUDA that is the backend of torch.distributed (NCCL). On a CPU it is shared memory if all members are on one host
    with `shared_memory.supported()`, otherwise gloo, the fallback that always works.
    """

    def __init__(
        self,
        world: TorchGroup,
        layouts: Iterable[Layout | tuple[int, ...]],
        *,
        timeout_s: float = 600.0,
        device: torch.device | None = None,
        transport: Transport = "auto",
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """All ranks of `world` make it, with the same arguments; `layouts` may also hold bare groups of ranks. For each
        two layouts it also makes the groups in which ranks exchange weights and KV (`joint_groups`).

        `device` is that of the tensors; by default CUDA if the world's backend is NCCL, else the CPU.
        `transport="shared memory"` raises ValueError if a group cannot use it, instead of falling back to gloo.
        """
        on_cuda = world.name == "nccl" if device is None else device.type == "cuda"
        if on_cuda and transport != "auto":
            raise ValueError(f"transport={transport!r}: is for CPU tensors; use 'auto' on CUDA")
        self.world = world
        self.timeout_s = timeout_s
        self._slot_bytes = slot_bytes
        self._segment: Segment | None = None
        self._single = SingleRank()
        self._made: dict[tuple[int, ...], Communicator] = {}
        items = list(layouts)
        replicas = [ranks for item in items for ranks in _replicas_of(item)]
        for ranks in replicas:
            # torch.distributed sorts the ranks of a group, and the order of ranks is the order of shards.
            if list(ranks) != sorted(set(ranks)) or not ranks or ranks[0] < 0 or ranks[-1] >= world.size:
                raise ValueError(f"layouts: ranks {ranks} must be ascending, each once, from 0 to {world.size - 1}")
        self._replica_groups = [ranks for ranks in dict.fromkeys(replicas) if len(ranks) > 1]
        regroups = combinations([item for item in items if isinstance(item, Layout)], 2)
        joint = [ranks for before, after in regroups for ranks in joint_groups(before, after) if len(ranks) > 1]
        groups = self._groups = list(dict.fromkeys(self._replica_groups + joint))
        self.replica_sizes = tuple(sorted(set(map(len, replicas))))
        """The numbers of ranks that the layouts' replicas and the bare groups have, ascending."""
        self.largest_sizes = tuple(sorted({_largest(item) for item in items}))
        """Those of the largest rollout replica of each layout, and of the bare groups, ascending."""
        hosts, self._addresses = self._meet([transport, on_cuda, slot_bytes, self.replica_sizes, *groups])
        self.hosts = hosts
        """The host of each rank, by a name that no other host has."""
        self._is_first_here = hosts.index(hosts[world.rank]) == world.rank
        self.max_tp_size = math.lcm(*map(len, self._replica_groups))
        """The least common multiple of the replicas' sizes; vocabularies are padded to a multiple of it."""
        shared = {} if on_cuda or transport == "gloo" else self._share_memory(groups, hosts)
        if transport == "shared memory" and (without := [ranks for ranks in groups if ranks not in shared]):
            self.close()
            raise ValueError(
                f"transport='shared memory': ranks {without[0]} cannot have it (hosts {[hosts[r] for r in without[0]]},"
                f" supported here: {supported()}); use 'auto' or 'gloo'"
            )
        for ranks in groups:
            communicator: Communicator | None = shared.get(ranks)
            if ranks not in shared:  # then it is in no rank's, and all ranks of the world make it together
                communicator = TorchGroup(ranks, timeout_s, backend=None if on_cuda else "gloo")
            if communicator is not None and world.rank in ranks:
                self._made[ranks] = communicator

    @property
    def address(self) -> str:
        """IPv4 address by which all ranks reach this rank's host: the loopback address if all are on one host.

        Raises ValueError, on every rank, if one has no such address.
        """
        without = [rank for rank, address in enumerate(self._addresses) if not address]
        if without:
            raise ValueError(
                f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}: leads ranks {without} to no IPv4 address, and the ranks "
                f"are on several hosts; give torchrun an IPv4 address of rank 0's host"
            )
        return self._addresses[self.world.rank]

    def get(self, ranks: tuple[int, ...]) -> Communicator:
        """Returns the group of these world ranks, the same object each time. Raises ValueError if it was not made."""
        made = self._made.get(ranks)
        if made is not None:
            return made
        if self.world.rank not in ranks:
            raise ValueError(f"ranks={ranks}: rank {self.world.rank} is no member; ask for a group of its own")
        if len(ranks) == 1:
            return self._single
        if ranks == tuple(range(self.world.size)):
            return self.world
        raise ValueError(f"ranks={ranks}: no such group was made at start; add it to GroupCache's layouts")

    def check(self, layout: Layout) -> None:
        """Raises ValueError, the same on every rank, if the layout leaves a rank idle or has a group not made."""
        layout.check_places(self.world.size)
        for replica in layout.replicas:
            if len(replica.ranks) > 1 and replica.ranks not in self._replica_groups:
                raise ValueError(
                    f"layout: replica {replica.id} has ranks {replica.ranks}, and no such group was made at start; "
                    f"put ranks in ascending order, and add the layout to GroupCache's"
                )

    def joins(self, before: Layout, after: Layout) -> bool:
        """Whether the ranks that exchange weights and KV between these layouts have groups to do it in, and replicas in
        both."""
        known = {*self._groups, tuple(range(self.world.size)), *((rank,) for rank in range(self.world.size))}
        return all(
            ranks in known and all(before.replica_of(rank) and after.replica_of(rank) for rank in ranks)
            for ranks in joint_groups(before, after)
        )

    def close(self) -> None:
        """Closes all groups except the world's, after all ranks have left their last collective."""
        for communicator in self._made.values():
            communicator.close()
        self._made.clear()
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _map(self, num_bytes: int | None, *, otherwise: str) -> tuple[Segment | None, list[bool]]:
        """Returns the segment of this rank's host, created by the rank that passes a size, and which ranks could map
        theirs. The creator sends its name, which cannot be guessed, through `world`, and unlinks it once all have
        mapped it."""
        segment: Segment | None = None
        if num_bytes is not None:
            try:
                segment = Segment.create(num_bytes)
            except RuntimeError as error:
                warnings.warn(f"{error}; {otherwise}", stacklevel=3)
        path = str(segment.path) if segment is not None else ""
        paths = [data.decode() for data in self.world.all_gather_bytes(path.encode())]
        theirs = paths[self.hosts.index(self.hosts[self.world.rank])]
        if segment is None and theirs:
            with contextlib.suppress(OSError):  # another container of the same host
                segment = Segment.attach(Path(theirs))
        able = [data == b"1" for data in self.world.all_gather_bytes(b"1" if segment is not None else b"0")]
        if num_bytes is not None and segment is not None:
            segment.unlink()
        return segment, able

    def _meet(self, arguments: Sequence[object]) -> tuple[tuple[str, ...], list[str]]:
        """Returns each rank's host and that host's address. Raises ValueError if the ranks' `arguments` differ."""
        mine = (_host(), _addresses(), "\n".join(map(str, arguments)))
        told = self.world.all_gather_bytes(msgspec.msgpack.encode(mine))
        everyone = [from_msgpack(one, tuple[str, tuple[str, str], str]) for one in told]
        hosts, addresses, requests = zip(*everyone, strict=True)
        if others := [rank for rank, request in enumerate(requests) if request != requests[0]]:
            raise ValueError(
                f"layouts: ranks {others} want other groups, slots or transport than rank 0; give all ranks the same"
            )
        first_elsewhere = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
        if first_elsewhere is None:
            return hosts, ["127.0.0.1"] * len(hosts)
        # Rank 0's host may see itself at a loopback address (Debian's 127.0.1.1): use the one that other hosts use.
        called = addresses[first_elsewhere][1]
        return hosts, [called if host == hosts[0] else own for host, (own, _) in zip(hosts, addresses, strict=True)]

    def _share_memory(
        self, groups: Sequence[tuple[int, ...]], hosts: Sequence[str]
    ) -> dict[tuple[int, ...], SharedMemoryGroup | None]:
        """Returns, by their ranks, the groups that can use shared memory; None for groups without this rank.

        All groups of a host share one segment.
        """
        here = hosts[self.world.rank]
        local = [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) == 1]
        if not local:
            return {}
        ends, num_bytes = {}, 0
        for ranks in local:
            if hosts[ranks[0]] == here:
                ends[ranks] = num_bytes = num_bytes + region_bytes(len(ranks), self._slot_bytes)
        if supported():
            reclaim()
        is_creator = ends and supported() and self._is_first_here
        # All ranks learn which could map it, so that all members of a group choose the same transport.
        self._segment, able = self._map(
            num_bytes if is_creator else None, otherwise="the groups of this host use gloo, which is slower"
        )
        shared: dict[tuple[int, ...], SharedMemoryGroup | None] = {
            ranks: None for ranks in local if all(able[rank] for rank in ranks)
        }
        for ranks in shared:
            if self.world.rank in ranks:
                assert self._segment is not None
                shared[ranks] = SharedMemoryGroup(
                    self._segment.memory[ends[ranks] - region_bytes(len(ranks), self._slot_bytes) : ends[ranks]],
                    ranks.index(self.world.rank),
                    len(ranks),
                    self.timeout_s,
                    slot_bytes=self._slot_bytes,
                    world_ranks=ranks,
                    crowded=hosts.count(here) > len(os.sched_getaffinity(0)),
                )
        if self._segment is not None and not any(shared.values()):
            self._segment.close()  # no group of this rank uses it
            self._segment = None
        return shared


def _replicas_of(item: Layout | tuple[int, ...]) -> list[tuple[int, ...]]:
    return [replica.ranks for replica in item.replicas] if isinstance(item, Layout) else [item]


def _largest(item: Layout | tuple[int, ...]) -> int:
    if not isinstance(item, Layout):
        return len(item)
    return max((spec.tp_size for spec in item.replicas if spec.role == "rollout"), default=1)


def _addresses() -> tuple[str, str]:
    """Returns this host's address on the way to torchrun's rank 0, and rank 0's as seen from here; empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: for a datagram socket, connect only finds the route.
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        except (KeyError, ValueError, OSError):
            return "", ""
        return probe.getsockname()[0], probe.getpeername()[0]


def _host() -> str:
    """Returns the same name for this user's processes that share a host's loopback address and memory. Containers of
    one host have different names, also where their host names are the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = [os.stat(path) for path in ("/proc/self/ns/net", "/dev/shm") if os.path.exists(path)]
    spaces = "/".join(f"{one.st_dev}:{one.st_ino}" for one in shared)
    return f"{socket.gethostname()}/{os.getuid()}/{boot.read_text().strip() if boot.exists() else ''}/{spaces}"
