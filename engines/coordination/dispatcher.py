"""Dispatches sequences to replicas as the schedule policy decides; moves, pauses and aborts them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engines.control import messages
from engines.coordination.books import Books
from engines.coordination.outbox import Outbox
from engines.coordination.policies import PrefetchingPolicy, SchedulePolicy, mistake, named
from engines.coordination.records import ReplicaRecord, SequenceRecord
from engines.coordination.requests import (
    ContinueTurn,
    DiscardKV,
    EndTrajectory,
    RequestMove,
    RequestRefused,
)
from engines.coordination.views import Dispatch, Prefetch, ScheduleView, num_reserved_tokens
from engines.sequence import SequenceId, Work


class Dispatcher:
    """Sends the commands about sequences; the replicas' answers are processed by `RolloutCore` and `Books`."""

    def __init__(self, books: Books, outbox: Outbox, policy: SchedulePolicy) -> None:
        self._books = books
        self._outbox = outbox
        self._policy = policy
        self._prefetching = policy if isinstance(policy, PrefetchingPolicy) else None
        self._ended = books.list_ended()

    def dispatch(self) -> None:
        """Dispatches all that can run now, with one command per replica: first pinned sequences, which no policy sees.

        If the policy raises, the sequences that were dispatched before are still sent.
        """
        batches: dict[ReplicaRecord, list[Work]] = {}
        try:
            self._assign_all(batches)
        finally:
            for replica, works in batches.items():
                self._outbox.send(messages.SubmitWork, replica, works=tuple(works))

    def _view(self) -> ScheduleView:
        ended = tuple(self._ended)
        self._ended.clear()
        return ScheduleView(
            now=self._outbox.now,
            layout=self._books.layout,
            waiting=self._books.waiting,
            entered=self._books.take_entered(),
            ended=ended,
            replicas=self._books.views(),
            parked=self._books.parked_views,
            changed=self._books.take_news(),
        )

    def _prefetch_all(self, policy: PrefetchingPolicy) -> None:
        """Lets replicas read the KV of parked trajectories, as the policy decides."""
        while self._books.parked:
            try:
                prefetch = policy.prefetch(self._view())
            except Exception as error:
                raise mistake(policy, "prefetch", error) from error
            if prefetch is None:
                break
            sequence, replica = self._check_prefetch(prefetch)
            self._books.decide("prefetch", [sequence.id], replica)
            self._expect(sequence, replica)

    def _expect(self, sequence: SequenceRecord, replica: ReplicaRecord) -> None:
        """Lets the replica read the KV of a parked trajectory, beside its tool."""
        self._books.expect(sequence, replica)
        if sequence.kv is not None:
            work = Work(state=sequence.state, kv=sequence.kv)
            self._outbox.send(messages.ExpectSequences, replica, works=(work,))

    def _accepts(self, replica: ReplicaRecord) -> bool:
        return self._books.views()[replica.spec.id].accepts

    def _check_prefetch(self, prefetch: Prefetch) -> tuple[SequenceRecord, ReplicaRecord]:
        if not isinstance(prefetch, Prefetch):
            raise self._refusal(prefetch, "is no Prefetch and not None")
        sequence = self._books.parked.get(prefetch.sequence_id)
        if sequence is None:
            raise self._refusal(prefetch, "the sequence is not parked; only in a tool gap may a trajectory be moved")
        replica = self._books.replicas.get(prefetch.replica_id)
        if replica is None or not self._accepts(replica):
            raise self._refusal(prefetch, "there is no such replica that accepts sequences")
        if not self._can_hold(replica, sequence):
            raise self._refusal(prefetch, self._too_small(replica, sequence))
        if sequence.expected_at is replica:
            raise self._refusal(prefetch, f"{replica} reads its KV already")
        return sequence, replica

    def _assign_all(self, batches: dict[ReplicaRecord, list[Work]]) -> None:
        for replica in self._books.replicas.values():
            while replica.pinned_waiting:
                sequence = next(iter(replica.pinned_waiting.values()))
                if replica.ready and not self._can_hold(replica, sequence):
                    self._books.repin(sequence, None)  # it has grown, or nobody knew yet what the replica can hold
                    continue
                max_new_tokens = sequence.num_left_here
                if not self._has_room(replica, sequence, max_new_tokens):
                    break
                self._assign(sequence, replica, max_new_tokens, batches)
        if self._prefetching is not None:
            self._prefetch_all(self._prefetching)
        while self._books.waiting:
            try:
                dispatch = self._policy.next(self._view())
            except Exception as error:
                raise mistake(self._policy, "next", error) from error
            if dispatch is None:
                break
            sequence, replica = self._check_dispatch(dispatch)
            sequence.priority = dispatch.priority
            self._assign(sequence, replica, dispatch.max_new_tokens, batches)

    def _can_hold(self, replica: ReplicaRecord, sequence: SequenceRecord) -> bool:
        return sequence.num_tokens <= self._books.views()[replica.spec.id].num_kv_tokens

    def _too_small(self, replica: ReplicaRecord, sequence: SequenceRecord) -> str:
        held = self._books.views()[replica.spec.id].num_kv_tokens
        return f"the sequence has {sequence.num_tokens} tokens, and the KV cache of {replica} holds {held}"

    def _has_room(self, replica: ReplicaRecord, sequence: SequenceRecord, max_new_tokens: int | None) -> bool:
        num_ahead = max_new_tokens or replica.block_size
        num_tokens = num_reserved_tokens(sequence.num_tokens, sequence.max_len, num_ahead)
        return self._books.views()[replica.spec.id].has_room(num_tokens)

    def _check_dispatch(self, dispatch: Dispatch) -> tuple[SequenceRecord, ReplicaRecord]:
        if not isinstance(dispatch, Dispatch):
            raise self._refusal(dispatch, "is no Dispatch and not None")
        if dispatch.sequence_id not in self._books.waiting:
            raise self._refusal(dispatch, "the sequence is not waiting")
        sequence = self._books.sequences[dispatch.sequence_id]
        replica = self._books.replicas.get(dispatch.replica_id)
        if replica is None or not self._accepts(replica):
            raise self._refusal(dispatch, "there is no such replica that accepts sequences")
        if not self._can_hold(replica, sequence):
            raise self._refusal(dispatch, self._too_small(replica, sequence))
        bound = dispatch.max_new_tokens
        if bound is not None and (type(bound) is not int or bound < 1):
            raise self._refusal(dispatch, "max_new_tokens must be at least 1 and an integer, or None")
        if not -math.inf < dispatch.priority < math.inf:
            raise self._refusal(dispatch, "priority must be a finite number")
        if not dispatch.queued and not self._has_room(replica, sequence, dispatch.max_new_tokens):
            raise self._refusal(dispatch, f"{replica} has no room for it")
        return sequence, replica

    def _refusal(self, dispatch: object, why: str) -> RuntimeError:
        """Returns the error to raise. Its text is made only here, since every dispatch is checked."""
        return RuntimeError(f"schedule policy {named(self._policy)}: {dispatch!r}: {why}")

    def _assign(
        self,
        sequence: SequenceRecord,
        replica: ReplicaRecord,
        max_new_tokens: int | None,
        batches: dict[ReplicaRecord, list[Work]],
    ) -> None:
        self._books.decide("dispatch", [sequence.id], replica)
        self._books.assign(sequence, replica, max_new_tokens)
        if sequence.kv is not None and replica.ready is not None and not replica.ready.reads_kv:
            self._outbox.tell(DiscardKV(kv=sequence.kv))
            sequence.kv = None
        work = Work(state=sequence.state, max_new_tokens=max_new_tokens, kv=sequence.kv, priority=sequence.priority)
        batches.setdefault(replica, []).append(work)

    # --- Back from replicas

    def move(self, request: RequestMove) -> None:
        books = self._books
        target = None if request.replica_id is None else books.replicas.get(request.replica_id)
        if request.replica_id is not None and (target is None or target.spec.role != "rollout"):
            raise RequestRefused(f"RequestMove.replica_id={request.replica_id}: is no rollout replica; choose another")
        sequence = books.find(request.sequence_id, "RequestMove")
        if sequence is None or sequence.aborting:
            return
        if target is not None and target.ready and not self._can_hold(target, sequence):
            raise RequestRefused(f"RequestMove.replica_id={request.replica_id}: {self._too_small(target, sequence)}")
        books.decide("move", [sequence.id], target)
        replica = sequence.replica
        if replica is None:
            books.repin(sequence, target)
            if sequence.is_parked and target is not None and request.with_kv and self._accepts(target):
                self._expect(sequence, target)
        elif replica is target and sequence.pause_seq < 0:
            books.pin(sequence, None)
        else:
            books.pin(sequence, target)
            if sequence.pause_seq < 0:
                self.pause(replica, request.with_kv, only=sequence)

    def pause(
        self,
        replica: ReplicaRecord,
        with_kv: bool,
        only: SequenceRecord | None = None,
        keeping: tuple[SequenceId, ...] = (),
    ) -> None:
        """Pauses all sequences of a replica, or only one; they come back with the replica's answer. `keeping`: see
        `PauseSequences`."""
        fields = {"sequence_ids": None if only is None else (only.id,), "with_kv": with_kv, "keeping": keeping}
        seq = self._outbox.send(messages.PauseSequences, replica, "to pause sequences", **fields)
        for sequence in replica.assigned.values() if only is None else [only]:
            if sequence.pause_seq < 0:
                sequence.pause_seq = seq

    def answer(self, answers: Iterable[ContinueTurn | EndTrajectory]) -> None:
        """Lets parked trajectories go on, or ends them. Raises RequestRefused, before any does, for an unknown one."""
        books = self._books
        found = [(books.find(answer.sequence_id, type(answer).__name__), answer) for answer in answers]
        for sequence, answer in found:
            if sequence is None:
                continue
            if not sequence.is_parked or answer.turn != len(sequence.state.observed):
                books.ignored["an answer to a turn that is over"] += 1
            elif isinstance(answer, EndTrajectory):
                if answer.observation:
                    books.observe(sequence, answer.observation)
                books.end(sequence, answer.reason, answer.text)
            else:
                books.observe(sequence, answer.observation)
                books.wait(sequence)

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
