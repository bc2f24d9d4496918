"""Rollouts with hidden lengths, at the speed of a pace or at the ranks' own: what experiments share that compare them.

An experiment has two parts: `live`, on torchrun's ranks, and `paced`, on as many ranks as it needs, which rank 0 then
starts. Imports torch only where it rolls out, since simulations share its workloads.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import Meta

from engines.config import ModelConfig
from engines.constraints import Count, Positive, WholeNumber, check_fields
from engines.coordination.policies import LayoutPolicy, OnDemand, SchedulePolicy
from engines.parallel.layout import Layout
from engines.replica.kv_moves import KVMoves
from engines.rollout.generation import make_states
from engines.rollout.pace import Pace
from engines.rollout.telemetry import StepRecord
from engines.sequence import Finished, SamplingParams, SequenceId, SequenceState
from experiments import launch
from experiments.bench import harness
from experiments.time_bins import spread

if TYPE_CHECKING:
    from engines import LLM
    from engines.parallel.collectives import TorchGroup
    from engines.parallel.groups import GroupCache

Part = Literal["live", "paced"]


@dataclass(frozen=True, kw_only=True)
class PacedConfig:
    """Options of all experiments with a live and a paced part."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] = ("live", "paced")
    """What to measure."""
    turns: Count = 3
    """Interleaved measurements of each variant; medians count."""
    ranks: Count = 8
    """Ranks of the paced part."""
    scale: Positive = 1.0
    """Multiplies the time that paced work takes: larger where this machine is too slow to follow."""
    shrink: Count = 1
    """Divides the number of sequences."""
    seed: WholeNumber = 3
    """Of the lengths."""
    wandb: Literal["auto", "off"] = "off"
    """auto: a run for each variant, by wandb's own settings and environment; offline if nobody is logged in."""
    output: Path | None = None
    """Also write the JSON result to this file."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        harness.check_folders(self, ["output"])


C = TypeVar("C", bound=PacedConfig)
Measure = Callable[[C, "TorchGroup"], dict[str, Any]]


def run(experiment: str, kind: type[C], *, live: Measure[C], paced: Measure[C]) -> dict[str, Any] | None:
    """Reads the command line and measures. All ranks call `live` and `paced`, which return fields of the result on
    rank 0; `paced` returns one field of that name."""
    import torch.distributed as dist

    from engines.parallel.collectives import TorchGroup

    config = launch.options(kind)
    start = time.monotonic()
    in_place = config.parts == ("paced",) and launch.num_ranks() in (1, config.ranks)
    launch.start_under_torchrun(config.ranks if in_place else 2)
    launch.share_cores()
    dist.init_process_group("gloo")
    world = TorchGroup()
    measured = live(config, world) if "live" in config.parts else {}
    if in_place:
        measured |= paced(config, world)
    dist.destroy_process_group()
    if world.rank:
        return None
    if "paced" in config.parts and not in_place:
        measured["paced"] = launch.start_anew("--parts", "paced")["paced"]
    return harness.report(experiment, config, {"seconds": round(time.monotonic() - start, 1), **measured})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is rolled out."""

    prompts: list[list[int]]
    params: SamplingParams
    lengths: Mapping[SequenceId, int] | None = None
    """What each sequence will generate, which the policies do not know; None where sequences end by themselves."""

    def states(self) -> list[SequenceState]:
        params = [self.params] * len(self.prompts)
        return make_states(self.prompts, params, range(len(self.prompts)), run_seed=0, policy_step=0)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a workload is rolled out."""

    layout: Layout
    num_kv_tokens: int
    """Tokens that a rank's KV cache would hold with all heads."""
    schedule: Callable[[], SchedulePolicy] = OnDemand
    """Makes the schedule policy of one rollout."""
    layout_policy: Callable[[], LayoutPolicy | None] = lambda: None
    """Makes its layout policy."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `LLM`."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The same on all ranks, but for `layout_policy`, which decides on rank 0."""

    steps: list[StepRecord]
    switches: list[tuple[float, float]]
    """Start, on the clock of the steps, and seconds."""
    digest: str
    """Of all tokens."""
    layout_policy: Any
    lengths: dict[SequenceId, int]
    """What each sequence has generated."""
    ends: list[float]
    """Times at which sequences ended, rising, on the clock of the steps; on rank 0 only."""
    kv_moves: list[KVMoves]
    """Of each rank's last replica."""
    way_back_s: float
    """To regroup to the layout in which the next rollout begins, with the same weights; 0 where nothing changed."""

    @property
    def seconds(self) -> float:
        """From the first step until the next rollout may begin: with the way back."""
        return makespan(self.steps) + self.way_back_s

    @property
    def tail_seconds(self) -> float:
        """The time in which the last tenth of the sequences ended (Seer §6.2)."""
        return self.ends[-1] - self.ends[max(0, len(self.ends) * 9 // 10 - 1)]

    @property
    def num_preempted(self) -> int:
        return sum(step.num_preempted for step in self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains in a forward pass."""
        return sum(self.lengths.values()) / max(1, sum(step.num_running for step in self.steps))


def makespan(steps: Collection[StepRecord]) -> float:
    return max(step.start + step.seconds for step in steps) - min(step.start for step in steps)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Rolls workloads out. All ranks make and call it together."""

    model: str
    groups: GroupCache
    pace: Pace | None
    options: Mapping[str, Any]
    """Arguments of `LLM` for all variants, its dtype among them."""

    @cached_property
    def _kv_bytes_per_token(self) -> int:
        import torch

        dtype: torch.dtype = getattr(torch, self.options["dtype"])
        return ModelConfig.from_pretrained(self.model).kv_bytes_per_token(dtype.itemsize)

    def roll_out(self, workload: Workload, variant: Variant) -> Rollout:
        layout_policy = variant.layout_policy()
        llm = self.start(workload, variant, layout_policy)
        ends: list[float] = []
        tokens, steps = self.generate(llm, workload, lambda _: ends.append(time.monotonic()))
        lengths = {(0, uid, index): len(one) for uid, samples in enumerate(tokens) for index, one in enumerate(samples)}
        assert workload.lengths in (None, lengths)
        assert llm.rollout is not None
        mine = [mark.time for mark in llm.rollout.marks if mark.name in ("regroup", "resume")]
        marks = launch.on_rank_0(self.groups.world, lambda: mine)
        kv_moves = launch.gather(self.groups.world, llm.replica.kv_moves, KVMoves)
        way_back_s = self._go_back(llm, variant.layout)
        llm.close()
        return Rollout(
            steps=steps,
            switches=[(start, end - start) for start, end in zip(marks[::2], marks[1::2], strict=True)],
            digest=hashlib.sha256(repr(tokens).encode()).hexdigest(),
            layout_policy=layout_policy,
            lengths=lengths,
            ends=ends,
            kv_moves=kv_moves,
            way_back_s=way_back_s,
        )

    def _go_back(self, llm: LLM, first: Layout) -> float:
        """Regroups if the ranks are grouped otherwise than in `first`; returns the seconds of the slowest rank."""
        if {spec.ranks for spec in llm.layout.replicas} == {spec.ranks for spec in first.replicas}:
            return 0.0
        start = time.monotonic()
        llm.regroup(replace(first, epoch=llm.layout.epoch + 1))
        return float(max(launch.gather(self.groups.world, time.monotonic() - start)))

    def start(self, workload: Workload, variant: Variant, layout_policy: LayoutPolicy | None) -> LLM:
        from engines import LLM

        lengths = workload.lengths

        def has_ended(state: SequenceState) -> bool:
            return lengths is not None and state.num_generated >= lengths[state.sequence_id]

        options = {
            "world": self.groups,
            "layout": variant.layout,
            "schedule": variant.schedule(),
            "layout_policy": layout_policy,
            "pace": self.pace,
            "hidden_stop": None if lengths is None else has_ended,
            "kv_cache_bytes": variant.num_kv_tokens * self._kv_bytes_per_token,
            **self.options,
            **variant.options,
        }
        return LLM(self.model, **options)

    def generate(
        self, llm: LLM, workload: Workload, on_finished: Callable[[Finished], None] | None = None
    ) -> tuple[list[list[list[int]]], list[StepRecord]]:
        """Returns the tokens of each prompt's samples, and the steps of all replicas, each's from its first rank."""
        uids = range(len(workload.prompts))
        outputs = llm.generate(workload.prompts, workload.params, prompt_uids=uids, on_finished=on_finished)
        assert llm.rollout is not None
        first: dict[tuple[int, int], int] = {}
        steps = [
            one
            for rank, part in enumerate(launch.gather(self.groups.world, llm.rollout.step_records, list[StepRecord]))
            for one in part
            if first.setdefault((one.epoch, one.replica_id), rank) == rank
        ]
        return [[one.token_ids for one in output.outputs] for output in outputs], steps


def track(name: str, runs: Mapping[str, Items[Rollout]]) -> None:
    """Makes a run of wandb for each variant: what its replicas did in each hundredth of its first rollout, and medians
    over all of them as the summary."""
    from experiments.tracking import start_run

    for variant, some in runs.items():
        if variant.endswith(harness.AGAIN):
            continue
        with start_run(f"{name}-{variant}".replace(" ", "-"), {"comparison": name, "variant": variant}) as run:
            for point in over_time(some[0].steps, 100):
                run.log(point)
            for key in ("seconds", "tail_seconds", "num_preempted", "tokens_per_step"):
                run.summary[key] = statistics.median(getattr(one, key) for one in some)


def over_time(steps: Collection[StepRecord], num_points: int) -> list[dict[str, float]]:
    """Returns points at equal distances in time, each with the means since the point before, over all replicas: running
    sequences, KV use, tokens per second; and the preemptions since the start."""
    start, seconds = min(step.start for step in steps), makespan(steps)
    edges = start + np.linspace(0, seconds, num_points + 1)
    amounts = np.array(
        [
            (step.num_running * step.seconds, step.num_running + step.num_accepted, step.kv_use * step.seconds)
            for step in steps
        ]
    )
    running, tokens, kv_use = spread(steps, amounts, edges).T * num_points / seconds
    busy = spread(steps, np.array([step.seconds for step in steps]), edges) * num_points / seconds
    moments = np.sort([step.start for step in steps for _ in range(step.num_preempted)])
    return [
        {
            "second": float(edges[place + 1] - start),
            "running sequences": float(running[place]),
            "tokens per second": float(tokens[place]),
            "kv use": float(kv_use[place] / busy[place]) if busy[place] else 0.0,
            "preemptions": int(np.searchsorted(moments, edges[place + 1])),
        }
        for place in range(num_points)
    ]


MOST_LATE = 0.05
"""Share of the steps that may be late in a paced comparison."""


def longer_than_paced(name: str, runs: Iterable[Rollout]) -> dict[str, Any]:
    """Returns the share of steps that took 10 % longer than they should, and whether this machine has followed the
    pace; where it has not, says so on stderr."""
    steps = [step for run in runs for step in run.steps if step.num_running]
    late = sum(step.seconds > 1.1 * step.paced_seconds for step in steps) / len(steps)
    if late > MOST_LATE:
        told = (
            f"{name}: {late:.0%} of the steps took more than 1.1 times their price: this machine cannot follow the pace"
        )
        print(f"{told}, which changes ratios; give a larger --scale", file=sys.stderr, flush=True)
    return {"steps_longer_than_paced": harness.short(late), "follows_pace": late <= MOST_LATE}
