"""Requests of the core's caller, and the results that the core returns to it. Torch-free.

These values stay in one process; the messages between processes are in `engines/control/messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from engines.parallel.layout import Layout, ReplicaSpec
from engines.sequence import Finished, FinishReason, KVHandle, SequenceId, SequenceState


class RequestRefused(RuntimeError):
    """The request does not fit the core's state; the state is unchanged."""


# --- Requests: caller -> core


@dataclass(frozen=True, kw_only=True)
class BeginPhase:
    """Start a rollout phase. The world's replicas have `policy_version` already; others load it from the source."""

    phase: int
    policy_version: int
    weights_source: str | None = None
    """Folder or address that replicas outside the world load from."""


@dataclass(frozen=True, kw_only=True)
class SubmitSequences:
    """Sequences to roll out in this phase, new or partly generated; the core keeps the states."""

    states: tuple[SequenceState, ...]


class ContinueTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trajectory goes on behind these observed tokens, if it is parked after this turn."""

    sequence_id: SequenceId
    turn: int
    """Observations before this one: 0 before the first turn."""
    observation: tuple[int, ...]


class EndTrajectory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A trajectory is delivered as it is, if it is parked after this turn, as in `ContinueTurn`."""

    sequence_id: SequenceId
    turn: int
    reason: FinishReason
    observation: tuple[int, ...] = ()
    """Observed tokens behind the last turn."""
    text: str = ""
    """Of its completion."""


@dataclass(frozen=True, kw_only=True)
class AnswerTurns:
    """How parked trajectories go on. An answer to another turn than the last, or to a delivered one, has no effect."""

    answers: tuple[ContinueTurn | EndTrajectory, ...]


@dataclass(frozen=True, kw_only=True)
class PredictedLength:
    """A predictor's answer about a trajectory that had ended `num_turns` turns."""

    sequence_id: SequenceId
    num_turns: int
    remaining: float
    """Tokens that it will still generate. An estimate that is negative or not finite leaves the last one in force."""


@dataclass(frozen=True, kw_only=True)
class NotePredictions:
    """What a predictor has answered. An answer about an earlier turn than the last, or about a delivered trajectory,
    has no effect."""

    source: str
    """Name of the predictor."""
    answers: tuple[PredictedLength, ...]


@dataclass(frozen=True, kw_only=True)
class RequestMove:
    """Move a sequence to a replica, or, when None, back to wait for any. No effect if the sequence ends before."""

    sequence_id: SequenceId
    replica_id: int | None
    with_kv: bool = True


@dataclass(frozen=True, kw_only=True)
class RequestAbort:
    """Abort sequences; each is delivered with finish reason `abort`, unless it ends before."""

    sequence_ids: tuple[SequenceId, ...]


@dataclass(frozen=True, kw_only=True)
class RequestRegroup:
    """Change the world's layout, whose `epoch` must be the next one."""

    layout: Layout
    with_kv: bool = True
    places: Mapping[SequenceId, int] = field(default_factory=dict)
    """As in `LayoutChange`."""


@dataclass(frozen=True, kw_only=True)
class AssumeLayout:
    """Between phases, all ranks take their places in this layout by themselves; its `epoch` must be the next one."""

    layout: Layout


@dataclass(frozen=True, kw_only=True)
class RequestEndPhase:
    """End the phase; an error while sequences are unfinished, unless `abort` ends them."""

    abort: bool = False


@dataclass(frozen=True, kw_only=True)
class AddReplica:
    """A replica outside the world was launched, with an id that no replica has had. Its `ReplicaReady` comes later."""

    spec: ReplicaSpec


@dataclass(frozen=True, kw_only=True)
class RequestShutdown:
    """End all processes; between phases only."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Check the deadlines at the present time."""


Request = (
    BeginPhase
    | SubmitSequences
    | AnswerTurns
    | NotePredictions
    | RequestMove
    | RequestAbort
    | RequestRegroup
    | AssumeLayout
    | RequestEndPhase
    | AddReplica
    | RequestShutdown
    | Tick
)

# --- Results: core -> caller


@dataclass(frozen=True, kw_only=True)
class Deliver:
    """A sequence that has ended, reported exactly once. A sequence aborted while on no replica has no `text`."""

    finished: Finished


@dataclass(frozen=True, kw_only=True)
class TurnEnded:
    """A trajectory is parked until `ContinueTurn` or `EndTrajectory`. Its state changes when it continues."""

    state: SequenceState
    text: str
    """Of the turn."""


@dataclass(frozen=True, kw_only=True)
class DiscardKV:
    """This KV will not be read any more: drop it. It may already be dropped."""

    kv: KVHandle


@dataclass(frozen=True, kw_only=True)
class ReplicaDropped:
    """The core goes on without this replica, which is outside the world: end its process if it still runs."""

    replica_id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RegroupComplete:
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class PhaseComplete:
    """Every process has acknowledged the end of the phase."""

    phase: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The run cannot go on; the core ignores all later events."""

    reason: str


Result = Deliver | TurnEnded | DiscardKV | ReplicaDropped | RegroupComplete | PhaseComplete | Failed
