"""What Heddle's planners find, and how long they take: against brute force, and at the paper's sizes. Tier: live.

python experiments/heddle_planning.py
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from engines.constraints import Count
from engines.coordination.views import ReplicaView
from engines.parallel.layout import ReplicaSpec
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import short, timed
from research.heddle.allocation import anneal, exhaustive
from research.heddle.interference import SizeInterference, server_of
from research.heddle.placement import Lengths, Server, aggregated, fast, printed_seconds, reference
from research.heddle.planning import Planner
from research.heddle.ranks import Expected
from research.pat.profile import deployment_of
from research.simulator.datasheets import H100, QWEN3_14B
from research.simulator.pace import ProfilePace

NUM_GPUS, NUM_TRAJECTORIES, NUM_REPLICAS, TP_SIZES = 64, 6400, 16, (1, 2, 4, 8)
MEDIAN, CAP = 4000.0, 40_000


@dataclass(frozen=True, kw_only=True)
class PlanningConfig(ResultOptions):
    """Check and time Heddle's planners."""

    cases: Count = 500
    """Small cases that are compared with all partitions."""
    seeds: Count = 5
    """Sets of lengths whose allocations are compared with all 969."""


def main() -> dict[str, Any]:
    config = launch.options(PlanningConfig)
    return report("heddle_planning", config, measure(config.cases, config.seeds))


def measure(num_cases: int = 500, num_seeds: int = 5) -> dict[str, Any]:
    """`dp_exact`: whether the DP has found the best of all partitions; `dp_ms`, `aggregated_ms`, `planner_ms`: its
    placement of 6,400 trajectories on 16 replicas, Algorithm 2's, and that of rollouts, with an error's 21 quantiles;
    `annealing_gap`: by how much Algorithm 2 is above the best allocation of 64 GPUs, the median."""
    servers = replicas()
    gaps, seconds = [], []
    for seed in range(num_seeds):
        lengths = long_tailed(NUM_TRAJECTORIES // 16, seed)  # so that all 969 can be tried
        best = exhaustive(lengths, NUM_GPUS, servers).makespan
        gaps.append(anneal(lengths, NUM_GPUS, servers, seed=seed).makespan / best - 1)
        many = long_tailed(NUM_TRAJECTORIES, seed)
        seconds.append(timed(partial(anneal, many, NUM_GPUS, servers))[0])
    lengths, equal = long_tailed(NUM_TRAJECTORIES, 1), [servers[1]] * NUM_REPLICAS
    planner = Planner(server_of=lambda *_: servers[1], errors=np.linspace(-1.0, 1.0, 21).tolist())
    calls: dict[str, Callable[[], object]] = {
        "dp": partial(fast, lengths, equal),
        "aggregated": partial(aggregated, lengths, equal),
        "planner": partial(planner, [Expected(float(length), 0.0) for length in lengths], views()),
    }
    times = {name: statistics.median(timed(call)[0] for _ in range(9)) for name, call in calls.items()}
    worse, most = mapping(num_cases)
    return {
        "dp_exact": all(is_exact(seed) for seed in range(num_cases)),
        **{f"{name}_ms": short(1e3 * seconds) for name, seconds in times.items()},
        "annealing_gap": short(statistics.median(gaps)),
        "annealing_gap_most": short(max(gaps)),
        "annealing_s": short(statistics.median(seconds)),
        "mapping": {"not_the_best": short(worse), "worst": short(most)},
    }


def long_tailed(count: int, seed: int) -> Lengths:
    drawn: Lengths = np.random.default_rng(seed).lognormal(math.log(MEDIAN), 1.0, count)
    return np.sort(drawn.clip(1, CAP))[::-1]


def replicas() -> dict[int, Server]:
    """Of a 14B model on H100, by TP size."""
    pace = ProfilePace(device=H100, shape=QWEN3_14B)
    kv = {size: count for size, count in pace.num_kv_tokens(1).items() if size in TP_SIZES}
    deployment = deployment_of(pace, num_ranks=8, num_kv_tokens=kv, max_num_seqs=256, max_model_len=CAP)
    return {size: server_of(deployment, size, context=MEDIAN) for size in kv}


def views() -> list[ReplicaView]:
    """Equal replicas that are idle, as a policy sees them."""
    none = dict.fromkeys(
        ("num_assigned", "num_tokens", "num_reserved_blocks", "num_running", "num_waiting", "num_free_blocks"), 0
    )
    return [
        ReplicaView(
            spec=ReplicaSpec(id=rank, ranks=(rank,)), accepts=True, max_num_seqs=256, block_size=16, num_blocks=10**5,
            seconds=0.0, **none,
        )
        for rank in range(NUM_REPLICAS)
    ]  # fmt: skip


def rising(slope: float) -> SizeInterference:
    """F(s) = 1 + slope (s - 1)."""
    return SizeInterference(np.array([1 + slope * others for others in range(8)]))


def _small(seed: int) -> tuple[list[float], random.Random]:
    rng = random.Random(seed)
    return sorted((float(rng.randint(1, 30)) for _ in range(rng.randint(1, 7))), reverse=True), rng


def is_exact(seed: int) -> bool:
    """Whether the DP has the makespan of the best of all partitions, on equal replicas (Lemma 5.1)."""
    lengths, rng = _small(seed)
    count = min(len(lengths), rng.randint(1, 3))
    one = Server(1, 1.0, rising(rng.choice([0.0, 0.1, 0.5, 2.0])))
    best = math.inf
    for choice in itertools.product(range(count), repeat=len(lengths)):
        groups = [np.array([x for x, its in zip(lengths, choice, strict=True) if its == g]) for g in range(count)]
        if all(map(len, groups)):
            best = min(best, max(printed_seconds(one, group) for group in groups))
    return all(math.isclose(solve(lengths, [one] * count).makespan, best) for solve in (reference, fast))


def mapping(num_cases: int) -> tuple[float, float]:
    """Returns in which share of small cases "the longest on the widest" (§6.2) is not the best order of unequal
    replicas, and by which factor it is slower at most. How much a replica suffers from company is drawn for each."""
    ratios = []
    for seed in range(num_cases):
        lengths, rng = _small(seed)
        some = [Server(size, size**-0.5, rising(rng.random())) for size in (4, 2, 1)[: rng.randint(2, 3)]]
        orders: Items[tuple[Server, ...]] = [*itertools.permutations(some)]
        best = min(reference(lengths, list(order)).makespan for order in orders)
        ratios.append(reference(lengths, some).makespan / best)
    return sum(ratio > 1 + 1e-9 for ratio in ratios) / num_cases, max(ratios)


if __name__ == "__main__":
    launch.run(main)
