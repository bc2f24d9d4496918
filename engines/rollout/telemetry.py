"""Records of a rollout's steps and events, and a timeline made from them. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.replica.switch import Switch


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


def chrome_trace(
    steps: Iterable[StepRecord], marks: Iterable[Mark] = (), *, origin: float | None = None
) -> dict[str, Any]:
    """Returns the Trace Event Format of chrome://tracing and Perfetto: a row per replica, a slice per step, a counter
    of the batch size, marks as instants. Times are in microseconds since `origin`, by default the first event.
    """
    steps, marks = list(steps), list(marks)
    if origin is None:
        origin = min([step.start for step in steps] + [mark.time for mark in marks], default=0.0)

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
    rows = sorted({step.replica_id for step in steps})
    names = [
        {"pid": 0, "tid": row, "name": "thread_name", "ph": "M", "args": {"name": f"replica {row}"}} for row in rows
    ]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def write_chrome_trace(path: Path, steps: Iterable[StepRecord], marks: Iterable[Mark] = ()) -> None:
    path.write_text(json.dumps(chrome_trace(steps, marks)))


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
