"""Who is where: unfinished sequences, the queues they wait in, the replicas that have them. Torch-free.

Every operation takes time that does not grow with the number of waiting sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from engines.coordination.records import ReplicaRecord, SequenceRecord
from engines.coordination.views import EndedView, ReplicaView, SequenceView
from engines.sequence import Finished, SequenceId, SequenceState


class Books:
    """An unfinished sequence is in exactly one place: waiting for any replica, waiting for one, or assigned."""

    def __init__(self) -> None:
        self.replicas: dict[int, ReplicaRecord] = {}
        self.sequences: dict[SequenceId, SequenceRecord] = {}
        """Submitted and not delivered."""
        self.delivered: set[SequenceId] = set()
        self.policy_version: int | None = None
        """That a replica's weights must have; None between phases."""
        # Ordered, since a plain dict that loses its first entries gets slow to find the next one.
        self._waiting: OrderedDict[SequenceId, SequenceView] = OrderedDict()
        self.waiting: Mapping[SequenceId, SequenceView] = MappingProxyType(self._waiting)
        """For any replica."""
        self._entered: list[SequenceView] = []
        self._ended: list[EndedView] = []
        self._views: dict[int, ReplicaView] = {}
        # A dict for its order: with a set, what a policy iterates over would depend on memory addresses.
        self._changed: dict[ReplicaRecord, None] = {}
        self._num_submitted = 0

    def begin_phase(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self._num_submitted = 0
        self.delivered.clear()
        self._changed.update(dict.fromkeys(self.replicas.values()))

    def submit(self, state: SequenceState) -> None:
        sequence = SequenceRecord(state=state, index=self._num_submitted, num_tokens=len(state.tokens))
        self._num_submitted += 1
        self.sequences[sequence.id] = sequence
        self.wait(sequence)

    def wait(self, sequence: SequenceRecord) -> None:
        """Queues a sequence that is nowhere: for the replica it is pinned to, else for any."""
        if sequence.pin is not None:
            sequence.pin.pinned_waiting[sequence.id] = sequence
            return
        sequence.release_at = None
        view = sequence.view()
        self._waiting[sequence.id] = view
        self._entered.append(view)

    def unqueue(self, sequence: SequenceRecord) -> None:
        """Takes a waiting sequence out of its queue."""
        self._waiting.pop(sequence.id, None)
        if sequence.pin is not None:
            sequence.pin.pinned_waiting.pop(sequence.id, None)

    def pin(self, sequence: SequenceRecord, replica: ReplicaRecord | None) -> None:
        """Pins a sequence that is in no queue."""
        if sequence.pin is not None:
            del sequence.pin.pins[sequence.id]
        sequence.pin = replica
        if replica is not None:
            replica.pins[sequence.id] = sequence

    def assign(self, sequence: SequenceRecord, replica: ReplicaRecord, max_new_tokens: int | None, now: float) -> None:
        self.unqueue(sequence)
        self.pin(sequence, None)
        if not replica.assigned:
            replica.last_heard = now  # its silence counts from here
        replica.assign(sequence, max_new_tokens)
        self._changed[replica] = None

    def deliver(self, sequence: SequenceRecord, finished: Finished) -> None:
        self.unqueue(sequence)
        self.pin(sequence, None)
        if sequence.replica is not None:
            self._changed[sequence.replica] = None
            sequence.replica.give_up(sequence)
        del self.sequences[sequence.id]
        self.delivered.add(sequence.id)
        state = finished.state
        self._ended.append(
            EndedView(
                sequence_id=sequence.id,
                group_id=state.group_id,
                num_prompt_tokens=state.num_prompt_tokens,
                num_generated=state.num_generated,
                finish_reason=finished.completion.finish_reason,
            )
        )

    def add_replica(self, replica: ReplicaRecord) -> None:
        self.replicas[replica.spec.id] = replica
        self._changed[replica] = None

    def remove_replica(self, replica: ReplicaRecord) -> None:
        """Forgets a replica that no sequence is assigned to; those pinned to it may go anywhere."""
        assert not replica.assigned, f"{replica} still has sequences"
        del self.replicas[replica.spec.id]
        self._views.pop(replica.spec.id, None)
        self._changed.pop(replica, None)
        for sequence in list(replica.pins.values()):
            waits = sequence.id in replica.pinned_waiting
            self.unqueue(sequence)
            self.pin(sequence, None)
            if waits:
                self.wait(sequence)

    def touch(self, replica: ReplicaRecord) -> None:
        """Its view is out of date."""
        self._changed[replica] = None

    def views(self) -> Mapping[int, ReplicaView]:
        for replica in self._changed:
            accepts = (
                replica.ready is not None
                and not replica.closed
                and replica.spec.role == "rollout"
                and self.policy_version is not None
                and replica.version == self.policy_version
            )
            self._views[replica.spec.id] = replica.view(accepts)
        self._changed.clear()
        return MappingProxyType(self._views)

    def take_entered(self) -> tuple[SequenceView, ...]:
        """Sequences that came to wait for any replica since the last call."""
        entered, self._entered = tuple(self._entered), []
        return entered

    def take_ended(self) -> tuple[EndedView, ...]:
        """Sequences that have ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def check_integrity(self) -> None:
        """Asserts that every unfinished sequence is in one place, and that the sums are right."""
        places = list(self._waiting)
        for replica in self.replicas.values():
            places += [*replica.assigned, *replica.pinned_waiting]
            assert all(sequence.replica is replica for sequence in replica.assigned.values())
            assert all(sequence.pin is replica for sequence in replica.pins.values())
            assert set(replica.pinned_waiting) <= set(replica.pins)
            assert replica.num_tokens == sum(sequence.num_tokens for sequence in replica.assigned.values())
            assert replica.num_reserved_blocks == sum(sequence.num_blocks for sequence in replica.assigned.values())
        assert sorted(places) == sorted(self.sequences), "a sequence is nowhere, or in two places"
        assert not self.delivered & set(self.sequences), "a delivered sequence is still here"
