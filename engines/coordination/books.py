"""The core's state: the phase, the layout, the replicas, and where each unfinished sequence is. Torch-free.

The time of an operation on one sequence does not grow with the number of waiting sequences.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from engines.control.messages import ExpectSequences, StepReported
from engines.coordination.outbox import Outbox
from engines.coordination.records import PhaseRecord, ReplicaRecord, SequenceRecord
from engines.coordination.requests import (
    Deliver,
    DiscardKV,
    Failed,
    PredictedLength,
    RequestRefused,
    TurnEnded,
)
from engines.coordination.views import (
    Decision,
    EndedView,
    Passage,
    Place,
    Prediction,
    ReplicaView,
    SequenceView,
    Wait,
)
from engines.parallel.layout import Layout
from engines.sequence import Finished, FinishReason, SequenceId, SequenceState, Work

MAX_DECISIONS = 100_000
"""Only the latest decisions are kept."""


class _Views(Mapping[SequenceId, SequenceView]):
    """A window on the records of sequences."""

    def __init__(self, records: Mapping[SequenceId, SequenceRecord]) -> None:
        self._records = records

    def __getitem__(self, sequence_id: SequenceId) -> SequenceView:
        return self._records[sequence_id].view()

    def __iter__(self) -> Iterator[SequenceId]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


class Books:
    """An unfinished sequence is in exactly one place: waiting for any replica, waiting for one, assigned to one, or
    parked: a trajectory between two turns, which no replica has and no policy dispatches.

    Results for the caller that follow from a change here go to the outbox.
    """

    def __init__(self, outbox: Outbox, layout: Layout, world_size: int) -> None:
        self._outbox = outbox
        self.layout = layout
        self.world_size = world_size
        self.phase: PhaseRecord | None = None
        self.failed: str | None = None
        self.ignored: Counter[str] = Counter()
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self.passages: list[Passage] = []
        """Of the trajectories of the phase."""
        self.waits: list[Wait] = []
        """Of the trajectories of the phase."""
        self.replicas: dict[int, ReplicaRecord] = {}
        self.forming: list[ReplicaRecord] = []
        """Replicas of the layout to come, while old ones are paused for it."""
        self.outside_ids: set[int] = set()
        """Ids of all replicas that were ever added outside the world."""
        self.sequences: dict[SequenceId, SequenceRecord] = {}
        """Sequences that were submitted and not yet delivered."""
        self.parked: dict[SequenceId, SequenceRecord] = {}
        """Trajectories that wait for an observation."""
        self.delivered: set[SequenceId] = set()
        # An OrderedDict: a plain dict whose first entries were removed gets slow at finding the next one.
        self._waiting: OrderedDict[SequenceId, SequenceView] = OrderedDict()
        self.waiting: Mapping[SequenceId, SequenceView] = MappingProxyType(self._waiting)
        """Sequences that wait for any replica."""
        self._entered: list[SequenceView] = []
        self._news: dict[SequenceId, None] = {}
        """Trajectories that have parked, or of which a predictor has said something, since a policy was last asked."""
        self._ended: list[list[EndedView]] = []
        self._views: dict[int, ReplicaView] = {}
        # A dict for its order: with a set, the order in which a policy sees replicas would depend on memory addresses.
        self._changed: dict[ReplicaRecord, None] = {}
        self._num_submitted = 0
        for spec in layout.replicas:
            self.add_replica(ReplicaRecord(spec=spec, epoch=layout.epoch, outside=False))

    def begin_phase(self, phase: PhaseRecord) -> None:
        self.phase = phase
        self._num_submitted = 0
        self.delivered.clear()
        self.passages, self.waits = [], []
        self._news.clear()
        self._changed.update(dict.fromkeys(self.replicas.values()))

    def fail(self, reason: str) -> None:
        """Notes that the run cannot go on, and reports it once."""
        if self.failed is None:
            self.decide("fail", detail=reason)
            self.failed = reason
            self._outbox.tell(Failed(reason=reason))

    # --- Sequences

    def submit(self, state: SequenceState) -> None:
        sequence = SequenceRecord(state=state, index=self._num_submitted, num_tokens=len(state.tokens))
        self._num_submitted += 1
        self.sequences[sequence.id] = sequence
        if state.in_turns and not state.observed:
            self.park(sequence)
        else:
            self.wait(sequence)

    def find(self, sequence_id: SequenceId, what: str) -> SequenceRecord | None:
        """Returns the unfinished sequence; None, counted, if delivered. Raises RequestRefused if not submitted."""
        if sequence_id in self.delivered:
            self.ignored["a request for a delivered sequence"] += 1
            return None
        if sequence_id not in self.sequences:
            raise RequestRefused(f"{what}: sequence {sequence_id} was not submitted in phase {self._outbox.phase}")
        return self.sequences[sequence_id]

    def find_assigned(self, sequence_id: SequenceId, replica: ReplicaRecord) -> SequenceRecord | None:
        """Returns the sequence if it is assigned to this replica; otherwise None, which is counted."""
        sequence = replica.assigned.get(sequence_id)
        if sequence is None:
            self.ignored["about a sequence that is not there"] += 1
        return sequence

    def _note(self, sequence: SequenceRecord, place: Place) -> None:
        replica_id = None if sequence.replica is None else sequence.replica.spec.id
        now = self._outbox.now
        self.passages.append(Passage(now=now, sequence_id=sequence.id, place=place, replica_id=replica_id))

    def wait(self, sequence: SequenceRecord) -> None:
        """Queues a sequence that is in no place: for the replica that it is pinned to, otherwise for any."""
        if sequence.state.in_turns:
            self._note(sequence, "waiting")
        if sequence.pin is not None:
            sequence.pin.pinned_waiting[sequence.id] = sequence
            return
        view = sequence.view()
        self._waiting[sequence.id] = view
        self._entered.append(view)

    def park(self, sequence: SequenceRecord) -> None:
        """Keeps a trajectory that is in no place until an observation comes."""
        self.parked[sequence.id] = sequence
        sequence.is_parked, sequence.parked_since = True, self._outbox.now
        self._news[sequence.id] = None
        self._note(sequence, "parked")

    def unqueue(self, sequence: SequenceRecord) -> None:
        """Takes a waiting or parked sequence out of its place."""
        self._waiting.pop(sequence.id, None)
        if sequence.is_parked:
            del self.parked[sequence.id]
            sequence.is_parked = False
        if sequence.pin is not None:
            sequence.pin.pinned_waiting.pop(sequence.id, None)

    def pin(self, sequence: SequenceRecord, replica: ReplicaRecord | None) -> None:
        """Pins a sequence that is in no queue."""
        if sequence.pin is not None:
            del sequence.pin.pins[sequence.id]
        sequence.pin = replica
        if replica is not None:
            replica.pins[sequence.id] = sequence

    def repin(self, sequence: SequenceRecord, replica: ReplicaRecord | None) -> None:
        """Pins a sequence that is on no replica; one that waits then waits for that replica, or for any."""
        if sequence.is_parked:
            self.pin(sequence, replica)
            return
        self.unqueue(sequence)
        self.pin(sequence, replica)
        self.wait(sequence)

    def observe(self, sequence: SequenceRecord, observation: Items[int]) -> None:
        """Takes a parked sequence out of its place, and adds what it has observed."""
        self.unqueue(sequence)
        sequence.state.observe(observation)
        sequence.num_tokens = len(sequence.state.tokens)

    def note_prediction(self, answer: PredictedLength, source: str) -> None:
        """Notes a predictor's answer, unless it is about an earlier turn than the last."""
        sequence = self.sequences.get(answer.sequence_id)
        if sequence is None or not max(sequence.num_turns, sequence.answered_turns) <= answer.num_turns:
            self.ignored["a prediction that comes too late"] += 1
            return
        sequence.answered_turns = answer.num_turns
        now, since = self._outbox.now, sequence.parked_since
        self.waits.append(Wait(sequence_id=sequence.id, kind="prediction", start=since, seconds=now - since))
        if 0 <= answer.remaining < math.inf:
            num_generated = sequence.state.num_generated
            sequence.prediction = Prediction(
                remaining=answer.remaining,
                num_generated=num_generated,
                num_turns=answer.num_turns,
                now=now,
                source=source,
            )
        else:
            self.ignored["a prediction that is no length"] += 1
        self._news[sequence.id] = None
        if sequence.id in self._waiting:
            self._waiting[sequence.id] = sequence.view()

    def expect(self, sequence: SequenceRecord, replica: ReplicaRecord | None) -> None:
        """Notes which replica reads the sequence's KV now; another one that did forgets it."""
        before = sequence.expected_at
        if before is not None:
            del before.expected[sequence.id]
            if before is not replica and sequence.kv is not None:
                self._outbox.send(ExpectSequences, before, works=(), dropped=(sequence.id,))
        sequence.expected_at = replica
        if replica is not None:
            replica.expected[sequence.id] = sequence

    def assign(self, sequence: SequenceRecord, replica: ReplicaRecord, max_new_tokens: int | None) -> None:
        if sequence.expected_at is not None:
            self.expect(sequence, replica)  # which the sequence itself now asks to go on
            del replica.expected[sequence.id]
            sequence.expected_at = None
        self.unqueue(sequence)
        self.pin(sequence, None)
        if not replica.assigned:
            replica.last_heard = self._outbox.now  # the deadline for its next event counts from here
        replica.assign(sequence, max_new_tokens)
        if sequence.state.in_turns:
            self._note(sequence, "assigned")
        self._changed[replica] = None

    def note_progress(self, report: StepReported, replica: ReplicaRecord) -> None:
        """Notes a replica's load and the new lengths of its sequences."""
        replica.report = report
        for sequence_id, num_new_tokens in report.progress:
            if sequence := self.find_assigned(sequence_id, replica):
                replica.progress(sequence, num_new_tokens)
        for sequence_id, kind, ago, seconds in report.waits:
            start = self._outbox.now - ago
            wait = Wait(sequence_id=sequence_id, kind=kind, start=start, seconds=seconds, replica_id=replica.spec.id)
            self.waits.append(wait)

    def take_back(self, works: Iterable[Work], replica: ReplicaRecord) -> None:
        """Takes sequences that a replica has released or paused; each waits again, or is delivered as aborted."""
        for work in works:
            if sequence := self.find_assigned(work.state.sequence_id, replica):
                replica.give_up(sequence)
                sequence.take_back(work.state, work.kv)
                if work.turn is None or sequence.aborting:
                    self.send_on(sequence)
                else:
                    self.park(sequence)
                    self._outbox.tell(TurnEnded(state=sequence.state, text=work.turn))

    def send_on(self, sequence: SequenceRecord) -> None:
        """Queues a sequence that is on no replica; delivers it if it is being aborted."""
        if sequence.aborting:
            self.end(sequence, "abort")
        else:
            self.wait(sequence)

    def end(self, sequence: SequenceRecord, reason: FinishReason, text: str = "") -> None:
        """Delivers a sequence that is on no replica."""
        if sequence.kv is not None:
            self._outbox.tell(DiscardKV(kv=sequence.kv))
        self.deliver(sequence, sequence.ended(reason, text))

    def deliver(self, sequence: SequenceRecord, finished: Finished) -> None:
        self.unqueue(sequence)
        self.pin(sequence, None)
        self.expect(sequence, None)
        if sequence.replica is not None:
            self._changed[sequence.replica] = None
            sequence.replica.give_up(sequence)
        if sequence.state.in_turns:
            self._note(sequence, "delivered")
        del self.sequences[sequence.id]
        self.delivered.add(sequence.id)
        state = finished.state
        view = EndedView(
            sequence_id=sequence.id,
            group_id=state.group_id,
            num_prompt_tokens=state.num_prompt_tokens,
            num_generated=state.num_generated,
            num_observed=state.num_observed,
            finish_reason=finished.completion.finish_reason,
        )
        for ended in self._ended:
            ended.append(view)
        self._outbox.tell(Deliver(finished=finished))

    # --- Replicas

    def add_replica(self, replica: ReplicaRecord) -> None:
        self.replicas[replica.spec.id] = replica
        self._changed[replica] = None

    def remove_replica(self, replica: ReplicaRecord) -> None:
        """Removes a replica that has no assigned sequences; sequences pinned to it may then go to any replica."""
        assert not replica.assigned, f"{replica} still has sequences"
        del self.replicas[replica.spec.id]
        for sequence in replica.expected.values():
            sequence.expected_at = None
        replica.expected.clear()
        self._views.pop(replica.spec.id, None)
        self._changed.pop(replica, None)
        for sequence in list(replica.pins.values()):
            if sequence.id in replica.pinned_waiting:
                self.repin(sequence, None)
            else:
                self.pin(sequence, None)

    def touch(self, replica: ReplicaRecord) -> None:
        """Marks the replica's view as out of date."""
        self._changed[replica] = None

    def idle_ranks(self) -> list[int]:
        """Ranks of the world that are in no replica of the layout."""
        return [rank for rank in range(self.world_size) if self.layout.replica_of(rank) is None]

    # --- What policies see, and what was decided

    def views(self) -> Mapping[int, ReplicaView]:
        phase = self.phase
        for replica in self._changed:
            is_open = replica.ready is not None and not replica.closed and replica.spec.role == "rollout"
            self._views[replica.spec.id] = replica.view(
                accepts=is_open and phase is not None and replica.holds(phase.policy_version, phase.weights_source)
            )
        self._changed.clear()
        return MappingProxyType(self._views)

    @property
    def unfinished(self) -> Mapping[SequenceId, SequenceView]:
        return _Views(self.sequences)

    @property
    def parked_views(self) -> Mapping[SequenceId, SequenceView]:
        return _Views(self.parked)

    def take_entered(self) -> tuple[SequenceView, ...]:
        """Returns the sequences that began to wait for any replica since the last call."""
        entered, self._entered = tuple(self._entered), []
        return entered

    def take_news(self) -> tuple[SequenceView, ...]:
        """Returns the trajectories that have parked, or of which a predictor has said something, since the last
        call."""
        if not self._news:
            return ()
        news, self._news = self._news, {}
        return tuple(self.sequences[id_].view() for id_ in news if id_ in self.sequences)

    def list_ended(self) -> list[EndedView]:
        """Returns a list of the caller's own, to which each sequence that ends from now on is appended."""
        self._ended.append([])
        return self._ended[-1]

    def decide(
        self, action: str, ids: Iterable[SequenceId] = (), replica: ReplicaRecord | None = None, detail: str = ""
    ) -> None:
        """Records a decision, with the load of all replicas at that time."""
        self.decisions.append(
            Decision(
                now=self._outbox.now,
                action=action,
                sequence_ids=tuple(ids),
                replica_id=None if replica is None else replica.spec.id,
                detail=detail,
                num_waiting=len(self._waiting),
                num_unfinished=len(self.sequences),
                replicas=tuple(self.views().values()),
            )
        )

    def check_integrity(self) -> None:
        """Asserts that every unfinished sequence is in exactly one place, and that the replicas' sums are right."""
        places = [*self._waiting, *self.parked]
        for replica in [*self.replicas.values(), *self.forming]:
            places += [*replica.assigned, *replica.pinned_waiting]
            assert all(sequence.replica is replica for sequence in replica.assigned.values())
            assert all(sequence.pin is replica for sequence in replica.pins.values())
            assert set(replica.pinned_waiting) <= set(replica.pins)
            assert all(one.expected_at is replica and one.replica is None for one in replica.expected.values())
            assert replica.num_tokens == sum(sequence.num_tokens for sequence in replica.assigned.values())
            assert replica.num_reserved_blocks == sum(sequence.num_blocks for sequence in replica.assigned.values())
            assert all(one.num_blocks == replica.num_blocks_for(one) for one in replica.assigned.values())
        assert len(places) == len(self.sequences), "a sequence is nowhere, or in two places"
        assert self.sequences.keys() == set(places), "a sequence is nowhere, or in two places"
        assert all(sequence.is_parked == (id_ in self.parked) for id_, sequence in self.sequences.items())
        assert self.delivered.isdisjoint(self.sequences), "a delivered sequence is still here"
