"""`Communicator.all_to_all` between real processes, against cuts of what `all_gather_bytes` returns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel.collectives import Communicator, SingleRank, TorchGroup, as_bytes
from engines.parallel.groups import GroupCache
from engines.parallel.shared_memory import SharedMemoryGroup
from tests.engines.test_collectives import wait_for
from tests.worlds import error_of, join, run_world

SLOT_BYTES = 2**12
NARROW_BYTES = 64  # three other ranks get pieces of 21 bytes, at odd addresses
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
LAYOUTS = [(0, 1), (1, 2, 3), (0, 1, 2, 3)]
# The elements that rank i of n sends to rank j.
COUNTS: dict[str, Callable[[int, int, int], int]] = {
    "nothing": lambda i, j, n: 0,
    "own parts only": lambda i, j, n: 5 * (i == j),
    "even": lambda i, j, n: 7,
    "uneven": lambda i, j, n: (3 * i + 5 * j) % 11,
    "one pair": lambda i, j, n: 9 * (i == n - 1 and j == 0),
    "one sends": lambda i, j, n: (j + 1) * (i == 1),
    "one receives": lambda i, j, n: (i + 1) * (j == 1),
    "one takes no part": lambda i, j, n: 0 if n - 1 in (i, j) else 4,
    "larger than several slots": lambda i, j, n: [0, 9_001, 1, 40_000][(i + 2 * j) % 4],
}


def brought_by(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    data = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data % 2 == 0 if dtype == torch.bool else data.view(dtype)  # any bits, NaNs too


def cut_for(group: Communicator, mine: Tensor, counts: list[list[int]]) -> Tensor:
    """The oracle: everything of all ranks, of which this rank keeps what is for it."""
    everyone = group.all_gather_bytes(as_bytes(mine).numpy().tobytes())
    parts = []
    for source, data in zip(counts, everyone, strict=True):
        first, num = sum(source[: group.rank]), source[group.rank]
        parts.append(data[first * mine.element_size() : (first + num) * mine.element_size()])
    return torch.frombuffer(bytearray(b"".join(parts) or b" "), dtype=torch.uint8)[: len(b"".join(parts))]


def wrong_exchanges(group: Communicator, cases: list[str]) -> list[str]:
    """The cases, each beside another collective, between ranks that come early and late by turns."""
    wrong = []
    naps, order = random.Random(group.rank), random.Random(7)

    def check(holds: bool, *what: object) -> None:
        if not holds:
            wrong.append(f"{group.name} {group.size} rank {group.rank}: " + " ".join(map(str, what)))

    for number, (name, dtype) in enumerate((name, dtype) for name in cases for dtype in DTYPES):
        counts = [[COUNTS[name](i, j, group.size) for j in range(group.size)] for i in range(group.size)]
        sends, receives = counts[group.rank], [row[group.rank] for row in counts]
        mine = brought_by(group.rank, sum(sends), dtype)
        expected = cut_for(group, mine, counts)
        spread = torch.stack([mine, ~mine if dtype == torch.bool else mine * 0], 1)[:, 0]
        check(len(mine) < 2 or not spread.is_contiguous(), "contiguous")
        tensor = order.choice([mine, spread])
        before = tensor.clone(memory_format=torch.contiguous_format)
        time.sleep(naps.random() * 1e-3)
        out = group.all_to_all(tensor, sends, receives)
        # What others do next must not reach this result, nor their results what they have not read yet.
        time.sleep(naps.random() * 1e-3)
        kind = order.choice(["all_reduce", "all_gather", "broadcast", "barrier", "none"])
        ones = torch.full((1000,), float(number + group.rank))
        if kind == "all_reduce":
            check(bool((group.all_reduce(ones) == sum(range(group.size)) + number * group.size).all()), kind)
        elif kind == "all_gather":
            check(group.all_gather(ones)[:, -1].tolist() == [number + rank for rank in range(group.size)], kind)
        elif kind == "broadcast":
            check(bool((group.broadcast(ones, 1) == number + 1).all()), kind)
        elif kind == "barrier":
            group.barrier()
        check(out.dtype == dtype and out.shape == (sum(receives),), name, dtype, "has another form")
        check(torch.equal(as_bytes(out), expected), name, dtype, "after it", kind)
        check(torch.equal(as_bytes(tensor.contiguous()), as_bytes(before)), name, "has changed its input")
    return wrong


def phases_of(group: Communicator, count: int) -> int:
    assert isinstance(group, SharedMemoryGroup)
    before = group._phase
    group.all_to_all(torch.ones(count * group.size), [count] * group.size, [count] * group.size)
    return group._phase - before


def world_of_four() -> dict[str, Any]:
    groups = join(LAYOUTS, slot_bytes=SLOT_BYTES)
    world = groups.world
    gloo = GroupCache(world, LAYOUTS, timeout_s=60, transport="gloo")
    narrow = GroupCache(world, LAYOUTS, timeout_s=60, slot_bytes=NARROW_BYTES)
    out: dict[str, Any] = {"names": [], "wrong": []}
    for ranks in LAYOUTS:
        if world.rank in ranks:
            small = [name for name in COUNTS if name != "larger than several slots"]
            for cache, cases in ((groups, [*COUNTS]), (gloo, [*COUNTS]), (narrow, small)):
                out["names"].append(cache.get(ranks).name)
                out["wrong"] += wrong_exchanges(cache.get(ranks), cases)
    everyone = groups.get((0, 1, 2, 3))
    out["phases"] = [phases_of(everyone, count) for count in (0, 1, SLOT_BYTES // 12, SLOT_BYTES // 12 + 1)]
    return out


def failing() -> dict[str, Any]:
    """On four ranks: calls that differ between the ranks, each in a group of its own, and a rank that does not come."""
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    rank, ones = world.rank, [1, 1, 1, 1]

    def group(timeout_s: float = 30) -> Communicator:
        return GroupCache(world, [(0, 1, 2, 3)], timeout_s=timeout_s, slot_bytes=SLOT_BYTES).get((0, 1, 2, 3))

    def of(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(4, dtype=dtype)

    is_last = rank == 3
    calls: dict[str, Callable[[Communicator], Any]] = {
        "expects more": lambda group: group.all_to_all(of(), ones, [1, 2, 1, 1] if is_last else ones),
        "sends to itself": lambda group: group.all_to_all(of(), ones, [1, 1, 1, 0] if is_last else ones),
        "expects large": lambda group: group.all_to_all(of(), ones, [1, 1, 1, 10**6] if rank == 0 else ones),
        "dtype": lambda group: group.all_to_all(of(torch.int32 if is_last else torch.float32), ones, ones),
        "operation": lambda group: (
            group.all_gather(torch.tensor([ones, ones])) if is_last else group.all_to_all(of(), ones, ones)
        ),
    }
    out: dict[str, Any] = {}
    for name, call in calls.items():
        made = group()
        out[name] = error_of(lambda call=call, made=made: call(made))  # type: ignore[misc]
        out[f"{name}, after"] = error_of(made.barrier)
    impatient = group(timeout_s=2)
    wait_for(impatient, (0, 1, 3))
    if rank != 2:
        out["absent"] = error_of(lambda: impatient.all_to_all(of(), ones, ones))
    world.barrier()
    return out


def test_parts_are_the_oracle_s() -> None:
    four = run_world(world_of_four, 4)
    for number, rank in enumerate(four):
        num_groups = sum(number in ranks for ranks in LAYOUTS)
        assert rank["names"] == ["shared memory", "gloo", "shared memory"] * num_groups
        assert rank["phases"] == [1, 2, 2, 3]  # the counts, then a phase for each filled piece
    assert [problem for rank in four for problem in rank["wrong"]] == []


def test_ranks_that_disagree_are_named() -> None:
    four = run_world(failing, 4)
    started = "ranks called different collectives: ranks [0, 1, 2] (world ranks [0, 1, 2]) called all_to_all of float32"
    expected = {
        "expects more": "all_to_all: ranks [1] (world ranks [1]) send 1 elements to ranks [3] (world ranks [3]), "
        "which expect 2",
        "sends to itself": "all_to_all: ranks [3] (world ranks [3]) send 1 elements to ranks [3] (world ranks [3]), "
        "which expect 0",
        "expects large": "all_to_all: ranks [3] (world ranks [3]) send 1 elements to ranks [0] (world ranks [0]), "
        "which expect 1000000",
        "dtype": f"{started}; ranks [3] (world ranks [3]) called all_to_all of int32",
        "operation": f"{started}; ranks [3] (world ranks [3]) called all_gather of 64 bytes of int64",
    }
    for rank in four:
        for name, error in expected.items():
            assert rank[name] == f"RuntimeError: {error}"
            assert rank[f"{name}, after"] == f"RuntimeError: this group is of no use any more: {error}"
    for number in (0, 1, 3):
        absent = "RuntimeError: all_to_all: ranks [2] (world ranks [2]) did not come within 2 s"
        assert four[number]["absent"].startswith(absent)


@pytest.mark.parametrize("count", [0, 3])
def test_a_single_rank(count: int) -> None:
    tensor = torch.arange(2 * count)[::2]
    out = SingleRank().all_to_all(tensor, [count], [count])
    assert out.tolist() == [0, 2, 4][:count]
    out += 1
    assert tensor.tolist() == [0, 2, 4][:count]
