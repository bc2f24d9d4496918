"""All-reduce and all-gather between processes of this host: gloo and shared memory, interleaved, in one run.

    python experiments/bench_collectives.py
    python experiments/bench_collectives.py --ranks 2 --sizes 4096
    torchrun --standalone --nproc-per-node 4 experiments/bench_collectives.py

The first two start torchrun themselves. A sample is the mean over a few calls in a row, on the slowest rank; printed
is the median of the samples in microseconds, with each side run against itself (A/A). Beside it stands the floor: every
rank must at least read its message and write the result, which is timed as copies of that many bytes by all ranks at
once (`torch.Tensor.copy_` between private buffers). What it leaves out is waiting, adding and starting operations.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from msgspec import Meta
from tqdm import tqdm

from engines.constraints import Count, check_fields
from engines.parallel.collectives import Communicator, TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.shared_memory import SLOT_BYTES
from experiments import launch

TRANSPORTS = ("gloo", "shared memory")


@dataclass(frozen=True, kw_only=True)
class BenchCollectivesConfig:
    """Time all-reduce and all-gather over gloo and shared memory, interleaved."""

    ranks: Annotated[int, Meta(ge=2, description="at least 2")] = 4
    """Processes to start; under torchrun, its own number holds."""
    sizes: tuple[int, ...] = (4096, 65536, 1048576)
    """Bytes that each rank brings."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of the tensors."""
    calls: Count = 20
    """Calls in a row per sample."""
    samples: Count = 30
    """Samples of each transport, and as many again for A/A."""
    slot_bytes: Annotated[int, Meta(ge=64, multiple_of=64, description="a multiple of 64")] = SLOT_BYTES
    """Shared memory: a longer message goes in chunks of this many bytes."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        itemsize = getattr(torch, self.dtype).itemsize
        if not self.sizes or any(size < itemsize or size % itemsize for size in self.sizes):
            raise ValueError(f"sizes={self.sizes}: must be multiples of {itemsize}, the bytes of a {self.dtype}")
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.parent)!r}; make it")


def main() -> dict[str, Any]:
    with launch.told_once():
        config = tyro.cli(BenchCollectivesConfig)
    launch.start_under_torchrun(config.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    if world.size < 2:
        raise ValueError(f"nproc-per-node={world.size}: one rank has nobody to talk to; use 2 or more")
    ranks = tuple(range(world.size))
    caches = [
        GroupCache(world, [ranks], timeout_s=60, transport="gloo"),
        GroupCache(world, [ranks], timeout_s=60, transport="shared memory", slot_bytes=config.slot_bytes),
    ]
    groups = [cache.get(ranks) for cache in caches]
    rows = []
    cells = [(operation, size) for operation in ("all_reduce", "all_gather") for size in config.sizes]
    for operation, size in tqdm(cells, desc="bench", unit="cell", disable=world.rank > 0):
        rows.append({"operation": operation, "bytes": size, **_measure(operation, size, config, groups)})
    for cache in caches:
        cache.close()
    result = {
        "experiment": "bench_collectives",
        "tier": "live",
        "device": f"cpu ({platform.machine()}, {len(os.sched_getaffinity(0))} cores)",
        "workload": {**asdict(config), "ranks": world.size, "threads_per_rank": 1, "output": None},
        "rows": rows,
    }
    dist.destroy_process_group()
    if world.rank == 0:
        _print_table(rows)
        if config.output is not None:
            config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _measure(
    operation: str, size: int, config: BenchCollectivesConfig, groups: list[Communicator]
) -> dict[str, dict[str, float] | float]:
    """Medians in microseconds: per transport its own and its A/A repeat's, and the floor."""
    dtype = getattr(torch, config.dtype)
    tensor = torch.zeros(size // dtype.itemsize, dtype=dtype)  # zeros stay zeros, however often they are summed
    sides: dict[str, Callable[[], Any]] = {
        group.name + again: partial(getattr(group, operation), tensor) for again in ("", " again") for group in groups
    }
    num_results = 1 if operation == "all_reduce" else groups[0].size
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(num_results, size, dtype=torch.uint8)
    inbox = torch.zeros_like(source)

    def least_bytes() -> None:
        inbox.copy_(source)  # the message is read once
        target.copy_(source)  # and each byte of the result written once

    sides["floor"] = least_bytes
    start_together = groups[1]  # by the fast group, whichever is timed
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(config.samples + 1):
        for name, call in sides.items():
            start_together.barrier()
            start = time.perf_counter()
            for _ in range(config.calls):
                call()
            elapsed = torch.tensor((time.perf_counter() - start) / config.calls, dtype=torch.float64)
            slowest = float(start_together.all_gather(elapsed).max())
            if number:  # the first round warms up
                seconds[name].append(slowest)
    median = {name: 1e6 * statistics.median(values) for name, values in seconds.items()}
    return {
        "us": {name: round(median[name], 1) for name in TRANSPORTS},
        "a_a": {name: round(median[name] / median[f"{name} again"], 3) for name in TRANSPORTS},
        "floor_us": round(median["floor"], 1),
        "vs_gloo": round(median["gloo"] / median["shared memory"], 2),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    heads = f"{'gloo us (A/A)':>20}{'shared memory us (A/A)':>26}{'floor us':>10}{'ratio':>8}"
    print(f"{'operation':<12}{'bytes':>10}{heads}")
    for row in rows:
        timed = [f"{row['us'][name]:.0f} ({row['a_a'][name]:.2f})" for name in TRANSPORTS]
        tail = f"{row['floor_us']:>10.1f}{row['vs_gloo']:>8.1f}"
        print(f"{row['operation']:<12}{row['bytes']:>10}{timed[0]:>20}{timed[1]:>26}{tail}")


if __name__ == "__main__":
    launch.run(main)
