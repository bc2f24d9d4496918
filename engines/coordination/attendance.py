"""The lifetime of replicas: they join, load the phase's weights, answer in time, or are lost. Torch-free."""

from __future__ import annotations

from engines.control import messages
from engines.coordination.books import Books
from engines.coordination.outbox import Outbox
from engines.coordination.records import ReplicaRecord
from engines.coordination.requests import ReplicaDropped, RequestRefused
from engines.parallel.layout import ReplicaSpec


class Attendance:
    """Keeps track of which replicas are present, with which weights, and which have not answered in time."""

    def __init__(self, books: Books, outbox: Outbox) -> None:
        self._books = books
        self._outbox = outbox
        self._checksums: dict[tuple[str | None, int], int] = {}
        """By source and version."""

    def add(self, spec: ReplicaSpec) -> None:
        """Adds a replica outside the world that was launched; waits for it to be ready."""
        books = self._books
        if spec.id in books.replicas or spec.id in books.outside_ids:
            raise RequestRefused(f"AddReplica.spec.id={spec.id}: was used before; take an id that no replica has had")
        taken = {rank for replica in books.replicas.values() for rank in replica.spec.ranks}
        if min(spec.ranks) < books.world_size or taken & set(spec.ranks):
            raise RequestRefused(f"AddReplica.spec.ranks={spec.ranks}: taken; number them from {books.world_size} on")
        books.outside_ids.add(spec.id)
        replica = ReplicaRecord(spec=spec, epoch=0, outside=True)
        books.add_replica(replica)
        self._outbox.wait_for(replica.ready_key, replica, "to be ready")

    def announce(self, event: messages.ReplicaReady, replica: ReplicaRecord) -> None:
        """Notes that a replica is ready; outside the world, it is sent to load the phase's weights if it has others."""
        replica.ready = event
        self._outbox.answered(replica.ready_key, replica)
        phase = self._books.phase
        if replica.outside:
            replica.version = event.policy_version
            if (
                phase is not None
                and not phase.end_seqs
                and not replica.holds(phase.policy_version, phase.weights_source)
            ):
                self.load_weights(replica)
        elif replica.closed and replica.epoch == self._books.layout.epoch and event.policy_version != replica.version:
            self._books.fail(
                f"{replica} holds weights of version {event.policy_version} after a regroup, not {replica.version}"
            )

    def load_weights(self, replica: ReplicaRecord) -> None:
        phase = self._books.phase
        assert phase is not None
        if phase.weights_source is None:
            self.lose(replica, f"it holds weights of version {replica.version}, and BeginPhase.weights_source is None")
            return
        self._books.decide("load_weights", replica=replica)
        fields = {"version": phase.policy_version, "source": phase.weights_source}
        self._outbox.send(messages.LoadWeights, replica, f"to load weights of version {phase.policy_version}", **fields)

    def note_weights(self, event: messages.WeightsLoaded, replica: ReplicaRecord) -> None:
        phase = self._books.phase
        source = None if phase is None else phase.weights_source
        checksum = self._checksums.setdefault((source, event.version), event.checksum)
        if phase is None or event.version != phase.policy_version or event.checksum != checksum:
            self.lose(replica, f"it loaded version {event.version} with checksum {event.checksum}, not {checksum}")
        replica.version, replica.source = event.version, source

    def check_deadlines(self) -> None:
        limit = f"within {self._outbox.timeout_s:g} s"
        while self._books.failed is None and (late := self._outbox.overdue()):
            if isinstance(late.who, str):
                self._books.fail(f"{late.who} was waited for {late.what}, and did not {limit}")
            else:
                self.lose(late.who, f"it was waited for {late.what}, and did not {limit}")
        for replica in list(self._books.replicas.values()):
            if replica.assigned and self._outbox.now - replica.last_heard > self._outbox.timeout_s:
                self.lose(replica, f"it has {len(replica.assigned)} sequences, and reported no step {limit}")

    def lose(self, replica: ReplicaRecord, reason: str) -> None:
        """Drops a replica outside the world, whose sequences go on from their last known states; else the run fails."""
        if not replica.outside:
            self._books.fail(f"{replica} of the torchrun world is lost: {reason}")
            return
        self._books.decide("drop", replica.assigned, replica, reason)
        for sequence in sorted(replica.assigned.values(), key=lambda sequence: sequence.index):
            replica.give_up(sequence)
            sequence.take_back(sequence.state, sequence.kv)
            self._books.send_on(sequence)
        self._books.remove_replica(replica)
        self._outbox.forget(replica)
        self._outbox.tell(ReplicaDropped(replica_id=replica.spec.id, reason=reason))
