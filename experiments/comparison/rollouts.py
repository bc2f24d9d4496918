"""What is rolled out, how, and what came of it: the same live, paced and simulated. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from engines.coordination.policies import LayoutPolicy, OnDemand, SchedulePolicy
from engines.parallel.layout import Layout
from engines.replica.kv_moves import KVMoves
from engines.rollout.generation import make_states
from engines.rollout.prediction import LengthPredictor
from engines.rollout.telemetry import StepRecord, TurnSpan
from engines.sequence import SamplingParams, SequenceId, SequenceState
from research.workloads.trajectories import Later, Turn, turn_has_ended

Tier = Literal["live", "gpu", "paced", "sim"]
Floats = NDArray[np.float64]
T = TypeVar("T")


def hidden_lengths(groups: Items[Items[T]]) -> dict[SequenceId, T]:
    """Returns what each sequence will generate, from the lengths, or the turns, of each prompt's samples."""
    return {(0, uid, index): length for uid, group in enumerate(groups) for index, length in enumerate(group)}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is rolled out."""

    prompts: list[list[int]]
    params: SamplingParams
    lengths: Mapping[SequenceId, int] | None = None
    """What each sequence will generate, which the policies do not know; None where sequences end by themselves, as they
    do in no simulation."""
    turns: Mapping[SequenceId, Items[Turn]] | None = None
    """Of trajectories, the turns that `lengths` are the sums of, and what their tools do."""

    @classmethod
    def forced(
        cls, groups: Items[Items[int]], *, num_prompt_tokens: int, most: int, prompts: list[list[int]] | None = None
    ) -> Workload:
        """Groups of sequences that generate so many tokens, of which policies know only the `most`. Without `prompts`,
        each has tokens of its own, which is enough for a simulation."""
        firsts = range(0, len(groups) * num_prompt_tokens, num_prompt_tokens)
        return cls(
            prompts=prompts or [[*range(first, first + num_prompt_tokens)] for first in firsts],
            params=SamplingParams(max_tokens=most, ignore_eos=True, n=len(groups[0])),
            lengths=hidden_lengths(groups),
        )

    @classmethod
    def of_trajectories(
        cls,
        groups: Items[Items[Items[Turn]]],
        *,
        num_prompt_tokens: int,
        most: int,
        prompts: list[list[int]] | None = None,
    ) -> Workload:
        """As `forced`; `most` bounds a trajectory, observed tokens included."""
        lengths = [[sum(turn.num_generated for turn in turns) for turns in group] for group in groups]
        plain = cls.forced(lengths, num_prompt_tokens=num_prompt_tokens, most=most, prompts=prompts)
        return replace(plain, turns=hidden_lengths(groups))

    def stops(self, state: SequenceState) -> bool:
        """A hidden stop: whether the sequence, or the present turn of a trajectory, has its tokens."""
        if self.turns is not None:
            return turn_has_ended(state, self.turns[state.sequence_id])
        return self.lengths is not None and state.num_generated >= self.lengths[state.sequence_id]

    def states(self) -> list[SequenceState]:
        params, uids = [self.params] * len(self.prompts), range(len(self.prompts))
        in_turns = self.turns is not None
        return make_states(self.prompts, params, uids, run_seed=0, policy_step=0, in_turns=in_turns)


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
    predictor: Callable[[Later], LengthPredictor] | None = None
    """Makes what estimates the lengths of trajectories, from what calls a function later."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `LLM`."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What a variant did with a workload. In a world of processes all ranks have the same, except for `ends`,
    `finish_times`, `layout_policy` and `turns`, which rank 0 has. All times are of one clock."""

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
    turns: list[TurnSpan] = field(default_factory=list)
    """Where its trajectories were."""
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


def over_time(
    steps: Collection[StepRecord], num_points: int, span: tuple[float, float] | None = None
) -> list[dict[str, float]]:
    """Returns points at equal distances in time, each with the means since the point before, over all replicas of these
    steps: running sequences, KV use, tokens per second, tokens that a sequence gains in a step; and the preemptions
    since the start. `span`: from when to when on the clock of the steps, by default from the first to the last."""
    start = min(step.start for step in steps)
    start, end = span or (start, start + makespan(steps))
    edges, width = np.linspace(start, end, num_points + 1), (end - start) / num_points
    counts, accepted, kv_use, seconds = np.array(
        [(step.num_running, step.num_accepted, step.kv_use, step.seconds) for step in steps], float
    ).T
    amounts = np.array([counts * seconds, counts + accepted, counts, kv_use * seconds, seconds])
    running, tokens, passed, kv_seconds, busy = _spread(steps, amounts.T, edges).T
    moments = np.sort([step.start for step in steps for _ in range(step.num_preempted)])
    return [
        {
            "second": float(edges[place + 1] - start),
            "running sequences": float(running[place] / width),
            "tokens per second": float(tokens[place] / width),
            "tokens per sequence and step": float(tokens[place] / passed[place]) if passed[place] else np.nan,
            "kv use": float(kv_seconds[place] / busy[place]) if busy[place] else 0.0,
            "preemptions": int(np.searchsorted(moments, edges[place + 1])),
        }
        for place in range(num_points)
    ]


def _spread(steps: Collection[StepRecord], amounts: Floats, edges: Floats) -> Floats:
    """Returns the amounts of the steps, [steps, ...], by bins of time, [bins, ...]: of each step, every bin gets the
    share that it has of the step's time. `edges`: rising, on the clock of the steps."""
    starts, seconds = np.array([(step.start, step.seconds) for step in steps], float).T
    done = np.clip((edges[:, None] - starts) / np.maximum(seconds, 1e-12), 0.0, 1.0)
    return np.diff(done, axis=0) @ amounts
