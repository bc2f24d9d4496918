"""Records of a rollout's steps and events, and a timeline made from them. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.coordination.views import Passage, Wait
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.replica.switch import Switch
from engines.sequence import SequenceId


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one replica. Times are `time.monotonic`'s, the same for all processes of a host."""

    replica_id: int
    epoch: int
    """Epoch of the layout that the replica belongs to."""
    tp_size: int
    start: float
    """Seconds."""
    seconds: float
    num_running: int
    """Sequences in the forward pass."""
    num_tokens: int
    """Tokens in the forward pass."""
    num_context_tokens: int = 0
    """Sum of the sequences' context lengths in tokens, this pass's tokens included."""
    drafted: tuple[int, ...] = ()
    """Draft tokens in the forward pass, by their place in the draft."""
    accepted: tuple[int, ...] = ()
    """Draft tokens that are now tokens of their sequences, by their place in the draft."""
    num_compared: int = 0
    """Draft tokens that a draw was compared with: those behind right ones only; of several paths, on the one that was
    right for longest."""
    num_preempted: int = 0
    """Sequences that lost their KV blocks before the forward pass."""
    num_swapped_out: int = 0
    """Preempted sequences whose KV was stored; that of the others is recomputed."""
    num_swapped_in: int = 0
    """Sequences of the forward pass that resumed with stored KV."""

    kv_use: float = 0.0
    """Share of the KV blocks that sequences held after the forward pass."""
    paced_seconds: float = 0.0
    """What a `Pace` gives the step and the KV that it moved; 0 without one."""

    @classmethod
    def of(
        cls, spec: ReplicaSpec, epoch: int, start: float, seconds: float, output: StepOutput, paced_seconds: float
    ) -> StepRecord:
        return cls(
            replica_id=spec.id,
            epoch=epoch,
            tp_size=spec.tp_size,
            start=start,
            seconds=seconds,
            num_running=output.num_running,
            num_tokens=output.num_tokens,
            num_context_tokens=output.num_context_tokens,
            drafted=tuple(output.drafted),
            accepted=tuple(output.accepted),
            num_compared=output.num_compared,
            num_preempted=output.num_preempted,
            num_swapped_out=output.num_swapped_out,
            num_swapped_in=output.num_swapped_in,
            kv_use=output.kv_use,
            paced_seconds=paced_seconds,
        )

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)


@dataclass(frozen=True, kw_only=True)
class SwitchRecord:
    """One regroup on one rank. Times are as in `StepRecord`."""

    epoch: int
    """Epoch of the new layout."""
    tp_size: int
    """Of the rank's new replica."""
    start: float
    seconds: float
    parts: Switch


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened to the rollout as a whole, or to one replica: a dispatch, a move, a regroup, a phase."""

    name: str
    time: float
    replica_id: int | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class TurnSpan:
    """What a trajectory did for a while: it waited for a replica, was on one, or waited for its tool. Of the time on a
    replica, what passed in the replica's own queue is a "queue" span, too, with that `replica_id`. A turn is a time on
    replicas between two calls of the tool. "move" and "prediction" pass beside these: see `Wait`. Times are as in
    `StepRecord`."""

    sequence_id: SequenceId
    kind: Literal["queue", "replica", "tool", "move", "prediction"]
    start: float
    seconds: float
    replica_id: int | None = None


def turn_spans(
    passages: Iterable[Passage], clock: Callable[[float], float] = float, waits: Iterable[Wait] = ()
) -> list[TurnSpan]:
    """Returns the times between the passages of each trajectory, in their order, then the waits; `clock` translates the
    core's time."""
    spans, last = list[TurnSpan](), dict[SequenceId, Passage]()
    kinds: dict[str, Literal["queue", "replica", "tool"]]
    kinds = {"waiting": "queue", "assigned": "replica", "parked": "tool"}
    for one in passages:
        before = last.get(one.sequence_id)
        if before is not None and before.place == one.place == "waiting":
            continue  # for another replica
        if before is not None:
            start = clock(before.now)
            spans.append(
                TurnSpan(
                    sequence_id=one.sequence_id,
                    kind=kinds[before.place],
                    start=start,
                    seconds=clock(one.now) - start,
                    replica_id=before.replica_id,
                )
            )
        last[one.sequence_id] = one
    return spans + [
        TurnSpan(
            sequence_id=one.sequence_id,
            kind=one.kind,
            start=clock(one.start),
            seconds=one.seconds,
            replica_id=one.replica_id,
        )
        for one in waits
    ]


def turn_metrics(spans: Sequence[TurnSpan]) -> dict[str, float]:
    """Returns for how many seconds the mean trajectory waited for replicas, and was on them."""
    count = max(1, len({span.sequence_id for span in spans}))
    queue_s = sum(span.seconds for span in spans if span.kind == "queue")
    inner_s = sum(span.seconds for span in spans if span.kind == "queue" and span.replica_id is not None)
    replica_s = sum(span.seconds for span in spans if span.kind == "replica")
    return {
        "timing_s/agent_loop/queue/mean": queue_s / count,
        "timing_s/agent_loop/generate_sequences/mean": (replica_s - inner_s) / count,
    }


def chrome_trace(
    steps: Iterable[StepRecord],
    marks: Iterable[Mark] = (),
    turns: Iterable[TurnSpan] = (),
    *,
    origin: float | None = None,
) -> dict[str, Any]:
    """Returns the Trace Event Format of chrome://tracing and Perfetto: a row per replica, a slice per step, a counter
    of the batch size, marks as instants; and a row per trajectory, with a slice per span. Times are in microseconds
    since `origin`, by default the first event.
    """
    steps, marks, turns = list(steps), list(marks), list(turns)
    if origin is None:
        starts = [step.start for step in steps] + [span.start for span in turns]
        origin = min(starts + [mark.time for mark in marks], default=0.0)
    places = {id_: place for place, id_ in enumerate(sorted({span.sequence_id for span in turns}))}

    def micros(time: float) -> float:
        return round((time - origin) * 1e6, 1)

    events: list[dict[str, Any]] = []
    for step in steps:
        row = {"pid": 0, "tid": step.replica_id, "ts": micros(step.start)}
        arguments = {"sequences": step.num_running, "tokens": step.num_tokens, "epoch": step.epoch}
        if step.num_drafted:
            arguments |= {"drafted": step.num_drafted, "accepted": step.num_accepted}
        if step.num_preempted or step.num_swapped_in:
            arguments |= {"preempted": step.num_preempted, "swapped out": step.num_swapped_out}
            arguments["swapped in"] = step.num_swapped_in
        name = f"TP{step.tp_size}"
        events.append({**row, "name": name, "ph": "X", "dur": round(step.seconds * 1e6, 1), "args": arguments})
        events.append(
            {**row, "name": f"replica {step.replica_id} batch", "ph": "C", "args": {"sequences": step.num_running}}
        )
    for mark in marks:
        events.append(
            {
                "pid": 0,
                "tid": 0 if mark.replica_id is None else mark.replica_id,
                "ts": micros(mark.time),
                "name": mark.name,
                "ph": "i",
                "s": "g" if mark.replica_id is None else "t",
                "args": {"detail": mark.detail},
            }
        )
    for span in turns:
        if span.kind in ("move", "prediction"):
            continue  # a row shows what lies within another slice, or behind it
        row = {"pid": 1, "tid": places[span.sequence_id], "ts": micros(span.start)}
        name = f"replica {span.replica_id}" if span.kind == "replica" else span.kind
        events.append({**row, "name": name, "ph": "X", "dur": round(span.seconds * 1e6, 1)})
    titles = {(0, row): f"replica {row}" for row in sorted({step.replica_id for step in steps})}
    titles |= {(1, place): f"prompt {uid}, sample {index}" for (_, uid, index), place in places.items()}
    names: list[dict[str, Any]] = [
        {"pid": pid, "tid": row, "name": "thread_name", "ph": "M", "args": {"name": title}}
        for (pid, row), title in titles.items()
    ]
    if places:
        kinds = ("replicas", "trajectories")
        names += [{"pid": pid, "name": "process_name", "ph": "M", "args": {"name": kinds[pid]}} for pid in (0, 1)]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def write_chrome_trace(
    path: Path, steps: Iterable[StepRecord], marks: Iterable[Mark] = (), turns: Iterable[TurnSpan] = ()
) -> None:
    path.write_text(json.dumps(chrome_trace(steps, marks, turns)))


def guesses(steps: Iterable[StepRecord]) -> tuple[int, int]:
    """Returns how many draft tokens were right, and how many a draw was compared with."""
    found = [(step.num_accepted, step.num_compared) for step in steps]
    return sum(right for right, _ in found), sum(compared for _, compared in found)


def draft_metrics(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Returns the number of draft tokens, the share of them that was accepted, the tokens of a draft, the tokens of a
    sequence and step, for which a prefill counts as one token, and those of a sequence and step with a draft.
    """
    drafted, accepted = (float(sum(getattr(step, name) for step in steps)) for name in ("num_drafted", "num_accepted"))
    num_drafts = sum(step.drafted[0] for step in steps if step.drafted)
    return {
        "num_drafted": drafted,
        "draft_acceptance": accepted / max(1.0, drafted),
        "draft_length": drafted / max(1, num_drafts),
        "acceptance_length": 1 + accepted / max(1, num_drafts),
        "tokens_per_step": 1 + accepted / max(1, sum(step.num_running for step in steps)),
    }


def busy_share(steps: Sequence[StepRecord], replica_ids: Iterable[int]) -> dict[int, float]:
    """Returns, per replica, the share of the rollout's span (first start to last end of all steps) spent in steps."""
    if not steps:
        return dict.fromkeys(replica_ids, 0.0)
    span = max(step.start + step.seconds for step in steps) - min(step.start for step in steps)
    busy = dict.fromkeys(replica_ids, 0.0)
    for step in steps:
        busy[step.replica_id] += step.seconds
    return {replica: seconds / span for replica, seconds in busy.items()}
