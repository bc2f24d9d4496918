"""What `validate_simulator.py` rolls out, and how a simulated rollout is compared with a paced one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from engines.coordination.policies import LayoutPolicy, OnDemand, SchedulePolicy, Static
from engines.coordination.views import Dispatch, LayoutChange, LayoutView, ScheduleView
from engines.parallel.layout import nested_layout
from engines.rollout.pace import Pace
from engines.rollout.telemetry import StepRecord
from engines.sequence import SequenceId
from experiments.bench.models import random_prompts
from experiments.comparison.rollouts import Variant, Workload
from research.pat.controller import PatController
from research.pat.profile import deployment_of
from research.seer.context_aware import ContextAware, ContextOptions
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import TrajectoryLengths, Turn

SLOTS = 16
TP_SIZES = (1, 2)
BLOCK_SIZE = 16
MAX_MODEL_LEN = 480
Kind = Literal["static", "on demand", "moves", "chunks", "regroup", "pat", "mixed", "turns", "static turns"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CHUNKS = ContextOptions(chunk_tokens=48)
"""Of Seer's cells; of several blocks, and several per sequence."""


class InChunks:
    """A chunk of 40 tokens at a time, on the replica with the fewest sequences but the last one: its KV moves along."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.waiting.values():
            others = [one for one in view.replicas.values() if one.spec.id != sequence.last_replica_id]
            roomy = [one for one in others if one.room_for(sequence, 40)]
            if roomy:
                best = min(roomy, key=lambda one: (one.num_assigned, one.spec.id))
                return Dispatch(sequence_id=sequence.sequence_id, replica_id=best.spec.id, max_new_tokens=40)
        return None


class Widen:
    """Replicas of one rank become replicas of two when a third of the sequences is left."""

    def __init__(self, num_sequences: int, num_ranks: int) -> None:
        self._left = num_sequences // 3
        self._change = LayoutChange(layout=nested_layout(range(num_ranks), 2, epoch=1))

    def decide(self, view: LayoutView) -> LayoutChange | None:
        return self._change if not view.layout.epoch and view.num_unfinished <= self._left else None


class Recorded:
    """Passes a policy's dispatches on, and keeps them."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self.dispatches: list[Dispatch] = []

    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = self._policy.next(view)
        if dispatch is not None:
            self.dispatches.append(dispatch)
        return dispatch


class AsRecorded:
    """What another rollout of the same sequences dispatched, as soon as there is room: each replica's dispatches in its
    order, and each sequence's.

    For rollouts whose replicas stay: there each sequence needs the same dispatches, whatever a step takes.
    """

    def __init__(self, dispatches: Iterable[Dispatch]) -> None:
        self._by_replica: dict[int, deque[Dispatch]] = {}
        self._by_sequence: dict[SequenceId, deque[Dispatch]] = {}
        for one in dispatches:
            self._by_replica.setdefault(one.replica_id, deque()).append(one)
            self._by_sequence.setdefault(one.sequence_id, deque()).append(one)

    def next(self, view: ScheduleView) -> Dispatch | None:
        for replica_id, left in self._by_replica.items():
            if not left or left[0].sequence_id not in view.waiting:
                continue
            first, own = left[0], self._by_sequence[left[0].sequence_id]
            replica, sequence = view.replicas[replica_id], view.waiting[first.sequence_id]
            has_room = replica.accepts if first.queued else replica.room_for(sequence, first.max_new_tokens)
            if own[0] is first and has_room:
                own.popleft()
                return left.popleft()
        return None


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A workload under a policy."""

    kind: Kind
    room: float
    """KV cache of a replica, in multiples of `demand`."""
    num_prompts: int
    group_size: int = 1
    num_prompt_tokens: int = 16
    median: float = 80.0
    cap: int = 300

    @property
    def name(self) -> str:
        return f"{self.kind} {self.room:g}x"

    @property
    def regroups(self) -> bool:
        return self.kind in ("regroup", "pat")

    @property
    def is_in_turns(self) -> bool:
        return self.kind in ("turns", "static turns")

    def lengths(self) -> list[int]:
        """Of the responses; of trajectories, observed tokens included."""
        if self.is_in_turns:
            return [sum(one.num_generated + one.num_observed for one in turns) for (turns,) in self.trajectories()]
        return LogNormalLengths(median=self.median, sigma=0.8, cap=self.cap).draw(self.num_sequences, seed=1)

    def trajectories(self) -> list[list[list[Turn]]]:
        """A tool takes about as long as ten to twenty steps, and the slowest ones ten times as long."""
        drawn = TrajectoryLengths(
            num_turns=LogNormalLengths(median=4, sigma=0.6, cap=12),
            generated=LogNormalLengths(median=self.median / 5, sigma=0.8, cap=self.cap),
            observed=LogNormalLengths(median=self.median / 10, sigma=0.8, cap=self.cap),
            tool_median_s=0.4,
            tool_sigma=0.8,
            cap=self.cap,
        )
        return drawn.draw(self.num_prompts, self.group_size, seed=1)

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV of a replica of one rank: at least those of the longest sequence."""
        demand = SLOTS * (self.num_prompt_tokens + statistics.fmean(self.lengths()))
        longest = self.num_prompt_tokens + self.cap
        return -(-max(round(self.room * demand), longest) // BLOCK_SIZE) * BLOCK_SIZE

    def workload(self) -> Workload:
        lengths, size = self.lengths(), self.group_size
        groups = [lengths[first : first + size] for first in range(0, len(lengths), size)]
        fields = {"num_prompt_tokens": self.num_prompt_tokens, "most": self.cap}
        prompts = random_prompts(self.num_prompts, self.num_prompt_tokens)
        if self.is_in_turns:
            return Workload.of_trajectories(self.trajectories(), prompts=prompts, **fields)
        return Workload.forced(groups, prompts=prompts, **fields)

    def schedule_policy(self) -> SchedulePolicy:
        kinds: dict[Kind, Callable[[], SchedulePolicy]] = {
            "static": Static,
            "static turns": Static,
            "moves": InChunks,
            "chunks": lambda: ContextAware(CHUNKS),
        }
        return kinds.get(self.kind, OnDemand)()

    def layout_policy(self, num_ranks: int, pace: Pace) -> LayoutPolicy | None:
        """`PatController` begins without a history, and plans by the pace."""
        if self.kind == "regroup":
            return Widen(self.num_sequences, num_ranks)
        if self.kind != "pat":
            return None
        return PatController(
            deployment_of(
                pace,
                num_ranks=num_ranks,
                num_kv_tokens={tp_size: tp_size * self.num_kv_tokens for tp_size in TP_SIZES},
                max_num_seqs=SLOTS,
                max_model_len=MAX_MODEL_LEN,
            )
        )

    def variant(self, num_ranks: int, pace: Pace, policy: SchedulePolicy) -> Variant:
        return Variant(
            layout=nested_layout(range(num_ranks), 1),
            num_kv_tokens=self.num_kv_tokens,
            schedule=lambda: policy,
            layout_policy=partial(self.layout_policy, num_ranks, pace),
            options={"preemption": "swap" if self.regroups else "recompute"},
        )


def cells(kinds: tuple[Kind, ...], rooms: tuple[float, ...], batch: int) -> list[Cell]:
    groups = {"num_prompts": batch // 4, "group_size": 4}
    fields: dict[Kind, dict[str, Any]] = {
        "chunks": groups,
        "mixed": {**groups, "num_prompt_tokens": 160, "median": 40.0, "cap": 120},
    }
    return [Cell(kind=kind, room=room, **fields.get(kind, {"num_prompts": batch})) for kind in kinds for room in rooms]


OPTIONS: dict[str, Any] = {
    "max_num_seqs": SLOTS,
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 512,
    "max_model_len": MAX_MODEL_LEN,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A rollout, paced or simulated. Times count from the start of its first step."""

    finish_times: dict[SequenceId, float]
    num_preempted: int
    busy: float
    """Seconds in steps, as the pace has them; the mean over ranks, as `gap` and `idle`."""
    gap: float
    """From the end of a step, as the pace has it, to the start of the next one, where a replica has work."""
    idle: float
    """The rest of the makespan."""
    mean_gap: float
    """NaN where every gap was taken for idle time."""
    dispatches: tuple[Dispatch, ...] = ()
    """What the schedule policy dispatched, where this was kept."""

    @property
    def makespan(self) -> float:
        return max(self.finish_times.values())


def describe(steps: list[StepRecord], finish_times: dict[SequenceId, float], num_ranks: int) -> Run:
    """`finish_times` are on the clock of the steps. A hole longer than half a median step has no work: idle time."""
    start = min(step.start for step in steps)
    half = statistics.median(step.seconds for step in steps) / 2
    ordered = sorted(steps, key=lambda step: (step.epoch, step.replica_id, step.start))
    gaps = [
        (step.tp_size, after.start - step.start - step.paced_seconds)
        for step, after in itertools.pairwise(ordered)
        if (step.epoch, step.replica_id) == (after.epoch, after.replica_id)
        and after.start - step.start - step.seconds < half
    ]
    makespan = max(finish_times.values()) - start
    busy = sum(step.paced_seconds * step.tp_size for step in steps) / num_ranks
    gap = sum(tp_size * seconds for tp_size, seconds in gaps) / num_ranks
    return Run(
        finish_times={id_: moment - start for id_, moment in finish_times.items()},
        num_preempted=sum(step.num_preempted for step in steps),
        busy=busy,
        gap=gap,
        idle=makespan - busy - gap,
        mean_gap=statistics.fmean(seconds for _, seconds in gaps) if gaps else math.nan,
    )


def score(simulated: list[Run], paced: list[Run], as_dispatched: list[Run]) -> dict[str, float]:
    """`as_dispatched` are simulations of the paced runs' own dispatches, one each; none where replicas change."""
    makespan, mine = (statistics.median(run.makespan for run in runs) for runs in (paced, simulated))
    pairs = zip(as_dispatched, paced, strict=True) if as_dispatched else ()
    return {
        "as_dispatched": max((abs(one.makespan / its.makespan - 1) for one, its in pairs), default=math.nan),
        "makespan": makespan,
        "simulated": mine,
        "simulated_least": min(run.makespan for run in simulated),
        "simulated_most": max(run.makespan for run in simulated),
        "makespan_error": abs(mine - makespan) / makespan,
        "finish_error": _distance(simulated, paced) / makespan,
        "a_a": (max(run.makespan for run in paced) - min(run.makespan for run in paced)) / makespan,
        "a_a_finish": _distance(paced[:1], paced[-1:]) / makespan,
        "preempted": statistics.median(run.num_preempted for run in simulated),
    }


def _distance(some: list[Run], others: list[Run]) -> float:
    """The median over the sequences of the distance between their median finish times."""
    ends = [
        {id_: statistics.median(run.finish_times[id_] for run in runs) for id_ in runs[0].finish_times}
        for runs in (some, others)
    ]
    return statistics.median(abs(end - ends[1][id_]) for id_, end in ends[0].items())
