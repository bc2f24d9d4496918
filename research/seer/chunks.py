"""Divided rollout (Seer §4.2): a waiting sequence gets the next chunk of its tokens, on any replica. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from engines.constraints import Count, Fraction, WholeNumber, check_fields
from engines.coordination.views import Dispatch, ReplicaView, ScheduleView, SequenceView


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """How sequences are divided, and where their chunks go."""

    chunk_tokens: Count = 8192
    """Most tokens that a sequence generates before it comes back."""
    spread: Fraction = 0.5
    """By which share of `chunk_tokens` the shortest chunk is shorter; lengths are spread evenly between the two.

    With 0, as in the paper, sequences that begin together leave together, and much of the room that they need at their
    end is unused until then."""
    follow_ups: WholeNumber = 4
    """Sequences that a replica may hold behind those for which it has room. One of them runs in the very step after
    another sequence's last, without a round trip to the coordinator."""
    look_ahead: Count = 8
    """Sequences that are tried, in their order, where the first ones find no room; 1 is Algorithm 1 as printed."""

    def __post_init__(self) -> None:
        check_fields(self)

    def length(self, number: int) -> int:
        """Returns the most tokens of the chunk with this number, from 0. Multiples of the golden ratio, modulo 1, are
        evenly spread."""
        return max(1, round(self.chunk_tokens * (1 - self.spread * (number * 0.6180339887498949 % 1))))

    def check(self, *, block_size: int, max_tokens: int) -> None:
        """Raises ValueError for `chunk_tokens` below a block of KV, or above what a sequence may have."""
        if not block_size <= self.chunk_tokens <= max_tokens:
            raise ValueError(
                f"chunk_tokens={self.chunk_tokens}: must be at least a block of KV and at most what a sequence may "
                f"generate; give a number from {block_size} to {max_tokens}"
            )


def dispatch_chunk(
    view: ScheduleView, sequences: Iterable[SequenceView], options: ChunkOptions, number: int
) -> Dispatch | None:
    """Returns chunk `number` for the first sequence for which a replica has room (Algorithm 1, lines 18 to 25).

    Room is for all tokens that the sequence will have at the chunk's end, so that none is preempted (§4.2). Where no
    replica has room for any of the sequences, the first one becomes a follow-up of a replica where few of them wait.
    """
    replicas = [
        one
        for one in view.replicas.values()
        if one.accepts and one.num_assigned < one.max_num_seqs + options.follow_ups
    ]
    if not replicas:
        return None
    first: tuple[SequenceView, int] | None = None
    fewest_refused, most = None, options.length(number)
    for sequence in islice(sequences, options.look_ahead):
        chunk = min(most, sequence.max_new_tokens)
        num_tokens = sequence.num_tokens + chunk
        first = first or (sequence, chunk)
        if fewest_refused is not None and num_tokens >= fewest_refused:
            continue
        able = [one for one in replicas if one.can_hold(sequence)]
        if replica := select_instance(one for one in able if one.has_room(num_tokens)):
            return Dispatch(sequence_id=sequence.sequence_id, replica_id=replica.spec.id, max_new_tokens=chunk)
        if len(able) == len(replicas):
            fewest_refused = num_tokens
    if first is None or not options.follow_ups:
        return None
    sequence, chunk = first
    able = [one for one in replicas if one.can_hold(sequence)]
    replica = select_instance(one for one in able if one.num_behind() < options.follow_ups)
    if replica is None:
        return None
    return Dispatch(sequence_id=sequence.sequence_id, replica_id=replica.spec.id, max_new_tokens=chunk, queued=True)


def select_instance(replicas: Iterable[ReplicaView]) -> ReplicaView | None:
    """Returns the replica with the lowest KV use, then with the fewest sequences; None if there is none.

    The paper names KV use and concurrency as the measures, and does not say how they are combined.
    """
    return min(
        replicas,
        key=lambda replica: (
            replica.num_reserved_blocks / replica.num_blocks if replica.num_blocks else 0.0,
            replica.num_assigned,
            replica.spec.id,
        ),
        default=None,
    )
