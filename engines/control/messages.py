"""The messages between coordinator and replicas: typed structs, sent as msgpack bytes. Torch-free.

The transport refuses a process with another `sealing.VERSION`: raise that number when these messages change.

**Addresses.** A command goes to one process: `rank`. When that process is the leader of a replica (`ranks[0]` of its
spec), `replica_id` names the replica, and the leader relays the command to the replica's other ranks; all execute it at
the same step. An idle rank (in no replica of the layout) is addressed directly, with `replica_id` None. Answers come
from the same process, with the same two fields. The launcher numbers the replicas outside the torchrun world: with ids
that are never used again, and ranks from the world's size on.

**Order.** (`replica_id`, `epoch`) identifies a replica in the whole run: `epoch` is that of the layout which formed it
(a replica that a regroup does not change keeps its epoch; outside the world it is 0). A command's `seq` counts all
commands of a run; an event that answers a command has that number in `acks`. An event's `seq` counts the sender's
events since its replica was formed, from 0, so that a repeated or a missing event is detected. An event's `phase` is
that of the last command its sender executed (-1 before any). A channel between two processes keeps its order; no order
is assumed between channels.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engines.decoding import DecodeError, from_msgpack
from engines.parallel.layout import Layout
from engines.sequence import Finished, SequenceId, Work


class ProtocolError(Exception):
    """Bytes that are not a message of this version."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    replica_id: int | None
    rank: int
    phase: int
    epoch: int
    seq: int


# --- Commands: coordinator -> replica


class SubmitWork(_Message, frozen=True, kw_only=True):
    """Run these sequences. Answered by the later events about each sequence, or by `WorkRejected`."""

    works: tuple[Work, ...]


class ExpectSequences(_Message, frozen=True, kw_only=True):
    """Read the KV of these sequences, which will be submitted here. Not answered."""

    works: tuple[Work, ...]
    dropped: tuple[SequenceId, ...] = ()
    """Sequences that will not be submitted here after all."""


class PauseSequences(_Message, frozen=True, kw_only=True):
    """Return sequences between two steps; skips those that are not here (any more). -> `SequencesPaused`."""

    sequence_ids: tuple[SequenceId, ...] | None
    """None: all."""
    with_kv: bool
    """Whether to export their KV, too."""
    keeping: tuple[SequenceId, ...] = ()
    """Those whose KV stays in the cache instead, for the `Regroup` that follows."""


class AbortSequences(_Message, frozen=True, kw_only=True):
    """Drop sequences; skips those that are not here (any more). -> `SequencesAborted`."""

    sequence_ids: tuple[SequenceId, ...]


class Regroup(_Message, frozen=True, kw_only=True):
    """Leave the present replica (if any) and take this rank's place in `layout`.

    Sent only to paused replicas and idle ranks. -> `ReplicaReady` from the leader of each new replica, when all its
    ranks have done so, and `RankIdle` from each rank that is then idle; from then on it is addressed directly.
    """

    layout: Layout
    before: Layout
    """The present layout; a rank does not know those of regroups that left it alone."""
    places: tuple[tuple[SequenceId, int], ...] = ()
    """Sequences that were paused with `keeping`, and the replicas of `layout` that continue them."""


class LoadWeights(_Message, frozen=True, kw_only=True):
    """Load the weights of policy version `version` from `source` (a folder or an address). -> `WeightsLoaded`."""

    version: int
    source: str


class EndPhase(_Message, frozen=True, kw_only=True):
    """The rollout of `phase` is over. -> `PhaseEnded`, after which the process may train."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """End the process. Not answered."""


Command = SubmitWork | ExpectSequences | PauseSequences | AbortSequences | Regroup | LoadWeights | EndPhase | Shutdown

# --- Events: replica -> coordinator


class ReplicaReady(_Message, frozen=True, kw_only=True):
    """All ranks of the replica are ready. Contains its capacity and the version of its weights."""

    max_num_seqs: int
    """Sequences in one forward pass."""
    num_kv_tokens: int
    """Tokens that the KV cache holds."""
    block_size: int
    policy_version: int
    reads_kv: bool = True
    """Whether it reads the KV that other replicas have stored, and drops what it does not need."""


class RankIdle(_Message, frozen=True, kw_only=True):
    """After a `Regroup`: this rank is in no replica of the layout with this `epoch`, and receives commands directly."""


class StepReported(_Message, frozen=True, kw_only=True):
    """After one or more steps: sums since the last report, and current values."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int | None = None
    """Of a replica that leases its memory: how many it may have in all. Others have what they announced."""
    seconds: float
    """Time of the steps since the last report."""
    progress: tuple[tuple[SequenceId, int], ...]
    """Tokens generated per sequence since the last report; sequences without new tokens are left out."""
    waits: tuple[tuple[SequenceId, Literal["queue", "move"], float, float], ...] = ()
    """Trajectories that have left the replica's queue since the last report, or whose stored KV has been read: how many
    seconds before this one that began, and for how many seconds it lasted."""


class SequencesFinished(_Message, frozen=True, kw_only=True):
    finished: tuple[Finished, ...]


class SequencesReleased(_Message, frozen=True, kw_only=True):
    """Sequences that used up their `max_new_tokens` or the KV cache here, or whose turn has ended; unfinished."""

    works: tuple[Work, ...]
    """Their states, and their KV if it was stored; `max_new_tokens` is None."""


class SequencesPaused(_Message, frozen=True, kw_only=True):
    acks: int
    works: tuple[Work, ...]
    """The sequences that were still here, as in `SequencesReleased`."""


class SequencesAborted(_Message, frozen=True, kw_only=True):
    acks: int
    finished: tuple[Finished, ...]
    """The sequences that were still here, with their tokens so far; finish reason `abort`."""


class WorkRejected(_Message, frozen=True, kw_only=True):
    """A sequence that can never run on this replica."""

    sequence_id: SequenceId
    reason: str


class WeightsLoaded(_Message, frozen=True, kw_only=True):
    acks: int
    version: int
    checksum: int
    """Checksum of the logical weights: the same for every layout of the same weights."""


class PhaseEnded(_Message, frozen=True, kw_only=True):
    acks: int


class ReplicaLost(_Message, frozen=True, kw_only=True):
    """A replica is lost: sent by the replica before it ends, or made by the coordinator. `seq` is not checked."""

    reason: str

    @staticmethod
    def of(replica_id: int, rank: int, reason: str) -> ReplicaLost:
        """Of a replica outside the torchrun world."""
        return ReplicaLost(replica_id=replica_id, rank=rank, phase=-1, epoch=0, seq=0, reason=reason)


Event = (
    ReplicaReady
    | RankIdle
    | StepReported
    | SequencesFinished
    | SequencesReleased
    | SequencesPaused
    | SequencesAborted
    | WorkRejected
    | WeightsLoaded
    | PhaseEnded
    | ReplicaLost
)


_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises ProtocolError for an unknown kind of message, or fields that do not fit."""
    command: Command = _decode(data, Command, "command")
    return command


def decode_event(data: bytes) -> Event:
    """Raises ProtocolError for an unknown kind of message, or fields that do not fit."""
    event: Event = _decode(data, Event, "event")
    return event


def _decode(data: bytes, kind: Any, what: str) -> Any:
    try:
        return from_msgpack(data, kind)
    except DecodeError as error:
        raise ProtocolError(f"{what}: {len(data)} bytes are not a message of this version: {error}") from error
