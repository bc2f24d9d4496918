"""The placement of a rollout, from predicted lengths and what decoding takes: Heddle, §5.2. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from engines.constraints import Fraction, NonNegative
from engines.coordination.views import ReplicaView
from research.heddle.interference import GroupSimulation
from research.heddle.migration import Groups
from research.heddle.placement import (
    GroupSeconds,
    Lengths,
    Placement,
    Server,
    least_load,
    makespan,
    printed_seconds,
    searched,
)

_DEVIATIONS = np.array([NormalDist().inv_cdf((place + 0.5) / 16) for place in range(16)])[
    [8, 3, 14, 5, 10, 1, 12, 7, 0, 11, 6, 13, 2, 9, 4, 15]
]
"""Of a normal error, in an order in which neighbours differ."""


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Places trajectories, unless its own estimate of the makespan says that least load ends earlier."""

    server_of: Callable[[ReplicaView, float], Server]
    """Of a replica, with F for trajectories of this mean predicted length."""
    group_seconds: GroupSeconds = printed_seconds
    """By which the placement is compared with least load. It is given a group in the order of predicted length."""
    solve: Callable[[Lengths, Items[Server], GroupSeconds], Placement] = searched
    error: NonNegative = 0.0
    """Standard deviation of the logarithm of true over predicted lengths. Each group gets the same spread of errors: in
    a large group of short ones, some are long."""
    yields: bool = True
    margin: Fraction = 0.05
    """Share of least load's makespan by which a placement must be better: estimates are no nearer to the truth, and
    what has begun elsewhere must move."""

    def __call__(self, lengths: Items[float], replicas: Items[ReplicaView]) -> Groups | None:
        """`lengths` in descending order."""
        wide_first = sorted(replicas, key=lambda one: (-one.spec.tp_size, one.spec.id))
        values = np.maximum(np.asarray(lengths, float), 1.0)
        servers = [self.server_of(one, float(values.mean())) for one in wide_first]
        factors = np.exp(self.error * np.resize(_DEVIATIONS, len(values)))

        def seconds(server: Server, group: Lengths) -> float:
            return self.group_seconds(server, np.minimum(group * factors[: len(group)], server.longest))

        placement = self.solve(values, servers, seconds)
        placed = [servers[one] for one in placement.order]
        parts = np.split(values, placement.bounds[:-1])
        if self.yields:
            spread = makespan(least_load(values, servers), servers, seconds)
            if makespan(parts, placed, seconds) > (1 - self.margin) * spread:
                return None
        return Groups(placement.sizes, tuple(wide_first[one].spec.id for one in placement.order))


def with_tools(group: GroupSimulation, *, growth: float, tool_s: float, prefill_s: float) -> GroupSimulation:
    """A group of agents, whose context grows by `growth` tokens for each generated one, and whose tools take `tool_s`
    for each: of n trajectories, those that are not at their tools share the replica. What is observed takes `prefill_s`
    for each token."""
    most = len(group.base_s) - 1
    sizes = np.arange(most + 1, dtype=float)
    context = group.num_kv_tokens / 2 / most
    running = sizes.copy()
    base_s = group.base_s + sizes * (growth - 1) * prefill_s
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
