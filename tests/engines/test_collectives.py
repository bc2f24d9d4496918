"""Collectives between real processes, against sums that every rank can compute alone."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel import groups as groups_module
from engines.parallel import owned_files
from engines.parallel.collectives import Communicator, SingleRank, TorchGroup, as_bytes
from engines.parallel.groups import GroupCache, all_layouts
from engines.parallel.layout import nested_layout
from engines.parallel.owned_files import reclaim
from engines.parallel.segment import Segment
from engines.parallel.shared_memory import GAVE_UP, LINE_WORDS, SHARE_BYTES, region_bytes
from tests.worlds import ROOT, error_of, run_world

SLOT_BYTES = 2**17
SUMMED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
# Gloo sums in an order of its own.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.int64: 0}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "scalar": lambda pool: pool[0],
    "empty": lambda pool: pool[:0].view(0, 3),
    "one": lambda pool: pool[:1],
    "one strided": lambda pool: pool[:2][::2],
    "odd": lambda pool: pool[:231].view(7, 33),
    "transposed": lambda pool: pool[:231].view(7, 33).t(),
    "strided": lambda pool: pool[:100].view(10, 10)[::2, ::3],
    "a slot of float32": lambda pool: pool[: SLOT_BYTES // 4],
    "larger than a slot": lambda pool: pool[:70_001],
}
MIXED = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]


def brought_by(rank: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[70_001]: what a world rank brings; any rank can make it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**61), 2**61, (70_001,), generator=generator)
    return torch.randn(70_001, generator=generator, dtype=torch.float64).to(dtype)


def summed_in_order(parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(as_bytes(a.contiguous()), as_bytes(b.contiguous()))


def wrong_results(group: Communicator, ranks: tuple[int, ...]) -> list[str]:
    """What is not as the oracle says, of every operation, dtype and shape."""
    wrong = []

    def check(holds: bool, *what: object) -> None:
        if not holds:
            wrong.append(f"{group.name} {ranks} rank {group.rank}: " + " ".join(map(str, what)))

    for dtype in SUMMED:
        for name, cut in SHAPES.items():
            everyone = [cut(brought_by(rank, dtype)) for rank in ranks]
            mine = cut(brought_by(ranks[group.rank], dtype))
            check(all(part.is_contiguous() == (name not in ("transposed", "strided")) for part in [mine]), name, "cut")
            gathered = group.all_gather(mine)
            check(same_bits(gathered, torch.stack(everyone)), "all_gather", dtype, name)
            source = group.size - 1
            sent = mine.clone(memory_format=torch.preserve_format)
            check(group.broadcast(sent, source) is sent, "broadcast", dtype, name, "returns another tensor")
            check(same_bits(sent, everyone[source]), "broadcast", dtype, name)
            check(group.all_reduce(mine) is mine, "all_reduce", dtype, name, "returns another tensor")
            if group.name == "shared memory":
                check(same_bits(mine, summed_in_order(everyone)), "all_reduce", dtype, name)
            else:
                expected = summed_in_order([part.double() for part in everyone]) if dtype != torch.int64 else None
                close = (
                    torch.equal(mine, sum(everyone[1:], everyone[0]))
                    if expected is None
                    else torch.allclose(mine.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 8)
                )
                check(close, "all_reduce", dtype, name)
            copies = group.all_gather_bytes(as_bytes(mine.contiguous()).numpy().tobytes())
            check(len(set(copies)) == 1, "all_reduce", dtype, name, "has other bits on other ranks")
    flags = torch.tensor([True, False, group.rank == 0])
    check(group.all_gather(flags)[:, 2].tolist() == [True] + [False] * (group.size - 1), "all_gather of bool")
    texts = [bytes([65 + rank]) * (rank * 50_000) for rank in ranks]
    check(group.all_gather_bytes(texts[group.rank]) == texts, "all_gather_bytes")
    for source in range(group.size):
        mine_only = texts[source] if group.rank == source else None
        check(group.broadcast_bytes(mine_only, source) == texts[source], "broadcast_bytes from", source)
    group.barrier()
    return wrong


def wrong_subgroups(groups: GroupCache, num_rounds: int) -> list[str]:
    """Subgroups by turns, in an order that is random and the same on all ranks."""
    wrong = []
    rank = dist.get_rank()
    order = random.Random(7)
    for number in range(num_rounds):
        ranks, size = order.choice(MIXED), order.choice([1, 64, 1000, 30_000])
        if rank not in ranks:
            continue
        group = groups.get(ranks)
        everyone = [brought_by(other, torch.float32, seed=number)[:size] for other in ranks]
        mine = everyone[group.rank].clone()
        if not same_bits(group.all_reduce(mine), summed_in_order(everyone)):
            wrong.append(f"round {number}: all_reduce over {ranks} on {rank}")
        if not same_bits(group.all_gather(everyone[group.rank]), torch.stack(everyone)):
            wrong.append(f"round {number}: all_gather over {ranks} on {rank}")
    return wrong


def holdings(creator_pid: int) -> dict[str, int]:
    names = f"curtail-{os.getuid()}-*-{creator_pid}-*"
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "segments mapped": len([line for line in maps if "/curtail-" in line]),
        "segments named": len([*Path("/dev/shm").glob(names), *Path(tempfile.gettempdir()).glob(names)]),
        "maps": len(maps),
    }


def wait_for(group: Any, ranks: Collection[int]) -> None:
    """Lets the time that a call of the group may take begin once these of its ranks have come, so that a slow one is
    not missed."""
    wait, words = group._wait, group._words

    def wait_longer(line: int, phase: int, tag: int) -> None:
        while any(GAVE_UP < words[LINE_WORDS * rank] < phase for rank in ranks):
            time.sleep(0.001)
        wait(line, phase, tag)

    group._wait = wait_longer


def world_of_four() -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    rank = world.rank
    creator_pid = int(world.broadcast_bytes(str(os.getpid()).encode()))
    everyone = (0, 1, 2, 3)
    out: dict[str, Any] = {}

    # Gloo and shared memory, of the same layouts.
    fast = GroupCache(world, all_layouts(range(4)), timeout_s=60, slot_bytes=SLOT_BYTES)
    slow = GroupCache(world, [everyone, (0, 2)], timeout_s=60, transport="gloo")
    out["names"] = [fast.get(everyone).name, slow.get(everyone).name, fast.get((rank,)).name]
    out["kept"] = all(fast.get(ranks) is fast.get(ranks) for ranks in [*MIXED, (rank,)] if rank in ranks)
    out["named while in use"] = holdings(creator_pid)["segments named"]
    out["mapped while in use"] = holdings(creator_pid)["segments mapped"]
    out["wrong"] = wrong_results(fast.get(everyone), everyone) + wrong_results(slow.get(everyone), everyone)
    if rank in (0, 2):
        out["wrong"] += wrong_results(slow.get((0, 2)), (0, 2))
    out["wrong subgroups"] = wrong_subgroups(fast, 60)
    out["not made"] = error_of(lambda: fast.get((0, 1, 2) if rank < 3 else (1, 2, 3)))
    out["no member"] = error_of(lambda: fast.get(((rank + 1) % 4,)))
    out["unsorted"] = error_of(lambda: GroupCache(world, [(1, 0)]))
    out["disagree"] = error_of(lambda: GroupCache(world, [(0, 1)] if rank == 2 else [(0, 2)]))

    # Nothing piles up: neither by use nor by making groups.
    before = holdings(creator_pid)
    wrong_subgroups(fast, 60)
    for _ in range(8):
        another = GroupCache(world, all_layouts(range(4)), timeout_s=60, slot_bytes=SLOT_BYTES)
        another.get(everyone).all_reduce(torch.ones(100_000))
        world.barrier()
        another.close()
    after = holdings(creator_pid)
    out["growth"] = {name: after[name] - before[name] for name in before}

    # A rank that does not come, and then comes too late.
    impatient = GroupCache(world, [everyone, (1, 3)], timeout_s=1, slot_bytes=SLOT_BYTES)
    group = impatient.get(everyone)
    wait_for(group, (0, 1, 3))
    if rank != 2:
        out["absent"] = error_of(lambda: group.all_reduce(torch.ones(3)))
    world.barrier()
    if rank == 2:
        out["late"] = error_of(lambda: group.all_reduce(torch.ones(3)))
    out["after"] = error_of(group.barrier)
    if rank == 1:
        out["absent of two"] = error_of(impatient.get((1, 3)).barrier)
    world.barrier()

    # Ranks that call different things.
    calls: dict[str, Callable[[Communicator], Any]] = {
        "operation": lambda group: group.barrier() if rank == 3 else group.all_reduce(torch.ones(3)),
        "bytes": lambda group: group.all_reduce(torch.ones(4 if rank == 3 else 3)),
        "dtype": lambda group: group.all_reduce(torch.ones(2, dtype=torch.int64 if rank == 3 else torch.float64)),
        "source": lambda group: group.broadcast(torch.ones(3), source=int(rank == 3)),
        "chunks": lambda group: group.all_gather(torch.ones(100_000 if rank == 3 else 1)),
    }
    out["mismatch"] = {}
    for name, call in calls.items():
        mixed_up = GroupCache(world, [everyone], timeout_s=30, slot_bytes=SLOT_BYTES).get(everyone)
        out["mismatch"][name] = error_of(lambda call=call, group=mixed_up: call(group))  # type: ignore[misc]
    world.barrier()
    for cache in (fast, slow):
        cache.close()
    out["closed"] = error_of(lambda: another.get((0, 1) if rank < 2 else (2, 3)))
    return out


def world_of_two() -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    both = (0, 1)
    layout = nested_layout(both, 2)
    out: dict[str, Any] = {}
    groups = GroupCache(world, [layout], timeout_s=60, slot_bytes=SLOT_BYTES)
    group = groups.get(both)
    out["wrong"] = wrong_results(group, both)

    # The engine reduces in inference mode; the slots must serve both modes, and never join a graph.
    values = []
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
        with mode():
            values.append(group.all_reduce(torch.ones(5)).tolist())
    leaf = torch.ones(5, requires_grad=True)
    group.all_gather(leaf)
    group.broadcast(leaf * 1)
    group.all_reduce(leaf * 2)
    with torch.no_grad():
        values.append(group.all_reduce(torch.ones(5)).tolist())
    out["modes"] = values
    groups.close()
    out["closed"] = [error_of(call) for call in (group.barrier, lambda: group.all_reduce(torch.ones(5)))]
    out["closed"].append(error_of(lambda: group.all_gather(torch.ones(3))))

    # No room in /dev/shm, then none anywhere, a /dev/shm of its own (containers), another machine's order of stores.
    real_allocate, real_supported, real_attach = os.posix_fallocate, groups_module.supported, Segment.attach
    full: set[str] = {"/dev/shm"}

    def allocate(descriptor: int, offset: int, length: int) -> None:
        if str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent) in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_allocate(descriptor, offset, length)

    def attach(path: Path) -> Segment:
        raise FileNotFoundError(path)

    os.posix_fallocate = allocate
    for name in ("small /dev/shm", "full disk", "own /dev/shm", "other machine"):
        if name == "full disk":
            full.add(str(Path(tempfile.gettempdir()).resolve()))
        if name == "own /dev/shm":
            os.posix_fallocate, Segment.attach = real_allocate, attach  # type: ignore[method-assign,assignment]
        if name == "other machine":
            Segment.attach = real_attach  # type: ignore[method-assign]
            groups_module.supported = lambda: False
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            groups = GroupCache(world, [layout, both], timeout_s=60, slot_bytes=SLOT_BYTES)
        maps = [line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/curtail-" in line]
        out[name] = {
            "transport": groups.get(both).name,
            "folders": [str(Path(path).parent) for path in maps],
            "warnings": [str(warning.message) for warning in caught],
            "wrong": wrong_subset(groups.get(both), both),
            "insist": error_of(lambda: GroupCache(world, [layout], slot_bytes=SLOT_BYTES, transport="shared memory")),
        }
        world.barrier()
        groups.close()
    groups_module.supported = real_supported
    return out


def wrong_subset(group: Communicator, ranks: tuple[int, ...]) -> list[str]:
    everyone = [brought_by(rank, torch.float64) for rank in ranks]
    ok = torch.equal(group.all_reduce(everyone[group.rank].clone()), summed_in_order(everyone))
    return [] if ok else [f"all_reduce by {group.name}"]


def killed_in_use(folder: str) -> None:
    dist.init_process_group("gloo")
    world = TorchGroup(timeout_s=60)
    groups = GroupCache(world, [(0, 1)], timeout_s=60)
    groups.get((0, 1)).all_reduce(torch.ones(100_000))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/curtail-" in line]
    (Path(folder) / f"{world.rank}").write_text(f"{os.getpid()} {len(mapped)}")
    world.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_world(world_of_four, 4)


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_world(world_of_two, 2)


def test_results_are_the_oracle_s(four: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    assert SLOT_BYTES >= SHARE_BYTES and SLOT_BYTES < 70_001 * 2  # every way of summing is taken, by halves too
    for rank in four:
        assert rank["names"] == ["shared memory", "gloo", "single"]
    assert [problem for rank in four + two for problem in rank["wrong"]] == []


def test_subgroups_by_turns(four: list[dict[str, Any]]) -> None:
    assert [problem for rank in four for problem in rank["wrong subgroups"]] == []


def test_groups_are_kept_and_unknown_ones_refused(four: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(four):
        assert rank["kept"]
        ranks = (0, 1, 2) if number < 3 else (1, 2, 3)
        assert rank["not made"] == (
            f"ValueError: ranks={ranks}: no such group was made at start; add it to GroupCache's layouts"
        )
        assert f"rank {number} is no member" in rank["no member"]
        assert "ranks (1, 0) must be ascending" in rank["unsorted"]
        assert "ranks [2] want other groups" in rank["disagree"]
        assert "no such group" in rank["closed"]


def test_nothing_piles_up(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert (rank["mapped while in use"], rank["named while in use"]) == (1, 0)
        growth = rank["growth"]
        assert (growth["files"], growth["segments mapped"], growth["segments named"]) == (0, 0, 0)
        assert growth["maps"] <= 4  # malloc's own; eight segments or sixty messages would be more


def test_a_rank_that_does_not_come_is_named(four: list[dict[str, Any]]) -> None:
    for rank in (0, 1, 3):
        assert four[rank]["absent"] in (
            "RuntimeError: all_reduce: ranks [2] (world ranks [2]) did not come within 1 s",
            # who waited a little longer saw the others go
            *(
                f"RuntimeError: all_reduce: ranks [2] (world ranks [2]) did not come within 1 s; "
                f"ranks {gone} (world ranks {gone}) had given up waiting"
                for gone in ([0], [1], [3], [0, 1], [0, 3], [1, 3])
            ),
        )
    assert four[2]["late"].endswith("all_reduce: ranks [0, 1, 3] (world ranks [0, 1, 3]) had given up waiting")
    for rank in four:
        assert rank["after"].startswith("RuntimeError: this group is of no use any more: all_reduce: ranks [")
    assert four[1]["absent of two"] == "RuntimeError: barrier: ranks [1] (world ranks [3]) did not come within 1 s"


def test_different_calls_are_named(four: list[dict[str, Any]]) -> None:
    first, last = "ranks [0, 1, 2] (world ranks [0, 1, 2]) called", "ranks [3] (world ranks [3]) called"
    for rank in four:
        assert {name: error.removeprefix("RuntimeError: ") for name, error in rank["mismatch"].items()} == {
            name: f"ranks called different collectives: {first} {usual}; {last} {other}"
            for name, usual, other in (
                ("operation", "all_reduce of 12 bytes of float32", "barrier"),
                ("bytes", "all_reduce of 12 bytes of float32", "all_reduce of 16 bytes of float32"),
                ("dtype", "all_reduce of 16 bytes of float64", "all_reduce of 16 bytes of int64"),
                ("source", "broadcast of 12 bytes of float32 from 0", "broadcast of 12 bytes of float32 from 1"),
                ("chunks", "all_gather of 4 bytes of float32", "all_gather of 400000 bytes of float32"),
            )
        }


def test_modes_of_autograd(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["modes"] == [[2.0] * 5] * 4


def test_a_closed_group_says_so(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert all("of no use any more: it was closed" in error for error in rank["closed"])


def test_without_room_or_order_of_stores(two: list[dict[str, Any]]) -> None:
    temporary = tempfile.gettempdir()
    for number, rank in enumerate(two):
        small, full, own = rank["small /dev/shm"], rank["full disk"], rank["own /dev/shm"]
        other = rank["other machine"]
        assert (small["transport"], small["folders"]) == ("shared memory", [temporary])
        assert (full["transport"], full["folders"]) == ("gloo", [])
        assert (own["transport"], own["folders"]) == ("gloo", [])
        assert (other["transport"], other["folders"]) == ("gloo", [])
        assert small["insist"] == ""
        for result in (small, full, own, other):
            assert result["wrong"] == []
        for result in (full, own, other):
            assert "transport='shared memory': ranks (0, 1) cannot have it" in result["insist"]
        # One warning, by the rank that makes the segment, with the numbers.
        if number == 0:
            (warning,) = small["warnings"]
            mebibytes = region_bytes(2, SLOT_BYTES) / 2**20
            assert warning.startswith(f"shared memory needs {mebibytes:.1f} MiB in /dev/shm, which has ")
            assert f"using a file in {temporary}" in warning
            (warning,) = full["warnings"]
            assert "/dev/shm" in warning and temporary in warning and "use gloo" in warning
        else:
            assert small["warnings"] == full["warnings"] == []
        assert other["warnings"] == []


def test_killed_ranks_leave_no_segment(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with code -9"):
        run_world(killed_in_use, 2, str(tmp_path))
    for rank in range(2):
        pid, num_mapped = (tmp_path / str(rank)).read_text().split()
        assert num_mapped == "1"
        for folder in ("/dev/shm", tempfile.gettempdir()):
            assert list(Path(folder).glob(f"curtail-*-{pid}-*")) == []


KILLED_BEFORE_UNLINK = """
import os, signal, sys
from pathlib import Path
from engines.parallel import owned_files, segment
owned_files.DEV_SHM = Path(sys.argv[1])
unlinked, left = (segment.Segment.create(4096) for _ in range(2))
unlinked.unlink()
for segment in (unlinked, left):
    segment.memory[0] = 1
print(unlinked.path.name, left.path.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /dev/shm, which other runs of this machine look through too."""
    monkeypatch.setattr(owned_files, "DEV_SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def test_what_the_dead_left_is_reclaimed_and_only_that(own_folder: Path) -> None:
    command = [sys.executable, "-c", KILLED_BEFORE_UNLINK, str(own_folder)]
    dead = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    unlinked, left = dead.stdout.split()
    assert unlinked != left and os.listdir(own_folder) == [left]
    living = Segment.create(4096)
    assert living.path.stat().st_mode & 0o777 == 0o600
    user, space, pid, start_time = map(int, living.path.name.split("-")[1:5])
    end = f"segment-{0:016x}"
    earlier = own_folder / f"curtail-{user}-{space}-{pid}-{start_time - 1}-{end}"  # this pid's earlier owner
    elsewhere = own_folder / f"curtail-{user}-1-{pid}-{start_time}-{end}"  # another container's, which has a lock
    others = [own_folder / f"curtail-{user + 1}-{space}-{2**22 + 1}-1-{end}", own_folder / f"curtail-{user}-notes"]
    for path in (earlier, elsewhere, *others):
        path.touch()
    with open(elsewhere) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert {path.name for path in reclaim()} == {left, earlier.name}
        assert {path.name for path in own_folder.iterdir()} == {
            living.path.name,
            *(path.name for path in (elsewhere, *others)),
        }
    assert reclaim() == [elsewhere]
    living.unlink()
    living.close()


def test_every_layout_once_in_a_fixed_order() -> None:
    assert [[replica.ranks for replica in layout.replicas] for layout in all_layouts(range(4))] == [
        [(0,), (1,), (2,), (3,)],
        [(0, 2), (1, 3)],
        [(0, 1), (2, 3)],
        [(0, 1, 2, 3)],
    ]


def test_a_single_rank() -> None:
    group = SingleRank()
    tensor = torch.arange(6).view(2, 3)
    assert torch.equal(group.all_gather(tensor), tensor[None])
    assert group.all_reduce(tensor) is tensor and group.broadcast(tensor) is tensor
    assert group.all_gather(tensor).data_ptr() != tensor.data_ptr()
    assert group.broadcast_bytes(b"x") == b"x"
