"""Sequences called back from their replicas: to move, to make way for a regroup, or to end. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from engines.control import messages
from engines.coordination.books import Books
from engines.coordination.outbox import Outbox
from engines.coordination.records import ReplicaRecord, SequenceRecord
from engines.coordination.requests import RequestMove, RequestRefused
from engines.sequence import SequenceId


class Recall:
    """Sends the commands; what the replicas answer goes to the books."""

    def __init__(self, books: Books, outbox: Outbox) -> None:
        self._books = books
        self._outbox = outbox

    def move(self, request: RequestMove) -> None:
        books = self._books
        target = None if request.replica_id is None else books.replicas.get(request.replica_id)
        if request.replica_id is not None and (target is None or target.spec.role != "rollout"):
            raise RequestRefused(f"RequestMove.replica_id={request.replica_id}: is no rollout replica; choose another")
        sequence = books.find(request.sequence_id, "RequestMove")
        if sequence is None or sequence.aborting:
            return
        books.decide("move", [sequence.id], target)
        replica = sequence.replica
        if replica is None:
            books.unqueue(sequence)
            books.pin(sequence, target)
            books.wait(sequence)
        elif replica is target and sequence.pause_seq < 0:
            books.pin(sequence, None)
        else:
            books.pin(sequence, target)
            if sequence.pause_seq < 0:
                self.pause(replica, request.with_kv, only=sequence)

    def pause(self, replica: ReplicaRecord, with_kv: bool, only: SequenceRecord | None = None) -> None:
        """Takes all sequences off a replica, or only one."""
        fields = {"sequence_ids": None if only is None else (only.id,), "with_kv": with_kv}
        seq = self._outbox.send(messages.PauseSequences, replica, "to pause sequences", **fields)
        for sequence in replica.assigned.values() if only is None else [only]:
            if sequence.pause_seq < 0:
                sequence.pause_seq = seq

    def abort(self, sequence_ids: Iterable[SequenceId]) -> None:
        running: dict[ReplicaRecord, list[SequenceId]] = {}
        for sequence in [self._books.find(id_, "RequestAbort") for id_ in dict.fromkeys(sequence_ids)]:
            if sequence is None or sequence.aborting:
                continue
            sequence.aborting = True
            if sequence.replica is None:
                self._books.decide("abort", [sequence.id])
                self._books.send_on(sequence)
            else:
                running.setdefault(sequence.replica, []).append(sequence.id)
        for replica, ids in running.items():
            self._books.decide("abort", ids, replica)
            self._outbox.send(messages.AbortSequences, replica, "to abort sequences", sequence_ids=tuple(ids))
