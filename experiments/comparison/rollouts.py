"""What is rolled out, how, and what came of it: the same live, paced and simulated. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from engines.coordination.policies import LayoutPolicy, OnDemand, SchedulePolicy
from engines.parallel.layout import Layout
from engines.replica.kv_moves import KVMoves
from engines.rollout.generation import make_states
from engines.rollout.telemetry import StepRecord
from engines.sequence import SamplingParams, SequenceId, SequenceState
from experiments.time_bins import spread

Tier = Literal["live", "gpu", "paced", "sim"]


def hidden_lengths(groups: Items[Items[int]]) -> dict[SequenceId, int]:
    """Returns what each sequence will generate, from the lengths of each prompt's samples."""
    return {(0, uid, index): length for uid, group in enumerate(groups) for index, length in enumerate(group)}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is rolled out."""

    prompts: list[list[int]]
    params: SamplingParams
    lengths: Mapping[SequenceId, int] | None = None
    """What each sequence will generate, which the policies do not know; None where sequences end by themselves, as they
    do in no simulation."""

    def states(self) -> list[SequenceState]:
        params = [self.params] * len(self.prompts)
        return make_states(self.prompts, params, range(len(self.prompts)), run_seed=0, policy_step=0)


def _no_policy() -> None:
    """By its name, as processes are sent it."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a workload is rolled out."""

    layout: Layout
    num_kv_tokens: int = 0
    """Tokens that a rank's KV cache would hold with all heads; 0 where the world says it."""
    schedule: Callable[[], SchedulePolicy] = OnDemand
    """Makes the schedule policy of one rollout."""
    layout_policy: Callable[[], LayoutPolicy | None] = _no_policy
    """Makes its layout policy."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `LLM`."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a variant did with a workload. In a world of processes all ranks have the same, except for `ends`,
    `finish_times` and `layout_policy`, which rank 0 has. All times are of one clock."""

    steps: list[StepRecord]
    makespan_s: float
    """From the start of the first step to the end of the last one."""
    finish_times: Mapping[SequenceId, float]
    """When each sequence ended, in this order."""
    switches: list[tuple[float, float]] = field(default_factory=list)
    """Start and seconds of each regroup."""
    digest: str = ""
    """Of all tokens; a simulation draws none."""
    layout_policy: Any = None
    lengths: dict[SequenceId, int]
    """What each sequence has generated."""
    num_preempted: int
    kv_moves: list[KVMoves] = field(default_factory=list)
    """Of each rank's last replica; empty in a simulation."""
    way_back_s: float = 0.0
    """To regroup to the layout in which the next rollout begins, with the same weights; 0 where nothing changed."""

    @property
    def seconds(self) -> float:
        """From the first step until the next rollout may begin: with the way back."""
        return self.makespan_s + self.way_back_s

    @property
    def ends(self) -> list[float]:
        return [*self.finish_times.values()]

    @property
    def tail_seconds(self) -> float:
        """The time in which the last tenth of the sequences ended (Seer §6.2)."""
        ends = self.ends
        return ends[-1] - ends[max(0, len(ends) * 9 // 10 - 1)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains in a forward pass."""
        return sum(self.lengths.values()) / max(1, sum(step.num_running for step in self.steps))


def makespan(steps: Collection[StepRecord]) -> float:
    return max(step.start + step.seconds for step in steps) - min(step.start for step in steps)


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
