"""What coordinator and replicas say to each other: typed structs, msgpack bytes. Torch-free.

The transport refuses a process of another version (`sealing.VERSION`): raise that when these change.

**Addresses.** A command goes to one process: `rank`. When that process is the leader of a replica (`ranks[0]` of its
spec), `replica_id` names the replica, and the leader relays the command to the replica's other ranks, which take it at
the same step. An idle rank (in no replica of the layout) is addressed singly, with `replica_id` None. Answers come from
the same process, with the same two fields. Replicas outside the torchrun world are numbered by whoever launches
them: with ids that are never used again, and ranks from the world's size on.

**Order.** (`replica_id`, `epoch`) names a replica for good: `epoch` is that of the layout which formed it (a replica
that a regroup leaves alone keeps its epoch; outside the world it is 0). `seq` of a command counts all commands of a
run, and an event that answers one says so in `acks`. `seq` of an event counts the events of its sender since it was
formed, from 0, so that a repeated or a missing one shows. `phase` is that of the last command the sender took (-1
before any). A channel between two processes keeps its order; nothing is assumed between channels.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engines.parallel.layout import Layout
from engines.sequence import Finished, SequenceId, Work

T = TypeVar("T")


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
    """Take these sequences on. Answered by what becomes of each; refused by `WorkRejected`."""

    works: tuple[Work, ...]


class PauseSequences(_Message, frozen=True, kw_only=True):
    """Give sequences back between two steps; those not here (any more) are passed over. -> `SequencesPaused`."""

    sequence_ids: tuple[SequenceId, ...] | None
    """None: all."""
    with_kv: bool
    """Also export their KV."""


class AbortSequences(_Message, frozen=True, kw_only=True):
    """Drop sequences; those not here (any more) are passed over. -> `SequencesAborted`."""

    sequence_ids: tuple[SequenceId, ...]


class Regroup(_Message, frozen=True, kw_only=True):
    """Leave the replica (or idleness) and take the place that `layout` gives.

    Comes to paused replicas and idle ranks only. -> `ReplicaReady` from the leader of each new replica, when all its
    ranks have done so, and `RankIdle` from each rank that is idle then: from there on it is addressed singly.
    """

    layout: Layout


class LoadWeights(_Message, frozen=True, kw_only=True):
    """Load the weights of policy version `version` from `source` (a folder or an address). -> `WeightsLoaded`."""

    version: int
    source: str


class EndPhase(_Message, frozen=True, kw_only=True):
    """The rollout of `phase` is over. -> `PhaseEnded`, from which on the process may train."""


class Shutdown(_Message, frozen=True, kw_only=True):
    """End the process. Not answered."""


Command = SubmitWork | PauseSequences | AbortSequences | Regroup | LoadWeights | EndPhase | Shutdown

# --- Events: replica -> coordinator


class ReplicaReady(_Message, frozen=True, kw_only=True):
    """All ranks of the replica stand by. What it holds, and what it has room for."""

    max_num_seqs: int
    """Sequences in one forward pass."""
    num_kv_tokens: int
    """Tokens that the KV cache holds."""
    block_size: int
    policy_version: int


class RankIdle(_Message, frozen=True, kw_only=True):
    """After a `Regroup`: this rank is in no replica of the layout with this `epoch`, and listens for itself."""


class StepReported(_Message, frozen=True, kw_only=True):
    """After one step or several: sums since the last report, and current levels."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    seconds: float
    """That the steps since the last report took."""
    progress: tuple[tuple[SequenceId, int], ...]
    """Tokens generated since the last report; sequences without any left out."""


class SequencesFinished(_Message, frozen=True, kw_only=True):
    finished: tuple[Finished, ...]


class SequencesReleased(_Message, frozen=True, kw_only=True):
    """Sequences that used up their `max_new_tokens` here, unfinished."""

    works: tuple[Work, ...]
    """Their states, and their KV where it was kept; `max_new_tokens` is None."""


class SequencesPaused(_Message, frozen=True, kw_only=True):
    acks: int
    works: tuple[Work, ...]
    """Those that were still here, as in `SequencesReleased`."""


class SequencesAborted(_Message, frozen=True, kw_only=True):
    acks: int
    finished: tuple[Finished, ...]
    """Those that were still here, with what they had; finish reason `abort`."""


class WorkRejected(_Message, frozen=True, kw_only=True):
    """A sequence that can never run on this replica."""

    sequence_id: SequenceId
    reason: str


class WeightsLoaded(_Message, frozen=True, kw_only=True):
    acks: int
    version: int
    checksum: int
    """Of the logical weights: the same for every layout of the same weights."""


class PhaseEnded(_Message, frozen=True, kw_only=True):
    acks: int


class ReplicaLost(_Message, frozen=True, kw_only=True):
    """A replica's last words, or what its connection's end says in its place; `seq` does not count."""

    reason: str


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
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises ProtocolError for an unknown kind of message, or fields that do not fit."""
    return _decode(data, _commands, "command")


def decode_event(data: bytes) -> Event:
    """Raises ProtocolError for an unknown kind of message, or fields that do not fit."""
    return _decode(data, _events, "event")


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T], what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"{what}: {len(data)} bytes are not a message of this version: {error}") from error
