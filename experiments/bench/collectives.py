"""All-reduce, all-gather and all-to-all between this host's processes: gloo and shared memory, interleaved, in one run.

    python experiments/bench/collectives.py
    python experiments/bench/collectives.py --ranks 2 --sizes 4096
    torchrun --standalone --nproc-per-node 4 experiments/bench/collectives.py

The first two start their ranks themselves. A time is the mean over a few consecutive calls, on the slowest rank. The
floor is the time to read the message and write the result, measured as copies of that many bytes by all ranks at once
(`torch.Tensor.copy_` between private buffers). It does not include waiting, adding and starting operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta

from engines.constraints import Count
from engines.parallel.collectives import Communicator, TorchGroup
from engines.parallel.groups import GroupCache, Transport
from experiments import launch
from experiments.bench import harness
from experiments.comparison.turns import Row, interleave, make_row

SHARED_MEMORY: Transport = "shared memory"
GLOO: Transport = "gloo"
Size = Annotated[int, Meta(ge=4, multiple_of=4, description="a multiple of 4, the bytes of a float32")]


@dataclass(frozen=True, kw_only=True)
class CollectivesBench(harness.BenchConfig):
    """Time all-reduce, all-gather and all-to-all over shared memory and gloo, interleaved."""

    turns: Count = 30
    """Interleaved measurements of each transport; medians are reported."""
    ranks: Annotated[int, Meta(ge=2, description="at least 2")] = 4
    """Processes to start; under torchrun, its number of processes applies instead."""
    sizes: Annotated[tuple[Size, ...], Meta(min_length=1, description="multiples of 4")] = (4096, 65536, 1048576)
    """Message sizes: bytes of float32 per rank."""
    calls: Count = 20
    """Consecutive calls per measurement."""


def measure(config: CollectivesBench) -> dict[str, Any]:
    launch.start_under_torchrun(config.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    if world.size < 2:
        raise ValueError(f"nproc-per-node={world.size}: one rank has nobody to talk to; use 2 or more")
    ranks = tuple(range(world.size))
    caches = {name: GroupCache(world, [ranks], timeout_s=60, transport=name) for name in (SHARED_MEMORY, GLOO)}
    groups: dict[str, Communicator] = {name: cache.get(ranks) for name, cache in caches.items()}
    operations = ("all_reduce", "all_gather", "all_to_all")
    rows = [_compare(operation, size, config, groups) for operation in operations for size in config.sizes]
    for cache in caches.values():
        cache.close()
    dist.destroy_process_group()
    return {"ranks": world.size, "rows": rows}


def _compare(operation: str, size: int, config: CollectivesBench, groups: dict[str, Communicator]) -> Row:
    tensor = torch.zeros(size // 4)  # zeros stay zeros, however often they are summed
    num_results = groups[GLOO].size if operation == "all_gather" else 1
    counts = _equal_parts(len(tensor), groups[GLOO]) if operation == "all_to_all" else ()
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(num_results, size, dtype=torch.uint8)
    inbox = torch.zeros_like(source)

    def least_bytes() -> None:
        inbox.copy_(source)  # the message is read once
        target.copy_(source)  # and each byte of the result written once

    calls: dict[str, Callable[[], Any]] = {
        **{name: partial(getattr(group, operation), tensor, *counts) for name, group in groups.items()},
        "floor": least_bytes,
    }
    variants = {name: partial(_slowest, call, config.calls, groups[SHARED_MEMORY]) for name, call in calls.items()}
    name = f"{operation} {size}"
    return make_row(name, interleave(variants, config.turns, name=name))


def _equal_parts(total: int, group: Communicator) -> tuple[list[int], list[int]]:
    """What this rank sends to each rank and receives from it: equal parts of its message, up to one element."""
    sends = [total * (rank + 1) // group.size - total * rank // group.size for rank in range(group.size)]
    return sends, [sends[group.rank]] * group.size


def _slowest(call: Callable[[], Any], num_calls: int, group: Communicator) -> float:
    """Seconds per call on the slowest rank. A barrier of `group`, which need not be the timed one, starts all ranks."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    elapsed = torch.tensor((time.perf_counter() - start) / num_calls, dtype=torch.float64)
    return float(group.all_gather(elapsed).max())


if __name__ == "__main__":
    harness.run(CollectivesBench, measure)
