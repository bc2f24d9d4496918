"""What a decision of the coordinator costs, by the number of waiting sequences.

    python experiments/bench_core.py

Every replica is full, and the rest waits. One of its sequences finishes: the core takes the event, delivers, asks the
policy, and dispatches the next. In between every replica reports a step in which each of its sequences got a token.
Messages are not encoded: that is the transport's cost. Tier: sim.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

from engines.constraints import Count, Counts, check_fields
from engines.control.messages import Event, ReplicaReady, SequencesFinished, StepReported, SubmitWork
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand
from engines.coordination.requests import BeginPhase, SubmitSequences
from engines.parallel.layout import contiguous_layout
from engines.sequence import Completion, Finished, SamplingParams, SequenceId, SequenceKey, SequenceState
from experiments import launch


@dataclass(frozen=True, kw_only=True)
class BenchCoreConfig:
    """Time the coordinator's decisions with few and with many sequences waiting."""

    waiting: Counts = (10, 100, 1_000, 10_000)
    """Sequences that wait when the timing begins."""
    replicas: Count = 8
    """Replicas."""
    slots: Count = 32
    """Sequences that each runs at once."""
    events: Count = 2_000
    """Finished sequences timed for each number of waiting ones; as many are submitted to replace them."""
    output: Path | None = None
    """Also write the JSON result there."""

    def __post_init__(self) -> None:
        check_fields(self, "")


def main() -> dict[str, Any]:
    config = tyro.cli(BenchCoreConfig)
    # The first round warms up: it is timed and thrown away.
    rows = [_measure(config, num_waiting) for num_waiting in (config.waiting[0], *config.waiting)][1:]
    result = {
        "experiment": "bench_core",
        "tier": "sim",
        "workload": {**asdict(config), "output": None},
        "microseconds": dict(zip(map(str, config.waiting), rows, strict=True)),
    }
    if config.output is not None:
        config.output.write_text(json.dumps(result, indent=2) + "\n")
    return result


class _Bench:
    """A core in an open phase, and the numbers of its replicas' events."""

    def __init__(self, config: BenchCoreConfig) -> None:
        layout = contiguous_layout(range(config.replicas), 1)
        self.core = RolloutCore(layout=layout, world_size=config.replicas, schedule_policy=OnDemand())
        self.num_events = [0] * config.replicas
        self.running: list[list[SequenceState]] = [[] for _ in range(config.replicas)]
        self.num_states = 0
        self.seconds: dict[str, list[float]] = {"finished": [], "reported": [], "submitted": []}
        self.core.on_event(BeginPhase(phase=0, policy_version=0), 0.0)
        size = {"max_num_seqs": config.slots, "num_kv_tokens": 1 << 30, "block_size": 16, "policy_version": 0}
        for replica in range(config.replicas):
            self.say(ReplicaReady(**self.envelope(replica), **size))

    def envelope(self, replica: int) -> dict[str, int]:
        self.num_events[replica] += 1
        return {"replica_id": replica, "rank": replica, "epoch": 0, "phase": 0, "seq": self.num_events[replica] - 1}

    def say(self, event: Event | SubmitSequences, timed: str = "") -> None:
        start = time.perf_counter()
        output = self.core.on_event(event, 0.0)
        seconds = time.perf_counter() - start
        if timed:
            self.seconds[timed].append(seconds)
        for item in output:
            if isinstance(item, SubmitWork):
                assert item.replica_id is not None
                self.running[item.replica_id] += [work.state for work in item.works]

    def submit(self, num_states: int, timed: str = "") -> None:
        params = SamplingParams(max_tokens=1 << 20)
        states = []
        for uid in range(self.num_states, self.num_states + num_states):
            key = SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0)
            states.append(SequenceState(key=key, group_id=uid, tokens=[1], num_prompt_tokens=1, params=params))
        self.num_states += num_states
        self.say(SubmitSequences(states=tuple(states)), timed)

    def finish(self, replica: int) -> None:
        state = self.running[replica].pop(0)
        completion = Completion(index=0, token_ids=[], logprobs=[], versions=[], finish_reason="stop")
        finished = (Finished(state=state, completion=completion),)
        self.say(SequencesFinished(**self.envelope(replica), finished=finished), "finished")

    def report(self, replica: int) -> None:
        progress: tuple[tuple[SequenceId, int], ...] = tuple((s.sequence_id, 1) for s in self.running[replica])
        load: dict[str, Any] = {"num_running": len(progress), "num_waiting": 0, "num_free_blocks": 0, "seconds": 0.1}
        self.say(StepReported(**self.envelope(replica), **load, progress=progress), "reported")


def _measure(config: BenchCoreConfig, num_waiting: int) -> dict[str, dict[str, float]]:
    bench = _Bench(config)
    bench.submit(config.replicas * config.slots + num_waiting)
    assert bench.core.num_waiting == num_waiting
    for index in range(config.events):
        replica = index % config.replicas
        bench.report(replica)
        bench.finish(replica)
        bench.submit(1, "submitted")
        assert bench.core.num_waiting == num_waiting
    return {
        name: {
            "median": round(statistics.median(values) * 1e6, 1),
            "p99": round(statistics.quantiles(values, n=100)[98] * 1e6, 1),
        }
        for name, values in bench.seconds.items()
    }


if __name__ == "__main__":
    launch.run(main)
