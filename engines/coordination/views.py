"""What policies see, what they answer, and the record of it. Plain values, torch-free.

A view is read-only. Its values are snapshots; its mappings are windows on the core's own books, so that a view costs
the same with ten waiting sequences as with ten thousand. They hold while the policy decides: keep values, not mappings.
Lengths that are yet to come are in no view: only the cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.parallel.layout import Layout, ReplicaSpec
from engines.sequence import FinishReason, SequenceId


@dataclass(frozen=True, kw_only=True)
class SequenceView:
    """A waiting sequence."""

    sequence_id: SequenceId
    index: int
    """In the order of submission within the phase, from 0."""
    group_id: int
    num_prompt_tokens: int
    num_generated: int
    max_tokens: int
    """The cap on generated tokens that its sampling parameters set."""
    last_replica_id: int | None
    """Where it was last; None when it has not run in this phase."""
    has_kv: bool
    """Whether KV was exported, for any replica to import."""


@dataclass(frozen=True, kw_only=True)
class EndedView:
    """A sequence that has ended: what its length tells of others is known now."""

    sequence_id: SequenceId
    group_id: int
    num_prompt_tokens: int
    num_generated: int
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class ReplicaView:
    """A replica: what the core has given it, and what it last reported."""

    spec: ReplicaSpec
    accepts: bool
    """Whether it takes sequences now: a ready rollout replica with this phase's weights, not being regrouped."""
    max_num_seqs: int
    num_assigned: int
    """Sequences given to it and not yet come back."""
    num_tokens: int
    """Tokens of those, prompts included, as last reported."""
    block_size: int
    num_blocks: int
    num_reserved_blocks: int
    """Blocks set aside for those: above `num_blocks` when work was queued there."""
    num_running: int
    num_waiting: int
    num_free_blocks: int
    """As reported, like the two above and `seconds`."""
    seconds: float

    def has_room(self, num_tokens: int) -> bool:
        """Whether it can take a sequence that will hold `num_tokens` tokens there. One that is empty takes any."""
        if not self.accepts or self.num_assigned >= self.max_num_seqs:
            return False
        num_blocks = -(-num_tokens // self.block_size)
        return not self.num_assigned or self.num_reserved_blocks + num_blocks <= self.num_blocks

    def room_for(self, sequence: SequenceView, max_new_tokens: int | None = None) -> bool:
        """Whether a dispatch of the sequence here would be valid; see `num_reserved_tokens`."""
        return self.has_room(
            num_reserved_tokens(
                sequence.num_prompt_tokens + sequence.num_generated,
                sequence.num_prompt_tokens + sequence.max_tokens,
                max_new_tokens or self.block_size,
            )
        )


def num_reserved_tokens(num_tokens: int, max_len: int, num_ahead: int) -> int:
    """Tokens that room is kept for: those it has, and those it will get, or a block's worth when nobody knows.

    With a bound on what is generated here the room for all of it is kept: it will never be preempted.
    """
    return min(num_tokens + num_ahead, max_len)


@dataclass(frozen=True, kw_only=True)
class ScheduleView:
    """All that a `SchedulePolicy` sees."""

    now: float
    """Seconds, on the clock of whoever drives the core."""
    layout: Layout
    waiting: Mapping[SequenceId, SequenceView]
    """Sequences that may be dispatched."""
    entered: tuple[SequenceView, ...]
    """Those that came to wait since the last call (some may have left again): feed for a policy's own order."""
    ended: tuple[EndedView, ...]
    """Sequences that have ended since the last call, in that order; also those of which no replica ran any."""
    replicas: Mapping[int, ReplicaView]


@dataclass(frozen=True, kw_only=True)
class LayoutView:
    """All that a `LayoutPolicy` sees."""

    now: float
    layout: Layout
    num_waiting: int
    num_unfinished: int
    """Sequences submitted and not delivered, waiting ones included."""
    num_delivered: int
    replicas: Mapping[int, ReplicaView]


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Give a waiting sequence to a replica, for `max_new_tokens` tokens, or to its end when None."""

    sequence_id: SequenceId
    replica_id: int
    max_new_tokens: int | None = None
    queued: bool = False
    """Give it without asking for room: it waits in the replica's own queue."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One thing decided, and what was seen then."""

    now: float
    action: str
    """dispatch, move, abort, regroup, resume, drop, load_weights, end_phase, fail."""
    sequence_ids: tuple[SequenceId, ...]
    replica_id: int | None
    detail: str
    num_waiting: int
    num_unfinished: int
    replicas: tuple[ReplicaView, ...]
