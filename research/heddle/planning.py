"""The placement of a rollout, from predicted lengths and what decoding takes: Heddle, §5.2. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engines.constraints import Fraction, Positive
from engines.coordination.views import ReplicaView
from research.heddle.interference import GroupSeconds, GroupSimulation, SpreadSeconds, printed_spread
from research.heddle.migration import Groups
from research.heddle.placement import Lengths, Placement, Server, Solve, aggregated, printed_seconds, searched
from research.heddle.ranks import Expected

Places = NDArray[np.int64]
_EVEN = (np.array([8, 3, 14, 5, 10, 1, 12, 7, 0, 11, 6, 13, 2, 9, 4, 15]) + 0.5) / 16
"""Shares of the errors that lie below, in an order in which neighbours differ: each group gets the same ones, so that
in a large group of short ones some are long."""
NUM_SCENARIOS = 8


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Places trajectories, unless its own estimate of the makespan says that least load ends earlier.

    What is predicted is not what comes: with small groups, the slowest of eight is far above the mean. So the estimates
    are means over scenarios, in which each true length is its prediction times an error of the predictor's.
    """

    server_of: Callable[[ReplicaView, float], Server]
    """Of a replica, with F for trajectories of this mean predicted length. Replicas with equal TP sizes and KV caches
    share one, and what is known of its groups."""
    group_seconds: GroupSeconds = printed_seconds
    spread_seconds: SpreadSeconds = printed_spread
    """Of all, where turns go to the least load: most of them then read their KV first."""
    uneven: Positive = 1.0
    """How many times longer least load takes than if loads were even at any time."""
    errors: Items[float] = (0.0,)
    """Quantiles, at equal steps, of the logarithm of true over predicted remaining lengths."""
    yields: bool = True
    margin: Fraction = 0.05
    """Share of least load's makespan by which a placement must be better: estimates are no nearer to the truth, and
    what has begun elsewhere must move."""

    def __call__(self, expected: Items[Expected], replicas: Items[ReplicaView]) -> Groups | None:
        """`expected` in descending order of the totals. Those above what any replica can hold count as the longest that
        one can."""
        problem = self._problem(expected, replicas)
        placement = problem.placed()
        if not math.isfinite(placement.makespan):
            return None
        if self.yields and problem.placed_s(placement) > (1 - self.margin) * problem.spread_s():
            return None
        return Groups(placement.sizes, tuple(problem.ids))

    def estimates(self, expected: Items[Expected], replicas: Items[ReplicaView]) -> tuple[float, float]:
        """Returns the seconds of the placement, and of least load."""
        problem = self._problem(expected, replicas)
        return problem.placed_s(problem.placed()), problem.spread_s()

    def _problem(self, expected: Items[Expected], replicas: Items[ReplicaView]) -> _Problem:
        wide_first = sorted(replicas, key=lambda one: (-one.spec.tp_size, one.spec.id))
        totals, done = np.maximum(np.array(expected, float).T, [[1.0], [0.0]])
        kinds = {(one.spec.tp_size, one.num_kv_tokens): one for one in wide_first}
        known = {kind: self.server_of(one, float(totals.mean())) for kind, one in kinds.items()}
        servers = [known[one.spec.tp_size, one.num_kv_tokens] for one in wide_first]
        most = max(server.longest for server in servers)
        left = np.maximum(1.0, np.minimum(totals, most) - done)
        ids = [one.spec.id for one in wide_first]
        return _Problem(self, servers, ids, left, np.maximum(0.0, np.minimum(done, most - left)))


@dataclass(frozen=True, eq=False)
class _Problem:
    """What is placed at one time. Places are numbers of trajectories in descending order of their totals."""

    planner: Planner
    servers: Items[Server]
    ids: Items[int]
    """The replicas of the servers."""
    left: Lengths
    done: Lengths

    @cached_property
    def first(self) -> Places:
        """In the order in which a replica would run them."""
        return np.argsort(-self.left, kind="stable")

    @cached_property
    def scenarios(self) -> list[Lengths]:
        """True over predicted, of each."""
        count = NUM_SCENARIOS if any(self.planner.errors) else 1
        return [self._factors(np.random.default_rng(one).random(len(self.left))) for one in range(count)]

    def _factors(self, shares: NDArray[np.float64]) -> Lengths:
        errors = self.planner.errors
        return np.exp(np.interp(shares, np.linspace(0, 1, len(errors)), errors))

    def _part(self, start: int, end: int) -> Places:
        return self.first[(self.first >= start) & (self.first < end)]

    def _true(self, server: Server, places: Places, factors: Lengths) -> Lengths:
        """What the replica cannot hold stays so."""
        left, end = self.left[places], server.longest - self.done[places]
        return np.where(left > end, left, np.minimum(left * factors, end))

    def _seconds(self, server: Server, places: Places, factors: Lengths) -> float:
        true = self._true(server, places, factors)
        return self.planner.group_seconds(server, true, self.done[places])

    def placed(self) -> Placement:
        """The best groups of neighbours, each of which has the same errors."""
        pattern = self._factors(_EVEN)

        def of_part(server: Server, part: slice) -> float:
            places = self._part(part.start, part.stop)
            return self._seconds(server, places, np.resize(pattern, len(places)))

        return searched(len(self.left), self.servers, of_part, tolerance=0.02)

    def placed_s(self, placement: Placement) -> float:
        parts = [self._part(start, end) for start, end in pairwise([0, *placement.bounds])]
        pairs = [(server, places) for server, places in zip(self.servers, parts, strict=True) if len(places)]
        return fmean(
            max(self._seconds(server, places, factors[places]) for server, places in pairs)
            for factors in self.scenarios
        )

    def spread_s(self) -> float:
        """Where turns go to the least load."""
        longest = max(server.longest for server in self.servers)
        done = np.minimum(self.done[self.first], longest - 1)

        def of(factors: Lengths) -> float:
            left = np.clip(self.left[self.first] * factors, 1, longest - done)
            return self.planner.spread_seconds(self.servers, left, done)

        return self.planner.uneven * fmean(of(factors[self.first]) for factors in self.scenarios)


def priced(planner: Planner) -> Solve:
    """For Algorithm 2: returns placements whose seconds are the planner's estimates, for trajectories of these lengths
    in the order in which a predictor with its errors would put them; least load's where these are fewer."""

    def solve(lengths: ArrayLike, servers: Items[Server]) -> Placement:
        values = np.asarray(lengths, float)
        placement, none = aggregated(values, servers), np.zeros(len(values))
        if not math.isfinite(placement.makespan):
            return placement
        shares = np.random.default_rng(0).random(len(values))
        errors = np.interp(shares, np.linspace(0, 1, len(planner.errors)), planner.errors)
        predicted = values[np.argsort(errors - np.log(values), kind="stable")]
        parts = np.split(predicted, placement.bounds[:-1])
        placed_s = max(
            planner.group_seconds(server, np.minimum(part, server.longest), none[: len(part)])
            for server, part in zip(servers, parts, strict=True)
            if len(part)
        )
        spread_s = _Problem(replace(planner, errors=(0.0,)), servers, (), values, none).spread_s()
        return replace(placement, makespan=min(placed_s, spread_s))

    return solve


def with_tools(
    group: GroupSimulation, *, growth: float, tool_s: float, prefill_s: float, read_s: float = 0.0
) -> GroupSimulation:
    """A group of agents, whose context grows by `growth` tokens for each generated one, and whose tools take `tool_s`
    for each: of n trajectories, those that are not at their tools share the replica. What is observed takes `prefill_s`
    for each token; `read_s` are the seconds for which the replica reads KV, for each generated token."""
    most = len(group.base_s) - 1
    sizes = np.arange(most + 1, dtype=float)
    context = group.num_kv_tokens / 2 / most
    running = sizes.copy()
    base_s = group.base_s + sizes * ((growth - 1) * prefill_s + read_s)
    for _ in range(30):
        step_s = np.interp(running, sizes, base_s + group.token_s * sizes * context)
        running = np.maximum(np.minimum(sizes, 1), sizes * step_s / (step_s + tool_s))
    share = np.divide(running, sizes, out=np.ones_like(sizes), where=sizes > 0)
    return replace(
        group,
        base_s=np.interp(running, sizes, base_s) + tool_s,
        token_s=np.interp(running, sizes, group.token_s) * growth * share,
        num_kv_tokens=int(group.num_kv_tokens / growth),
        num_prompt_tokens=round(group.num_prompt_tokens / growth),
    )
