"""On-demand against static dispatch of one long-tailed batch over data-parallel replicas, in paced mode.

    python experiments/bench/dispatch.py
    python experiments/bench/dispatch.py --tensor-parallel-size 2 --slots 8

Processes, model and messages are real, but each step lasts as long as the latency profile of an 8B model on H100s gives
for its batch and context (docs/latency_profiles.md), `--scale` times slower, so that two cores can run four replicas.
Lengths are log-normal and hidden: dispatch knows only the cap. The time is the makespan. Its floor, which no dispatch
can beat, is the time of all tokens at the throughput of full batches on every replica, or of the longest sequence
alone, whichever is longer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engines import SamplingParams
from engines.constraints import Count, NonNegative
from engines.coordination.policies import OnDemand, SchedulePolicy, Static
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import ReplicaSpec, nested_layout
from engines.rollout.pace import decode_seconds
from engines.rollout.telemetry import StepRecord, busy_share
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.machine import this_tier
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Variant, Workload, hidden_lengths, makespan
from experiments.comparison.turns import Row, interleave, make_row, short
from experiments.figures import draw_timelines
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from research.workloads.lengths import LogNormalLengths

PROMPT_LENGTH = 16
CONTEXT_SCALE = 16
"""Context tokens in the profile per token here: lengths are scaled down, their spread is not."""
SIGMA = 0.884
"""Spread of the logarithm of the length, from PAT's anchors."""
ON_DEMAND, STATIC = "on demand", "static"
Rollout = list[StepRecord]


@dataclass(frozen=True, kw_only=True)
class DispatchBench(harness.BenchConfig):
    """Time rollouts of a long-tailed batch under static and on-demand dispatch, paced, interleaved."""

    turns: Count = 3
    """Interleaved measurements of each dispatch; medians are reported."""
    model: str = "0.8m"
    """The model that samples tokens (the profile sets the time): a name in research/workloads/shapes.py or a folder."""
    ranks: Count = 4
    """Processes; under torchrun, its number of processes applies instead."""
    tensor_parallel_size: Count = 1
    """Processes of one replica, each with a shard of the model."""
    scale: NonNegative = 2.0
    """Seconds here per second of the profile; 0: steps are not paced (tier "live", no floor)."""
    batch: Count = 384
    """Sequences in the batch."""
    slots: Count = 16
    """Most sequences that a replica runs at a time, as its KV cache would limit them."""
    cap: Count = 600
    """Longest response, tokens. Dispatch knows nothing else about the lengths, whose median is 100."""
    figure: Path | None = None
    """Draw both timelines to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pace()  # ValueError for a size that no profile has

    def pace(self) -> ProfilePace | None:
        one = profile(f"h100-8b-tp{self.tensor_parallel_size}")
        if not self.scale:
            return None
        return ProfilePace(device=one.device, shape=one.shape, scale=self.scale, token_scale=CONTEXT_SCALE)


def measure(config: DispatchBench) -> dict[str, Any]:
    launch.start_under_torchrun(config.ranks)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = TorchGroup()
    layout = nested_layout(range(world.size), config.tensor_parallel_size)
    groups = GroupCache(world, [layout])
    pace = config.pace()
    lengths = LogNormalLengths(median=100.0, sigma=SIGMA, cap=config.cap).draw(config.batch, seed=0)
    workload = Workload(
        prompts=random_prompts(config.batch, PROMPT_LENGTH),
        params=SamplingParams(max_tokens=config.cap, ignore_eos=True),
        lengths=hidden_lengths([[length] for length in lengths]),
    )
    longest = PROMPT_LENGTH + config.cap
    room = config.slots * (longest + 16)
    options = {"dtype": "float32", "max_num_seqs": config.slots, "max_model_len": longest}
    schedules: dict[str, Callable[[], SchedulePolicy]] = {ON_DEMAND: OnDemand, STATIC: Static}
    with checkpoint(config.model, max_positions=longest, dtype="float32", world=world) as folder:
        bench = RealWorld(model=folder, groups=groups, pace=pace, options=options)
        variants = {
            name: partial(bench.roll_out, workload, Variant(layout=layout, num_kv_tokens=room, schedule=policy))
            for name, policy in schedules.items()
        }
        rollouts = interleave(variants, config.turns)
    assert len({one.digest for some in rollouts.values() for one in some}) == 1, "dispatch changed a token"
    runs = {name: [one.steps for one in some] for name, some in rollouts.items()}
    dist.destroy_process_group()
    tier = "paced" if pace is not None else this_tier()
    if config.figure is not None and world.rank == 0:
        draw_timelines(config.figure, {name: runs[name][0] for name in schedules}, tier)
    facts: dict[str, Any] = {"tokens": sum(lengths), "longest": max(lengths)}
    if pace is not None:
        facts["floor_ms"] = short(1e3 * _floor(config, pace, lengths, len(layout.replicas)))
    rows = _rows(runs, len(layout.replicas), facts)
    return {"tier": tier, "ranks": world.size, "rows": rows}


def _rows(runs: dict[str, list[Rollout]], num_replicas: int, facts: dict[str, Any]) -> list[Row]:
    """Rows of the makespan, a step, and the gap between two steps, in which commands are received and events sent."""
    makespans = {name: [makespan(run) for run in some] for name, some in runs.items()}
    idle = {
        name: short(
            statistics.median(1 - statistics.fmean(busy_share(run, range(num_replicas)).values()) for run in some)
        )
        for name, some in runs.items()
    }
    steps = {name: [statistics.median(step.seconds for step in run) for run in some] for name, some in runs.items()}
    gaps = {name: [statistics.median(_gaps(run)) for run in some] for name, some in runs.items()}
    return [
        make_row("makespan", makespans, idle_share=idle, **facts),
        make_row("step", steps),
        make_row("between steps", gaps),
    ]


def _gaps(run: Rollout) -> list[float]:
    gaps = []
    for replica in {step.replica_id for step in run}:
        own = sorted((step for step in run if step.replica_id == replica), key=lambda step: step.start)
        gaps += [after.start - before.start - before.seconds for before, after in itertools.pairwise(own)]
    return gaps


def _floor(config: DispatchBench, pace: ProfilePace, lengths: list[int], num_replicas: int) -> float:
    """The larger of two bounds, seconds: every replica always full; the longest sequence alone, without waiting."""

    spec = ReplicaSpec(id=0, ranks=tuple(range(config.tensor_parallel_size)))

    def step(batch: int, context: float) -> float:
        return decode_seconds(pace, spec, batch, round(batch * context))

    contexts = [PROMPT_LENGTH + position for length in lengths for position in range(length)]
    full = step(config.slots, statistics.fmean(contexts)) / config.slots
    longest = sum(step(1, PROMPT_LENGTH + position) for position in range(max(lengths)))
    return max(full * sum(lengths) / num_replicas, longest)


if __name__ == "__main__":
    harness.run(DispatchBench, measure)
