"""The input of policies, their answers, and the record of decisions. Plain values, torch-free.

A view is read-only. Its values are snapshots; its mappings are live windows on the core's own books, so that a view
costs the same with ten waiting sequences as with ten thousand. A mapping is valid only until the policy returns: a
policy may keep its values, not the mapping. No view contains a sequence's future length, only the cap on it.

What is made for each decision is a `Struct`, since a frozen dataclass takes about five times as long to be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from engines.parallel.layout import Layout, ReplicaSpec
from engines.sequence import FinishReason, SequenceId


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a length predictor has said of a trajectory (Heddle, §4.1)."""

    remaining: float
    """Tokens that it will still generate, from `num_generated` on."""
    num_generated: int
    num_turns: int
    """Turns that it had ended."""
    now: float
    """When the estimate came, on the clock of the core's caller."""
    source: str
    """Name of the predictor."""

    @property
    def total(self) -> float:
        """Tokens that it will have generated at its end."""
        return self.num_generated + self.remaining


class SequenceView(Struct, frozen=True, kw_only=True):
    """An unfinished sequence."""

    sequence_id: SequenceId
    index: int
    """Position in the order of submission within the phase, from 0."""
    group_id: int
    num_prompt_tokens: int
    num_generated: int
    max_tokens: int
    """The cap on the tokens behind the prompt that its sampling parameters set."""
    last_replica_id: int | None
    """The last replica that it was assigned to; None if there was none in this phase."""
    has_kv: bool
    """Whether its KV was exported, so that any replica can import it."""
    num_observed: int = 0
    """Of a trajectory: the tokens behind the prompt that were not generated."""
    num_turns: int = 0
    """Of a trajectory: the turns that it has ended."""
    is_parked: bool = False
    """Whether it waits for an observation, so that nothing runs it."""
    expected_at: int | None = None
    """Id of the replica that reads its KV while it is parked or waits."""
    prediction: Prediction | None = None
    """The last estimate of its length; None if there was none."""
    answered_turns: int = -1
    """The ended turns about which the predictor has answered last, with an estimate or without; -1: about nothing."""

    @property
    def predicted_remaining(self) -> float | None:
        """Tokens that it will still generate by the last estimate, at least 0."""
        return None if self.prediction is None else max(0.0, self.prediction.total - self.num_generated)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated + self.num_observed

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that may still be added to it."""
        return self.max_tokens - self.num_generated - self.num_observed


class EndedView(Struct, frozen=True, kw_only=True):
    """A sequence that has ended; a policy may predict other lengths from its length."""

    sequence_id: SequenceId
    group_id: int
    num_prompt_tokens: int
    num_generated: int
    finish_reason: FinishReason
    num_observed: int = 0


class ReplicaView(Struct, frozen=True, kw_only=True):
    """A replica: what the core has assigned to it, and what it last reported."""

    spec: ReplicaSpec
    accepts: bool
    """Whether it takes sequences now: a ready rollout replica with this phase's weights, not being regrouped."""
    max_num_seqs: int
    num_assigned: int
    """Sequences assigned to it that have not ended or come back yet."""
    num_tokens: int
    """Tokens of its assigned sequences, prompts included, as last reported."""
    block_size: int
    num_blocks: int
    num_reserved_blocks: int
    """Blocks reserved for its assigned sequences: more than `num_blocks` if sequences were queued there."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    """From the replica's last report, like `num_running`, `num_waiting` and `seconds`."""
    seconds: float

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that its KV cache holds."""
        return self.num_blocks * self.block_size

    def can_hold(self, sequence: SequenceView) -> bool:
        """Whether the sequence's present tokens fit in its KV cache; otherwise no dispatch to it is valid. When they do
        not fit any more, it releases the sequence, as at a chunk's end, so that a larger replica goes on."""
        return sequence.num_tokens <= self.num_kv_tokens

    @property
    def is_open(self) -> bool:
        """Whether it takes one more sequence, if it has room for its tokens."""
        return self.accepts and self.num_assigned < self.max_num_seqs

    def has_room(self, num_tokens: int) -> bool:
        """Whether it has room for a sequence with `num_tokens` reserved tokens, if it can hold it. An empty replica has
        room for any."""
        if not self.is_open:
            return False
        if not self.num_assigned:
            return True
        return self.num_reserved_blocks - (-num_tokens // self.block_size) <= self.num_blocks

    def num_behind(self) -> float:
        """Returns about how many of its sequences wait for others to leave.

        Sequences that leave at different times run together even if they would need more blocks at their ends than the
        replica has. The larger of two numbers counts as running: how many ran at its last report, and how many fit if
        each holds the mean of its present and of its reserved blocks.
        """
        if not self.num_assigned:
            return 0.0
        num_blocks = (self.num_tokens / self.block_size + self.num_reserved_blocks) / 2 / self.num_assigned
        num_together = min(self.max_num_seqs, self.num_blocks / max(num_blocks, 1.0))
        return max(0.0, self.num_assigned - max(self.num_running, num_together))

    def room_for(self, sequence: SequenceView, max_new_tokens: int | None = None) -> bool:
        """Whether a dispatch of the sequence here would be valid; see `num_reserved_tokens`."""
        return self.can_hold(sequence) and self.has_room(
            num_reserved_tokens(
                sequence.num_tokens,
                sequence.num_prompt_tokens + sequence.max_tokens,
                max_new_tokens or self.block_size,
            )
        )


def num_reserved_tokens(num_tokens: int, max_len: int, num_ahead: int) -> int:
    """Returns the tokens for which a replica reserves room: `num_tokens` plus `num_ahead`, at most `max_len`.

    `num_ahead` is the rest of the dispatch's `max_new_tokens`, and the sequence is then never preempted; without that
    bound, it is one block.
    """
    return min(num_tokens + num_ahead, max_len)


class ScheduleView(Struct, frozen=True, kw_only=True):
    """All that a `SchedulePolicy` sees."""

    now: float
    """Seconds, on the clock of the core's caller."""
    layout: Layout
    waiting: Mapping[SequenceId, SequenceView]
    """Sequences that may be dispatched."""
    entered: tuple[SequenceView, ...]
    """Sequences that began to wait since the last call (some may have left again): for a policy with its own order."""
    ended: tuple[EndedView, ...]
    """Sequences that have ended since the last call, in that order; also sequences that no replica ran."""
    replicas: Mapping[int, ReplicaView]
    parked: Mapping[SequenceId, SequenceView] = {}
    """Trajectories between two turns. Views are made as they are read."""
    changed: tuple[SequenceView, ...] = ()
    """Trajectories that have parked, or of which the predictor has said something, since the last call."""


@dataclass(frozen=True, kw_only=True)
class LayoutView:
    """All that a `LayoutPolicy` sees."""

    phase: int
    """Number of the rollout; each has a higher one than those before it."""
    now: float
    layout: Layout
    num_waiting: int
    unfinished: Mapping[SequenceId, SequenceView]
    """Sequences submitted and not delivered, waiting ones included; lengths as last reported. Views are made as they
    are read."""
    ended: tuple[EndedView, ...]
    """Sequences that have ended since the last call, in that order; also sequences that no replica ran."""
    num_delivered: int
    replicas: Mapping[int, ReplicaView]

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)


@dataclass(frozen=True, kw_only=True)
class LayoutChange:
    """What a `LayoutPolicy` answers."""

    layout: Layout
    """The layout to regroup to, with the next epoch."""
    places: Mapping[SequenceId, int] = field(default_factory=dict)
    """Unfinished sequence -> id of the new layout's replica that continues it. Of those on replicas that the change
    leaves alone, of sequences without an entry, and where that replica's KV cache holds less than the sequence has by
    then, the schedule policy decides."""
    with_kv: bool = True
    """Whether KV moves along; else it is computed again."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Assigns a waiting sequence to a replica, for `max_new_tokens` tokens, or to its end when None."""

    sequence_id: SequenceId
    replica_id: int
    max_new_tokens: int | None = None
    queued: bool = False
    """Dispatch even without room: the sequence waits in the replica's own queue."""
    priority: float = 0.0
    """Of the sequence on the replica until it comes back; see `Work.priority`."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """The replica begins to read the stored KV of a parked trajectory, which goes on there: Heddle, §5.3."""

    sequence_id: SequenceId
    replica_id: int


Place = Literal["waiting", "assigned", "parked", "delivered"]


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A trajectory that has come to a place: its queueing, turns and tools are the times between two of them."""

    now: float
    sequence_id: SequenceId
    place: Place
    replica_id: int | None = None
    """Of the replica that it is assigned to."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a trajectory, or something for it, took beside its `Passage`s.

    queue: it was in the own queue of a replica. move: a replica read its stored KV, until the replica's next step; it
    may have been parked then. prediction: the predictor was asked for its length.
    """

    sequence_id: SequenceId
    kind: Literal["queue", "move", "prediction"]
    start: float
    seconds: float
    replica_id: int | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision, and the load at that time."""

    now: float
    action: str
    """dispatch, move, abort, regroup, resume, drop, load_weights, end_phase, fail."""
    sequence_ids: tuple[SequenceId, ...]
    replica_id: int | None
    detail: str
    num_waiting: int
    num_unfinished: int
    replicas: tuple[ReplicaView, ...]
