"""The rollouts of rose_sim.py: dedicated replicas beside serving ones, in virtual time. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from engines.config import EngineConfig
from engines.coordination.policies import OnDemand, least_loaded, where_it_was
from engines.coordination.views import ReplicaView, SequenceView
from engines.parallel.layout import ReplicaSpec, nested_layout
from engines.serving.policies import AdmissionPolicy
from experiments.comparison.rollouts import Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.rose_policies import DRAWN, FILES, SLOTS, Cell, admission_of
from research.rose.admission import ServingTimes
from research.rose.baselines import IdleFor
from research.rose.memory import ServingFirst, StaticSplit
from research.simulator.cluster import OutsideReplica, SimulatedRollout
from research.simulator.datasheets import H100, LLAMA_8B, QWEN3_8B
from research.simulator.pace import ProfilePace
from research.simulator.serving import Served, ServingSetup
from research.workloads.agents import GROUP_SIZE
from research.workloads.arrivals import Arrival, read_trace
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import TrajectoryLengths

if TYPE_CHECKING:
    from experiments.rose_sim import RoseSimConfig

BLOCK_SIZE, SERVING_BLOCKS, ROLLOUT_BLOCKS = 16, 8, 9
"""Blocks in a page: 8 of Qwen3-8B (36 layers) are as large as 9 of Llama-3.1-8B (32 layers)."""
PAGE_BYTES = SERVING_BLOCKS * BLOCK_SIZE * QWEN3_8B.kv_bytes_per_token
ROLLOUT_PACE, SERVING_PACE = (ProfilePace(device=H100, shape=shape) for shape in (LLAMA_8B, QWEN3_8B))
SPEC = ReplicaSpec(id=0, ranks=(0,))
CHUNK = 512
"""Tokens of a prefill chunk (§4.1)."""
SERVING_SLOTS = 128
NUM_PROMPT_TOKENS, CAP = 512, 8192
TRAJECTORIES = TrajectoryLengths(
    num_turns=LogNormalLengths(median=5, sigma=0.5, cap=12),
    generated=LogNormalLengths(median=200, sigma=0.7, cap=2000),
    observed=LogNormalLengths(median=300, sigma=0.6, cap=2000),
    tool_median_s=0.4,
    tool_sigma=0.8,
    correlation=0.4,
    cap=CAP,
)
"""Of an assumed agent: turns and tools as in games, answers of tools longer than turns."""
WARM_S, WINDOW_S, LONGEST_S = 30.0, 400.0, 1200.0
"""Of serving before the rollout; between the windows of two replicas in a trace; of arrivals at density 1."""
GUARD_S = 3e-3
NEVER_S = 1e9


@dataclass(frozen=True, kw_only=True)
class Case:
    """How serving replicas lend in a rollout."""

    cell: Cell = "conversation"
    admission: str = "dual"
    """A policy, `swap`, or `alone`: nothing is lent."""
    memory: Literal["shared", "halves"] = "shared"
    has_prefix_cache: bool = True
    """Of the rollout, on serving replicas."""
    lease_s: float = 10.0
    density: float = 1.0
    """Times the requests; 0: none come."""
    num_serving: int


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a case. Times are in seconds; `ttft` and `gaps` are of all requests that came during the rollout."""

    ttft: list[float]
    gaps: list[list[float]]
    is_whole: bool
    """Whether each sequence ended at its length, and all requests that came were answered."""
    rollout_s: float
    lent_s: list[float]
    """By serving replica."""
    free_s: float
    """In which the serving models did not step."""
    num_tokens: int
    """Of the rollout, drawn on serving replicas."""
    counts: dict[str, int]
    simulated_in: float


def simulate(config: RoseSimConfig, slos: dict[Cell, tuple[float, float]], case: Case) -> Done:
    """`slos`: TTFT and TPOT in seconds; not needed where nothing is lent."""
    begun = time.perf_counter()
    turns = TRAJECTORIES.draw(config.groups, GROUP_SIZE, config.seed)
    workload = Workload.of_trajectories(turns, num_prompt_tokens=NUM_PROMPT_TOKENS, most=CAP)
    world, variant = world_of(config, slos.get(case.cell, (1.0, 1.0)), case)
    cluster, _ = world.start(workload, variant)
    done = cluster.roll_out(workload.states())
    requests = [one for served in done.served for one in served.requests if one.arrived_s >= 0]
    return Done(
        ttft=[one.ttft_s for one in requests],
        gaps=[one.gaps_s for one in requests],
        is_whole=done.lengths == workload.lengths and all_answered(done, cluster.config.outside),
        rollout_s=done.makespan,
        lent_s=[one.lent.seconds for one in done.served],
        free_s=sum(free_s(one, done.makespan) for one in done.served),
        num_tokens=sum(one.lent.num_tokens for one in done.served),
        counts={
            name: sum(getattr(one.lent, name) for one in done.served)
            for name in ("num_cuts", "num_taken_back", "num_stalled")
        },
        simulated_in=time.perf_counter() - begun,
    )


def all_answered(done: SimulatedRollout, outside: Items[OutsideReplica]) -> bool:
    """Whether each request that came has all of its tokens, and all came that arrived before the rollout's end."""
    for served, one in zip(done.served, outside, strict=True):
        assert one.serving is not None
        num_due = sum(arrival.time_s < done.makespan for arrival in one.serving.arrivals)
        if len(served.requests) < num_due or any(len(one.token_s) != one.num_tokens for one in served.requests):
            return False
    return True


def free_s(served: Served, rollout_s: float) -> float:
    """Seconds of the rollout in which the serving model did not step; what it answers later leaves none free."""
    return served.lent.seconds + served.idle_s + served.changing_s + max(0.0, rollout_s - served.until_s)


def world_of(config: RoseSimConfig, slo: tuple[float, float], case: Case) -> tuple[SimulatedWorld, Variant]:
    num_pages = int(config.memory_gb * 1e9 / PAGE_BYTES)
    outside = tuple(
        OutsideReplica(
            join_s=NEVER_S if case.admission == "alone" else 0.0,
            serving=setup_of(config, slo, case, arrivals_of(config, case, rank), num_pages),
        )
        for rank in range(case.num_serving)
    )
    world = SimulatedWorld(
        pace=ROLLOUT_PACE,
        options={
            "block_size": BLOCK_SIZE,
            "max_num_seqs": SLOTS,
            "max_num_batched_tokens": 2048,
            "max_model_len": NUM_PROMPT_TOKENS + CAP,
        },
        num_kv_tokens={1: num_pages * ROLLOUT_BLOCKS * BLOCK_SIZE},
        cluster={"outside": outside, "pool_tokens": 0, "records_steps": False},
    )
    schedule = partial(OnDemand, partial(spill_over, config.dedicated))
    return world, Variant(layout=nested_layout(range(config.dedicated), 1), schedule=schedule)


def setup_of(
    config: RoseSimConfig, slo: tuple[float, float], case: Case, arrivals: list[Arrival], num_pages: int
) -> ServingSetup:
    """A `swap` has one model in the memory at a time, which then has all pages."""
    times = ServingTimes.of(SERVING_PACE, SPEC, chunk_tokens=CHUNK, max_num_seqs=SERVING_SLOTS)
    is_split = case.memory == "halves" or case.admission == "swap"

    def admission() -> AdmissionPolicy:
        if case.admission == "swap":
            return IdleFor(config.idle_s)
        return admission_of("none" if case.admission == "alone" else case.admission, times, *slo, GUARD_S)

    return ServingSetup(
        arrivals=arrivals,
        pace=SERVING_PACE,
        engine=EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=SERVING_SLOTS, max_num_batched_tokens=CHUNK),
        rollout_engine=EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=CHUNK + SLOTS,
            prefill_chunk_size=CHUNK,
            prefix_caching=case.has_prefix_cache,
        ),
        num_pages=2 * num_pages if case.admission == "swap" else num_pages,
        serving_blocks=SERVING_BLOCKS,
        rollout_blocks=ROLLOUT_BLOCKS,
        admission=admission,
        memory=StaticSplit if is_split else ServingFirst,
        serving_share=0.5 if is_split else 1.0,
        lease_s=case.lease_s,
        change_s=config.change_s if case.admission == "swap" else 0.0,
    )


def arrivals_of(config: RoseSimConfig, case: Case, rank: int) -> list[Arrival]:
    """The requests of a serving replica. Raises ValueError where the trace has none."""
    density = case.density * (config.full_rate if case.cell == "full" else 1.0)
    if not density:
        return []
    if config.traces is None:
        found = DRAWN[case.cell].draw(LONGEST_S, config.seed * 1000 + rank)
    else:
        found = read_trace(config.traces / FILES[case.cell], start_s=rank * WINDOW_S)
    return [replace(one, time_s=one.time_s / density - WARM_S) for one in found]


def spill_over(num_dedicated: int, sequence: SequenceView, roomy: list[ReplicaView]) -> ReplicaView:
    """A trajectory stays where its KV may still be, but comes back from a serving replica where a dedicated one has few
    sequences; new ones go to dedicated replicas while these have room (ROSE §4.3, and its placement order)."""
    dedicated = [one for one in roomy if one.spec.id < num_dedicated]
    idle = [one for one in dedicated if one.num_assigned < one.max_num_seqs // 2]
    chosen = where_it_was(sequence, roomy)
    if not sequence.num_turns:
        return least_loaded(dedicated or roomy)
    return least_loaded(idle) if idle and chosen.spec.id >= num_dedicated else chosen
