"""How many GPUs each replica gets: Heddle, §6, Algorithm 2, and what it chooses from. Torch-free.

An allocation is a tuple of TP sizes, in descending order, whose sum is the number of GPUs. The number of replicas
varies: Algorithm 2 fixes it, but its splits and merges change it. Groups of trajectories go to replicas in descending
order of both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engines.parallel.layout import Layout, ReplicaSpec
from research.heddle.placement import Lengths, Server, Solve, aggregated

Sizes = tuple[int, ...]
COOLING, THRESHOLD = 0.95, 0.002
"""Of the annealing temperature in each step, and the share of the first makespan at which it ends: our choice."""


@dataclass(frozen=True)
class Allocation:
    tp_sizes: Sizes
    makespan: float
    """As placed; inf where no replica can hold the longest trajectory."""


def check_sizes(sizes: Items[int], num_gpus: int, servers: Mapping[int, Server]) -> None:
    """Raises ValueError for TP sizes that there is no replica of, or whose sum is not `num_gpus`."""
    if unknown := sorted(set(sizes) - set(servers)):
        raise ValueError(
            f"tp_sizes={list(sizes)}: {unknown[0]} does not divide the model's heads, or holds no KV beside the "
            f"weights; use {sorted(servers)}"
        )
    if sum(sizes) != num_gpus:
        raise ValueError(f"tp_sizes={list(sizes)}: are {sum(sizes)} GPUs in all; give sizes of {num_gpus} in all")


def all_allocations(num_gpus: int, tp_sizes: Items[int]) -> Iterator[Sizes]:
    """Yields each allocation once: of 64 GPUs over 1, 2, 4 and 8 there are 969."""
    largest, *others = sorted(set(tp_sizes), reverse=True) or [0]
    if largest < 1 or num_gpus < 0:
        return
    if not others:
        if num_gpus % largest == 0:
            yield (largest,) * (num_gpus // largest)
        return
    for count in range(num_gpus // largest, -1, -1):
        for rest in all_allocations(num_gpus - count * largest, others):
            yield (largest,) * count + rest


def exhaustive(lengths: Lengths, num_gpus: int, servers: Mapping[int, Server], solve: Solve = aggregated) -> Allocation:
    """The best of all allocations."""
    found = (placed(one, lengths, servers, solve) for one in all_allocations(num_gpus, [*servers]))
    best = min(found, key=lambda one: one.makespan, default=None)
    if best is None:
        raise ValueError(f"num_gpus={num_gpus}: no sum of TP sizes {sorted(servers)}; give others")
    return best


def placed(sizes: Sizes, lengths: Lengths, servers: Mapping[int, Server], solve: Solve = aggregated) -> Allocation:
    """An allocation with the makespan of its placement; the sizes are in descending order."""
    return Allocation(sizes, float(solve(lengths, [servers[size] for size in sizes]).makespan))


def anneal(
    lengths: Lengths,
    num_gpus: int,
    servers: Mapping[int, Server],
    *,
    seed: int = 0,
    start: Sizes | None = None,
    solve: Solve = aggregated,
) -> Allocation:
    """Algorithm 2: sort-initialised simulated annealing. `lengths` in descending order, `servers` by the TP sizes to
    choose from. `start` is sampled if it is not given.

    Raises ValueError as `check_sizes`, and where no sum of sizes is `num_gpus`.
    """
    rng, known = random.Random(seed), dict[Sizes, Allocation]()

    def cost(sizes: Sizes) -> Allocation:
        if sizes not in known:
            known[sizes] = placed(sizes, lengths, servers, solve)
        return known[sizes]

    first = _sampled(num_gpus, sorted(servers), rng) if start is None else tuple(sorted(start, reverse=True))
    check_sizes(first, num_gpus, servers)
    now = best = cost(first)
    while math.isinf(now.makespan) and (wider := _merged(now.tp_sizes, servers, rng)) is not None:
        now = best = cost(wider)  # no replica could hold the longest trajectory
    temperature, end = now.makespan, THRESHOLD * now.makespan
    while end < temperature < math.inf:
        tried = cost(_perturbed(now.tp_sizes, servers, rng))
        worse = tried.makespan - now.makespan
        if worse < 0 or rng.random() < math.exp(-worse / temperature):
            now = tried
        best = min(best, now, key=lambda one: one.makespan)
        temperature *= COOLING
    return best


def chosen(
    lengths: Lengths,
    num_gpus: int,
    servers: Mapping[int, Server],
    *,
    seed: int = 0,
    start: Sizes | None = None,
    solve: Solve = aggregated,
    margin: float = 0.05,
) -> Allocation:
    """What Algorithm 2 finds, if it promises to end earlier than all equal sizes by more than a share `margin`, since
    estimates are no nearer to a rollout. Else the widest equal sizes that promise the same within the margin: the
    longest trajectory, on which the end depends, is fastest there. Raises ValueError as `anneal`."""
    found = anneal(lengths, num_gpus, servers, seed=seed, start=start, solve=solve)
    sizes = [size for size in sorted(servers) if num_gpus % size == 0]
    equal = [placed((size,) * (num_gpus // size), lengths, servers, solve) for size in sizes]
    best = min((one.makespan for one in equal), default=math.inf)
    if found.makespan < (1 - margin) * best or math.isinf(best):
        return found
    return [one for one in equal if one.makespan <= (1 + margin) * best][-1]


def _sampled(num_gpus: int, tp_sizes: Items[int], rng: random.Random) -> Sizes:
    """A random allocation, filled with the smallest size: sampled sizes alone hardly have the right sum."""
    sizes, left = list[int](), num_gpus
    while left and (fitting := [size for size in tp_sizes if size <= left]):
        sizes.append(rng.choice(fitting))
        left -= sizes[-1]
    return tuple(sorted(sizes, reverse=True))


def _merged(sizes: Sizes, servers: Mapping[int, Server], rng: random.Random) -> Sizes | None:
    twins = sorted({size for size in sizes if sizes.count(size) > 1 and 2 * size in servers})
    return None if not twins else _replaced(sizes, [size := rng.choice(twins), size], [2 * size])


def _perturbed(sizes: Sizes, servers: Mapping[int, Server], rng: random.Random) -> Sizes:
    """Splits a replica in two, merges two equal ones, or redistributes the GPUs of two, at random."""
    moves: list[Callable[[], Sizes | None]] = [
        lambda: _split(sizes, servers, rng),
        lambda: _merged(sizes, servers, rng),
        lambda: _redistributed(sizes, servers, rng),
    ]
    rng.shuffle(moves)
    return next((moved for move in moves if (moved := move()) is not None), sizes)


def _split(sizes: Sizes, servers: Mapping[int, Server], rng: random.Random) -> Sizes | None:
    wide = sorted({size for size in sizes if size % 2 == 0 and size // 2 in servers})
    return None if not wide else _replaced(sizes, [size := rng.choice(wide)], [size // 2, size // 2])


def _redistributed(sizes: Sizes, servers: Mapping[int, Server], rng: random.Random) -> Sizes | None:
    """Two replicas become two or three others with as many GPUs."""
    if len(sizes) < 2:
        return None
    two = rng.sample(sizes, 2)
    total, known = sum(two), sorted(servers)
    pairs = [[a, total - a] for a in known if total - a in servers and a <= total - a]
    triples = [
        [a, b, total - a - b] for a in known for b in known if a <= b <= total - a - b and total - a - b in servers
    ]
    others = [one for one in pairs + triples if sorted(one) != sorted(two)]
    return None if not others else _replaced(sizes, two, rng.choice(others))


def _replaced(sizes: Sizes, gone: list[int], new: list[int]) -> Sizes:
    left = list(sizes)
    for size in gone:
        left.remove(size)
    return tuple(sorted([*left, *new], reverse=True))


def layout_of(tp_sizes: Items[int], *, gpus_per_host: int, epoch: int = 0) -> Layout:
    """Returns replicas of these sizes, in descending order, on as many ranks; the ranks of a host are neighbours, and
    no replica is on two. A replica's ranks are those of a nested layout of its host, so that few bytes move from one
    allocation to another.

    Raises ValueError for no sizes, for one that is no power of two or above `gpus_per_host`, and for sizes that need a
    replica on two hosts.
    """
    if not tp_sizes:
        raise ValueError("tp_sizes=[]: has no replica; give at least one size")
    if wrong := [size for size in tp_sizes if size < 1 or size & (size - 1) or size > gpus_per_host]:
        raise ValueError(f"tp_sizes={list(tp_sizes)}: {wrong[0]} is no power of two up to {gpus_per_host}; give others")
    free = _blocks(sum(tp_sizes), gpus_per_host)
    replicas = list[ReplicaSpec]()
    for size in sorted(tp_sizes, reverse=True):
        place = next((place for place, block in enumerate(free) if len(block) >= size), None)
        if place is None:
            raise ValueError(
                f"tp_sizes={list(tp_sizes)}: with gpus_per_host={gpus_per_host}, a replica of {size} would be on two "
                f"hosts; give smaller sizes"
            )
        ranks = free.pop(place)
        while len(ranks) > size:
            free.insert(place, ranks[1::2])
            ranks = ranks[0::2]
        replicas.append(ReplicaSpec(id=ranks[0], ranks=ranks))
    return Layout(epoch=epoch, replicas=tuple(replicas))


def _blocks(num_ranks: int, gpus_per_host: int) -> list[tuple[int, ...]]:
    """The ranks of each host in blocks whose sizes are powers of two, the largest first."""
    blocks = list[tuple[int, ...]]()
    for first in range(0, num_ranks, gpus_per_host):
        left = (*range(first, min(first + gpus_per_host, num_ranks)),)
        while left:
            count = 1 << (len(left).bit_length() - 1)
            blocks.append(left[:count])
            left = left[count:]
    return blocks
