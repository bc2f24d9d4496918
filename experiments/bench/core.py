"""The time of a decision of the coordinator, by the number of waiting sequences.

    python experiments/bench/core.py

Every replica is full, and the other sequences wait, in groups. When a sequence finishes, the core takes the event,
delivers the completion, asks the policy, and dispatches the next sequence; when one is released, it waits again. In
between, every replica reports a step in which each of its sequences got a token. Messages are not encoded: that is part
of the transport's cost. Tier: sim.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engines.constraints import Count, Counts
from engines.control.messages import Event, ReplicaReady, SequencesFinished, SequencesReleased, StepReported, SubmitWork
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand, SchedulePolicy
from engines.coordination.requests import BeginPhase, SubmitSequences
from engines.parallel.layout import contiguous_layout
from engines.sequence import Completion, Finished, SamplingParams, SequenceId, SequenceKey, SequenceState, Work
from experiments.bench import harness
from experiments.comparison.turns import interleave, make_row, short, timed
from research.seer.context_aware import ContextAware, ContextOptions

EVENTS = ("finished", "released", "reported", "submitted")
POLICIES: dict[str, Callable[[], SchedulePolicy]] = {
    "on demand": OnDemand,
    "context-aware": lambda: ContextAware(ContextOptions(follow_ups=0)),
}
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class CoreBench(harness.BenchConfig):
    """Time the coordinator's decisions with few and with many sequences waiting, interleaved."""

    waiting: Counts = (10, 100, 1_000, 10_000)
    """Numbers of waiting sequences."""
    replicas: Count = 8
    """Number of replicas."""
    slots: Count = 32
    """Sequences that each replica runs at once."""
    events: Count = 500
    """Finished sequences timed in a turn; as many are submitted to replace them."""


def measure(config: CoreBench) -> dict[str, Any]:
    variants = {
        f"{name}, {waiting} waiting": partial(_turn, _Driver(config, waiting, policy()), config)
        for name, policy in POLICIES.items()
        for waiting in config.waiting
    }
    turns = interleave(variants, config.turns)
    rows = []
    for event in EVENTS:
        seconds = {name: [statistics.median(one[event]) for one in some] for name, some in turns.items()}
        pooled = {name: sorted(time for one in turns[name] for time in one[event]) for name in variants}
        p99 = {name: short(1e3 * times[99 * len(times) // 100]) for name, times in pooled.items()}
        rows.append(make_row(event, seconds, p99_ms=p99))
    return {"tier": "sim", "rows": rows}


def _turn(driver: _Driver, config: CoreBench) -> dict[str, list[float]]:
    """Seconds of all events, by kind of event."""
    driver.seconds = {event: [] for event in EVENTS}
    for index in range(config.events):
        replica = index % config.replicas
        driver.report(replica)
        driver.release(replica)
        driver.finish(replica)
        driver.submit(1, "submitted")
        assert driver.core.num_waiting == driver.num_waiting
    return driver.seconds


class _Driver:
    """A core in an open phase, and the number of events that each replica has sent."""

    def __init__(self, config: CoreBench, num_waiting: int, policy: SchedulePolicy) -> None:
        layout = contiguous_layout(range(config.replicas), 1)
        self.core = RolloutCore(layout=layout, world_size=config.replicas, schedule_policy=policy)
        self.num_events = [0] * config.replicas
        self.running: list[list[SequenceState]] = [[] for _ in range(config.replicas)]
        self.num_states = 0
        self.num_waiting = num_waiting
        self.seconds: dict[str, list[float]] = {}
        self.core.on_event(BeginPhase(phase=0, policy_version=0), 0.0)
        ready = partial(ReplicaReady, max_num_seqs=config.slots, num_kv_tokens=1 << 30, block_size=16, policy_version=0)
        for replica in range(config.replicas):
            self.say(ready(**self.envelope(replica)))
        self.submit(config.replicas * config.slots + num_waiting)
        assert self.core.num_waiting == num_waiting

    def envelope(self, replica: int) -> dict[str, Any]:
        self.num_events[replica] += 1
        return {"replica_id": replica, "rank": replica, "epoch": 0, "phase": 0, "seq": self.num_events[replica] - 1}

    def say(self, event: Event | SubmitSequences, kind: str = "") -> None:
        """The seconds of an event of a `kind` are kept."""
        seconds, output = timed(lambda: self.core.on_event(event, 0.0))
        if kind:
            self.seconds[kind].append(seconds)
        for item in output:
            if isinstance(item, SubmitWork):
                assert item.replica_id is not None
                self.running[item.replica_id] += [work.state for work in item.works]

    def submit(self, num_states: int, kind: str = "") -> None:
        params = SamplingParams(max_tokens=1 << 20)
        states = []
        for uid in range(self.num_states, self.num_states + num_states):
            group, index = divmod(uid, GROUP_SIZE)
            key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=group, sample_index=index)
            states.append(SequenceState(key=key, group_id=group, tokens=[1], num_prompt_tokens=1, params=params))
        self.num_states += num_states
        self.say(SubmitSequences(states=tuple(states)), kind)

    def grow(self, replica: int) -> SequenceState:
        """Takes out the first running sequence, with more tokens."""
        state = self.running[replica].pop(0)
        state.tokens += [1] * (1 + sum(self.num_events) % 97)
        return state

    def release(self, replica: int) -> None:
        works = (Work(state=self.grow(replica)),)
        self.say(SequencesReleased(**self.envelope(replica), works=works), "released")

    def finish(self, replica: int) -> None:
        state = self.grow(replica)
        completion = Completion(index=0, token_ids=[], logprobs=[], versions=[], finish_reason="stop")
        finished = (Finished(state=state, completion=completion),)
        self.say(SequencesFinished(**self.envelope(replica), finished=finished), "finished")

    def report(self, replica: int) -> None:
        progress: tuple[tuple[SequenceId, int], ...] = tuple((s.sequence_id, 1) for s in self.running[replica])
        load: dict[str, Any] = {"num_running": len(progress), "num_waiting": 0, "num_free_blocks": 0, "seconds": 0.1}
        envelope: dict[str, Any] = self.envelope(replica)
        self.say(StepReported(**envelope, **load, progress=progress), "reported")


if __name__ == "__main__":
    harness.run(CoreBench, measure)
