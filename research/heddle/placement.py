"""Which trajectories share a replica: presorted dynamic programming (Heddle §5, Eq. 2 and 3). Torch-free.

Lengths are in descending order, and group i of neighbours goes to replica i. The paper gives replicas in descending TP
size (§6.2). Times are seconds, lengths tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Lengths = NDArray[np.float64]
Interference = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""F of Eq. 2, elementwise: how many times longer a token takes in a group of so many trajectories than alone. It must
not fall with the size."""
BLOCK = 16


@dataclass(frozen=True)
class Server:
    """A replica, as placement sees it."""

    tp_size: int
    token_s: float
    """T of Eq. 2: seconds of a token of a trajectory that is alone."""
    interference: Interference
    longest: float = math.inf
    """Tokens of the longest trajectory that its KV cache can hold."""

    def seconds(self, most: int) -> NDArray[np.float64]:
        """T F(size) for sizes 0 to `most`; 0 of none."""
        return np.concatenate([[0.0], self.token_s * self.interference(np.arange(1, most + 1))])


def printed_seconds(server: Server, group: Lengths, done: Lengths | None = None) -> float:
    """The term of Eq. 2: F(size) times the longest length times T; inf if the replica cannot hold the longest, with
    the tokens that it has already."""
    if float((group if done is None else group + done).max()) > server.longest:
        return math.inf
    return float(group.max() * server.token_s * server.interference(np.array([len(group)]))[0])


@dataclass(frozen=True)
class Placement:
    """Groups of neighbours in descending order of length: group i is for replica i of those given."""

    sizes: tuple[int, ...]
    """Of the groups; 0 for replicas that get none."""
    makespan: float
    """Seconds; inf where no placement gives each trajectory a replica that can hold it."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where each group ends."""
        return tuple(np.cumsum(self.sizes).tolist())


def reference(lengths: ArrayLike, servers: Items[Server]) -> Placement:
    """Eq. 3 as printed, in O(n^2 m), with T and F of replica j. Every group has a trajectory; fewer trajectories than
    replicas use the first ones only. Raises ValueError for lengths that do not descend."""
    values = _checked(lengths, servers)
    n, m = len(values), min(len(values), len(servers))
    dp = np.full((m + 1, n + 1), np.inf)
    dp[0, 0] = 0.0
    cuts = np.zeros((m + 1, n + 1), int)
    for j, server in enumerate(servers[:m], 1):
        seconds, heads = server.seconds(n), _heads(values, server)
        for i in range(j, n + 1):
            k = np.arange(j - 1, i)
            worst = np.maximum(dp[j - 1, k], heads[k] * seconds[i - k])
            best = int(worst.argmin())
            dp[j, i], cuts[j, i] = worst[best], k[best]
    bounds = [n]
    for j in range(m, 0, -1):
        bounds.append(int(cuts[j, bounds[-1]]))
    return _placement(bounds[::-1], float(dp[m, n]), servers)


def fast(lengths: ArrayLike, servers: Items[Server]) -> Placement:
    """The makespan of `reference` in O(n m log n): of the two terms of the max in Eq. 3 one rises with k and the other
    falls, so that a binary search finds where they cross. Raises as `reference`."""
    values = _checked(lengths, servers)
    return _cross(values, np.arange(len(values) + 1), servers)


def aggregated(lengths: ArrayLike, servers: Items[Server], block: int = BLOCK) -> Placement:
    """As `fast`, but does not part blocks of up to `block` neighbours among the shorter half (§5.2: "aggregate short
    trajectories"; the threshold is ours). Raises as `reference`."""
    values = _checked(lengths, servers)
    n = len(values)
    first = max((n + 1) // 2, min(n, len(servers)))
    return _cross(values, np.array([*range(first), *range(first, n, block), n]), servers)


def _cross(values: Lengths, starts: NDArray[np.int64], servers: Items[Server]) -> Placement:
    """Places units of neighbours: unit u is trajectories starts[u] to starts[u + 1] - 1.

    `best[x]` is the makespan of at least j + x units in the first j groups, of which none is empty and enough units are
    left for the others. "At least" lets it rise with x where a slower replica follows a faster one, too.
    """
    num_units, n = len(starts) - 1, len(values)
    m = min(num_units, len(servers))
    width = num_units - m + 1
    seconds = {server: server.seconds(n) for server in set(servers[:m])}
    best = np.full(width, np.inf)
    best[0] = 0.0
    ends: list[NDArray[np.int64]] = [np.arange(width)]
    choices: list[NDArray[np.int64]] = []
    for j, server in enumerate(servers[:m]):
        heads, table = _heads(values, server)[starts[j : j + width]], seconds[server]
        begins, stops = starts[j : j + width], starts[j + 1 : j + 1 + width]

        def group_seconds(x: NDArray[np.int64], heads=heads, table=table, begins=begins, stops=stops) -> Lengths:
            return heads[x] * table[np.maximum(1, stops - begins[x])]

        low, high = np.zeros(width, int), np.full(width, width - 1)
        for _ in range((width - 1).bit_length()):
            middle = (low + high) // 2
            crossed = best[middle] >= group_seconds(middle)
            low, high = np.where(crossed, low, middle + 1), np.where(crossed, middle, high)
            low = np.minimum(low, high)
        before = np.maximum(low - 1, 0)
        here, there = (np.maximum(best[x], group_seconds(x)) for x in (low, before))
        choices.append(np.where(there < here, before, low))
        best = np.minimum(here, there)
        ends.append(np.maximum(np.arange(j + 1, j + 1 + width), ends[-1][choices[-1]] + 1))
    place, bounds = width - 1, []
    for j in range(m - 1, -1, -1):
        bounds.append(int(starts[ends[j + 1][place]]))
        place = int(choices[j][place])
    return _placement([0, *bounds[::-1]], float(best[-1]), servers)


Solve = Callable[[Lengths, Items[Server]], Placement]
PartSeconds = Callable[[Server, slice], float]
"""What some neighbours, at least one, take on a replica."""


def searched(count: int, servers: Items[Server], part_seconds: PartSeconds, tolerance: float = 0.01) -> Placement:
    """`count` neighbours in groups, for any cost of a group that rises with it: bisects the makespan, for which each
    replica takes as many as it can end in time, the last ones perhaps none. The result is within a share `tolerance` of
    the best such placement. With a cost of more than the size, as by simulation, other groups may be better (no
    lemma)."""
    known: dict[tuple[Server, int, int], float] = {}

    def seconds(server: Server, start: int, size: int) -> float:
        key = server, start, size
        if key not in known:
            known[key] = part_seconds(server, slice(start, start + size)) if size else 0.0
        return known[key]

    def within(limit: float) -> Placement | None:
        sizes, start, worst = [], 0, 0.0
        for server in servers:
            low, high = 0, count - start
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if seconds(server, start, middle) <= limit else (low, middle - 1)
            worst = max(worst, seconds(server, start, low))
            sizes.append(low)
            start += low
        return Placement(tuple(sizes), worst) if start == count else None

    best = within(sys.float_info.max) or within(math.inf)
    assert best is not None
    low = 0.0
    for _ in range(200):
        if best.makespan - low <= tolerance * best.makespan or not math.isfinite(best.makespan):
            break
        middle = (low + best.makespan) / 2
        found = within(middle)
        low, best = (middle, best) if found is None else (low, found)
    return best


def _heads(values: Lengths, server: Server) -> Lengths:
    return np.where(values > server.longest, np.inf, values)


def _checked(lengths: ArrayLike, servers: Items[Server]) -> Lengths:
    values = np.asarray(lengths, float)
    if not servers or not values.size:
        raise ValueError(f"placement: {values.size} lengths on {len(servers)} replicas; give at least one of each")
    if not (np.isfinite(values).all() and values[-1] >= 0 and (np.diff(values) <= 0).all()):
        raise ValueError("lengths: must be finite, at least 0 and in descending order; sort them")
    return values


def _placement(bounds: list[int], seconds: float, servers: Items[Server]) -> Placement:
    sizes = np.diff(bounds).tolist() + [0] * (len(servers) - len(bounds) + 1)
    return Placement(tuple(sizes), seconds)
