"""The coordinator's logic as a pure state machine: events in, commands out. Torch-free.

No clock, socket, thread or tensor: a live coordinator and the simulator run this same object. What comes in is a
`Request` of the caller or an `Event` of a replica; what goes out is a `Command` to a replica or a `Result` to the
caller. The same events at the same times give the same output.

    sequence   submitted -> waiting -> assigned -> delivered
                              ^           |  released, paused (move, regroup), replica lost
                              +-----------+
    replica    formed or launched -> ready -> (weights loaded) -> accepts -> closed -> gone
    regroup    pause what changes -> all paused: Regroup -> all new ones ready: resume
    phase      begun -> ending -> nothing unfinished: EndPhase -> all acknowledged: complete

A sequence is delivered once, whatever happens: events count only from the replica that has it now, channels keep their
order, and each replica's events are numbered. A state handed out is the core's record too: a transport must copy it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engines.control import messages
from engines.control.messages import Command, Event
from engines.coordination.books import Books
from engines.coordination.dispatcher import Dispatcher
from engines.coordination.outbox import Outbox
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.coordination.records import ReplicaRecord, SequenceRecord
from engines.coordination.requests import (
    AddReplica,
    BeginPhase,
    Deliver,
    DiscardKV,
    Failed,
    PhaseComplete,
    RegroupComplete,
    ReplicaDropped,
    Request,
    RequestAbort,
    RequestEndPhase,
    RequestMove,
    RequestRefused,
    RequestRegroup,
    RequestShutdown,
    Result,
    SubmitSequences,
    Tick,
)
from engines.coordination.views import Decision, LayoutView
from engines.parallel.layout import Layout
from engines.sequence import Finished, SequenceId, Work

# Events about sequences: only those of this phase count. Answers are checked by what is awaited.
_OF_THE_PHASE = (
    messages.StepReported,
    messages.SequencesFinished,
    messages.SequencesReleased,
    messages.WorkRejected,
)


@dataclass(kw_only=True)
class _Regrouping:
    """A regroup under way."""

    layout: Layout
    leaving: list[ReplicaRecord]
    coming: list[ReplicaRecord]
    ordered: bool = False
    """Whether `Regroup` was sent: all that leave have paused."""
    idle: list[tuple[str, int, int]] = field(default_factory=list)
    """What is awaited of ranks that will be idle: without it a command to one could overtake its relayed `Regroup`."""


class RolloutCore:
    """Decides who runs what; see the module. `on_event` is all there is to call; the rest is for reading."""

    def __init__(
        self,
        *,
        layout: Layout,
        world_size: int,
        schedule_policy: SchedulePolicy,
        layout_policy: LayoutPolicy | None = None,
        check_layout: Callable[[Layout], None] | None = None,
        regroup_with_kv: bool = True,
        timeout_s: float = 60.0,
        max_decisions: int = 100_000,
    ) -> None:
        """`layout` is of the torchrun world of `world_size` ranks (0: none; replicas are then added).

        `check_layout` raises ValueError for a layout that the world cannot have, before any replica hears of it.

        `regroup_with_kv` is for the layout policy's regroups. `timeout_s` is the longest wait for an answer, and the
        longest silence of a replica that has work. The last `max_decisions` decisions are kept.
        """
        self.layout = layout
        self.phase: int | None = None
        self.failed: str | None = None
        self.layout_error: str | None = None
        """Why the layout policy's last layout cannot be had: it has aborted this phase, or the last one."""
        self.ignored: Counter[str] = Counter()
        """Events without effect, by reason."""
        self.decisions: deque[Decision] = deque(maxlen=max_decisions)
        self._world_size = world_size
        self._check_ranks(layout)
        self._layout_policy = layout_policy
        self._check_layout = check_layout
        self._regroup_with_kv = regroup_with_kv
        self._outbox = Outbox(timeout_s)
        self._books = Books()
        self._dispatcher = Dispatcher(self._books, self._outbox, schedule_policy, self._decide)
        for spec in layout.replicas:
            self._books.add_replica(ReplicaRecord(spec=spec, epoch=layout.epoch, outside=False))
        self._outside_ids: set[int] = set()
        self._weights_source: str | None = None
        self._checksums: dict[int, int] = {}
        self._regrouping: _Regrouping | None = None
        self._ending = False
        self._end_seqs: list[int] = []
        self._shut_down = False

    @property
    def regrouping(self) -> bool:
        """Whether a regroup is under way."""
        return self._regrouping is not None

    @property
    def ending(self) -> bool:
        """Whether the open phase is to end: no more sequences may come."""
        return self._ending

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted and not delivered."""
        return len(self._books.sequences)

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for any replica."""
        return len(self._books.waiting)

    def check_integrity(self) -> None:
        """Asserts the books' invariants; linear in the number of sequences."""
        self._books.check_integrity()

    def on_event(self, event: Request | Event, now: float) -> list[Command | Result]:
        """Takes one event at time `now` (seconds, any clock that does not go back); returns what to send and to tell.

        Raises RequestRefused for a request that does not fit the state, which is then unchanged. An invalid decision
        of the schedule policy is a RuntimeError, and what a policy raises goes through: the event has counted then, and
        what was decided before goes out with the next one. An invalid one of the layout policy ends the phase, see
        `layout_error`. Events of replicas never raise: those without effect are counted in `ignored`.
        """
        if self.failed is not None or self._shut_down:
            self._ignore("the core has failed or is shut down")
            return []
        self._outbox.now = now
        if isinstance(event, Request):
            self._on_request(event)
        elif isinstance(event, messages.ReplicaLost) or event.replica_id is None:
            self._on_unnumbered(event)
        else:
            self._on_numbered(event)
        self._advance(asks_layout=isinstance(event, messages.StepReported | messages.SequencesFinished))
        return self._outbox.drain()

    # --- Requests

    def _on_request(self, request: Request) -> None:
        match request:
            case BeginPhase():
                self._begin_phase(request)
            case SubmitSequences():
                self._submit(request)
            case RequestMove():
                self._move(request)
            case RequestAbort():
                self._require_open("RequestAbort")
                self._abort(request.sequence_ids)
            case RequestRegroup():
                self._require_open("RequestRegroup")
                self._regroup(request.layout, request.with_kv)
            case RequestEndPhase():
                self._request_end(request)
            case AddReplica():
                self._add_replica(request)
            case RequestShutdown():
                self._shutdown()
            case Tick():
                self._check_deadlines()

    def _require_open(self, what: str) -> None:
        if self.phase is None or self._ending:
            raise RequestRefused(f"{what}: no phase is open; send BeginPhase first")

    def _begin_phase(self, request: BeginPhase) -> None:
        if self.phase is not None or request.phase <= self._outbox.phase:
            raise RequestRefused(
                f"BeginPhase.phase={request.phase}: open is {self.phase}, the last was {self._outbox.phase}; "
                "end a phase before the next, and count up"
            )
        replicas = self._books.replicas.values()
        stale = [r for r in replicas if r.outside and r.ready and r.version != request.policy_version]
        if stale and request.weights_source is None:
            raise RequestRefused(
                f"BeginPhase.weights_source=None: {stale[0]} holds version {stale[0].version}, not "
                f"{request.policy_version}; name a source to load from"
            )
        self.phase = self._outbox.phase = request.phase
        self._weights_source = request.weights_source
        self.layout_error = None
        for replica in replicas:
            if not replica.outside:
                replica.version = request.policy_version
            if replica.ready is None:
                self._await_ready(replica)
        self._books.begin_phase(request.policy_version)
        for replica in stale:
            self._load_weights(replica)

    def _submit(self, request: SubmitSequences) -> None:
        self._require_open("SubmitSequences")
        ids = set()
        for state in request.states:
            id_ = state.sequence_id
            if id_ in self._books.sequences or id_ in self._books.delivered or id_ in ids:
                raise RequestRefused(f"SubmitSequences: sequence {id_} is there already; give each its own key")
            if state.num_generated >= state.params.max_tokens:
                raise RequestRefused(f"SubmitSequences: sequence {id_} has its max_tokens={state.params.max_tokens}")
            ids.add(id_)
        for state in request.states:
            self._books.submit(state)

    def _move(self, request: RequestMove) -> None:
        self._require_open("RequestMove")
        target = None if request.replica_id is None else self._books.replicas.get(request.replica_id)
        if request.replica_id is not None and (target is None or target.spec.role != "rollout"):
            raise RequestRefused(f"RequestMove.replica_id={request.replica_id}: is no rollout replica; choose another")
        sequence = self._known(request.sequence_id, "RequestMove")
        if sequence is None or sequence.aborting:
            return
        self._decide("move", [sequence.id], target)
        replica = sequence.replica
        if replica is None:
            self._books.unqueue(sequence)
            self._books.pin(sequence, target)
            self._books.wait(sequence)
        elif replica is target and sequence.pause_seq < 0:
            self._books.pin(sequence, None)
        else:
            self._books.pin(sequence, target)
            if sequence.pause_seq < 0:
                self._pause(replica, [sequence], (sequence.id,), request.with_kv)

    def _pause(
        self,
        replica: ReplicaRecord,
        sequences: Iterable[SequenceRecord],
        sequence_ids: tuple[SequenceId, ...] | None,
        with_kv: bool,
    ) -> None:
        fields = {"sequence_ids": sequence_ids, "with_kv": with_kv}
        seq = self._outbox.send(messages.PauseSequences, replica, "to pause sequences", **fields)
        for sequence in sequences:
            if sequence.pause_seq < 0:
                sequence.pause_seq = seq

    def _abort(self, sequence_ids: Iterable[SequenceId]) -> None:
        running: dict[ReplicaRecord, list[SequenceId]] = {}
        for sequence in [self._known(id_, "RequestAbort") for id_ in dict.fromkeys(sequence_ids)]:
            if sequence is None or sequence.aborting:
                continue
            sequence.aborting = True
            if sequence.replica is None:
                self._decide("abort", [sequence.id])
                self._return(sequence)
            else:
                running.setdefault(sequence.replica, []).append(sequence.id)
        for replica, ids in running.items():
            self._decide("abort", ids, replica)
            self._outbox.send(messages.AbortSequences, replica, "to abort sequences", sequence_ids=tuple(ids))

    def _known(self, sequence_id: SequenceId, what: str) -> SequenceRecord | None:
        """The unfinished sequence; None (counted) when it is delivered. Raises RequestRefused when never submitted."""
        if sequence_id in self._books.delivered:
            self._ignore("a request for a delivered sequence")
            return None
        if sequence_id not in self._books.sequences:
            raise RequestRefused(f"{what}: sequence {sequence_id} was not submitted in phase {self.phase}")
        return self._books.sequences[sequence_id]

    def _add_replica(self, request: AddReplica) -> None:
        spec = request.spec
        if spec.id in self._books.replicas or spec.id in self._outside_ids:
            raise RequestRefused(f"AddReplica.spec.id={spec.id}: was used before; take an id that no replica has had")
        taken = {rank for replica in self._books.replicas.values() for rank in replica.spec.ranks}
        if min(spec.ranks) < self._world_size or taken & set(spec.ranks):
            raise RequestRefused(f"AddReplica.spec.ranks={spec.ranks}: taken; number them from {self._world_size} on")
        if self._regrouping and spec.id in {other.id for other in self._regrouping.layout.replicas}:
            raise RequestRefused(f"AddReplica.spec.id={spec.id}: is in the layout to come; take another")
        self._outside_ids.add(spec.id)
        replica = ReplicaRecord(spec=spec, epoch=0, outside=True)
        self._books.add_replica(replica)
        self._await_ready(replica)

    def _shutdown(self) -> None:
        if self.phase is not None:
            raise RequestRefused(f"RequestShutdown: phase {self.phase} is open; end it first")
        self._send_all(messages.Shutdown)
        self._shut_down = True

    def _request_end(self, request: RequestEndPhase) -> None:
        self._require_open("RequestEndPhase")
        if self.num_unfinished and not request.abort:
            raise RequestRefused(
                f"RequestEndPhase: {self.num_unfinished} sequences are unfinished; wait for them, or use abort=True"
            )
        self._abort(list(self._books.sequences))
        self._ending = True

    def _send_all(self, kind: Callable[..., Command], awaits: str = "", **fields: object) -> list[int]:
        """To every replica's leader, and to every idle rank singly."""
        replicas = [r for r in self._books.replicas.values() if r.ready is not None or not r.outside]
        seqs = [self._outbox.send(kind, replica, awaits, **fields) for replica in replicas]
        return seqs + self._send_idle(kind, awaits, **fields)

    def _send_idle(self, kind: Callable[..., Command], awaits: str = "", **fields: object) -> list[int]:
        epoch = self.layout.epoch
        return [self._outbox.send_idle(kind, rank, epoch, awaits, **fields) for rank in self._idle_ranks()]

    def _idle_ranks(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self.layout.replica_of(rank) is None]

    # --- Events of replicas

    def _on_unnumbered(self, event: Event) -> None:
        """A loss, or what an idle rank says."""
        if not isinstance(event, messages.ReplicaLost):
            key = (
                ("idle", event.rank, event.epoch)
                if isinstance(event, messages.RankIdle)
                else getattr(event, "acks", None)
            )
            if not self._outbox.answered(key, None):
                self._ignore("an answer that nobody waits for")
        elif event.replica_id is None:
            self._fail(f"rank {event.rank} (idle) is lost: {event.reason}")
        elif replica := self._present(event):
            self._lose(replica, event.reason)

    def _present(self, event: Event) -> ReplicaRecord | None:
        replica = None if event.replica_id is None else self._books.replicas.get(event.replica_id)
        if replica is None or replica.epoch != event.epoch:
            self._ignore("from a replica that is gone")
            return None
        return replica

    def _on_numbered(self, event: Event) -> None:
        replica = self._present(event)
        if replica is None:
            return
        if event.seq < replica.num_events:
            self._ignore("repeated")
            return
        if event.seq > replica.num_events:
            self._lose(replica, f"its event {replica.num_events} is missing, {event.seq} came")
            return
        replica.num_events += 1
        replica.last_heard = self._outbox.now
        acks = getattr(event, "acks", None)
        if isinstance(event, _OF_THE_PHASE) and event.phase != self.phase:
            self._ignore("from another phase")
        elif acks is not None and not self._outbox.answered(acks, replica):
            self._ignore("an answer that nobody waits for")
        else:
            self._books.touch(replica)
            self._on_news(event, replica)

    def _on_news(self, event: Event, replica: ReplicaRecord) -> None:
        match event:
            case messages.ReplicaReady():
                self._on_ready(event, replica)
            case messages.StepReported():
                replica.report = event
                for sequence_id, num_new_tokens in event.progress:
                    if sequence := self._assigned(sequence_id, replica):
                        replica.progress(sequence, num_new_tokens)
            case messages.SequencesFinished() | messages.SequencesAborted():
                for finished in event.finished:
                    if sequence := self._assigned(finished.state.sequence_id, replica):
                        self._deliver(sequence, finished)
            case messages.SequencesReleased():
                self._take_back(event.works, replica)
            case messages.SequencesPaused():
                self._take_back(event.works, replica)
                if kept := [s for s in replica.assigned.values() if s.pause_seq == event.acks]:
                    self._lose(replica, f"it paused and kept sequence {kept[0].id}")
            case messages.WorkRejected():
                self._fail(f"{replica} refused sequence {event.sequence_id}: {event.reason}")
            case messages.WeightsLoaded():
                self._on_weights(event, replica)

    def _assigned(self, sequence_id: SequenceId, replica: ReplicaRecord) -> SequenceRecord | None:
        sequence = replica.assigned.get(sequence_id)
        if sequence is None:
            self._ignore("about a sequence that is not there")
        return sequence

    def _take_back(self, works: Iterable[Work], replica: ReplicaRecord) -> None:
        for work in works:
            if sequence := self._assigned(work.state.sequence_id, replica):
                replica.give_up(sequence)
                sequence.take_back(work.state, work.kv)
                self._return(sequence)

    def _return(self, sequence: SequenceRecord) -> None:
        """Sends a sequence that is on no replica on its way: to wait, or to its end."""
        if not sequence.aborting:
            self._books.wait(sequence)
            return
        if sequence.kv is not None:
            self._outbox.tell(DiscardKV(kv=sequence.kv))
        self._deliver(sequence, sequence.aborted())

    def _deliver(self, sequence: SequenceRecord, finished: Finished) -> None:
        self._books.deliver(sequence, finished)
        self._outbox.tell(Deliver(finished=finished))

    def _on_ready(self, event: messages.ReplicaReady, replica: ReplicaRecord) -> None:
        replica.ready = event
        self._outbox.answered(("ready", replica.spec.id, replica.epoch), replica)
        version = self._books.policy_version
        if replica.outside:
            replica.version = event.policy_version
            if self.phase is not None and not self._end_seqs and replica.version != version:
                self._load_weights(replica)
        elif self._regrouping and replica in self._regrouping.coming and event.policy_version != version:
            self._fail(f"{replica} holds weights of version {event.policy_version} after a regroup, not {version}")

    def _load_weights(self, replica: ReplicaRecord) -> None:
        version = self._books.policy_version
        if self._weights_source is None:
            self._lose(replica, f"it holds weights of version {replica.version}, and BeginPhase.weights_source is None")
            return
        self._decide("load_weights", replica=replica)
        fields = {"version": version, "source": self._weights_source}
        self._outbox.send(messages.LoadWeights, replica, f"to load weights of version {version}", **fields)

    def _on_weights(self, event: messages.WeightsLoaded, replica: ReplicaRecord) -> None:
        checksum = self._checksums.setdefault(event.version, event.checksum)
        if event.version != self._books.policy_version or event.checksum != checksum:
            self._lose(replica, f"it loaded version {event.version} with checksum {event.checksum}, not {checksum}")
        replica.version = event.version

    # --- Faults

    def _await_ready(self, replica: ReplicaRecord) -> None:
        self._outbox.wait_for(("ready", replica.spec.id, replica.epoch), replica, str(replica), "to be ready")

    def _check_deadlines(self) -> None:
        limit = f"within {self._outbox.timeout_s:g} s"
        while self.failed is None and (late := self._outbox.overdue()):
            if late.replica is None:
                self._fail(f"{late.who} was waited for {late.what}, and did not {limit}")
            else:
                self._lose(late.replica, f"it was waited for {late.what}, and did not {limit}")
        for replica in list(self._books.replicas.values()):
            if replica.assigned and self._outbox.now - replica.last_heard > self._outbox.timeout_s:
                self._lose(replica, f"it has {len(replica.assigned)} sequences, and reported no step {limit}")

    def _lose(self, replica: ReplicaRecord, reason: str) -> None:
        """Goes on without a replica outside the world, from what is known of its sequences; else fails."""
        if not replica.outside:
            self._fail(f"{replica} of the torchrun world is lost: {reason}")
            return
        self._decide("drop", replica.assigned, replica, reason)
        sequences = sorted(replica.assigned.values(), key=lambda sequence: sequence.index)
        for sequence in sequences:
            replica.give_up(sequence)
            if sequence.kv is not None:
                self._outbox.tell(DiscardKV(kv=sequence.kv))
            sequence.take_back(sequence.state, None)
            self._return(sequence)
        self._books.remove_replica(replica)
        self._outbox.forget(replica)
        self._outbox.tell(ReplicaDropped(replica_id=replica.spec.id, reason=reason))

    def _fail(self, reason: str) -> None:
        if self.failed is None:
            self._decide("fail", detail=reason)
            self.failed = reason
            self._outbox.tell(Failed(reason=reason))

    def _ignore(self, reason: str) -> None:
        self.ignored[reason] += 1

    # --- What follows

    def _advance(self, *, asks_layout: bool) -> None:
        """Takes every step that an event has made possible."""
        if self.failed is not None or self._shut_down:
            return
        can_regroup = self.phase is not None and not (self._ending or self.regrouping or self.layout_error)
        if asks_layout and self._layout_policy and can_regroup:
            self._ask_layout(self._layout_policy)
        self._advance_regroup()
        self._dispatcher.dispatch(self.layout)
        if self._ending and not self.num_unfinished:
            self._advance_end()
        if self.num_unfinished and not self._books.replicas:
            self._outbox.wait_for("anybody", None, "the launcher", "to add a replica, as none is left")
        else:
            self._outbox.awaited.pop("anybody", None)
        self._watch_policy()

    def _watch_policy(self) -> None:
        """Waits for the schedule policy while nothing else can happen: sequences wait, no replica has or owes any."""
        others = self._outbox.awaited.keys() - {"dispatch"}
        if self._books.waiting and not others and not any(r.assigned for r in self._books.replicas.values()):
            self._outbox.wait_for("dispatch", None, "the schedule policy", "to dispatch a sequence, as none runs")
        else:
            self._outbox.awaited.pop("dispatch", None)

    def _advance_end(self) -> None:
        if self.regrouping:
            return
        if not self._end_seqs:
            self._decide("end_phase")
            self._end_seqs = self._send_all(messages.EndPhase, "to end the phase")
        if not any(seq in self._outbox.awaited for seq in self._end_seqs):
            assert self.phase is not None
            self._outbox.tell(PhaseComplete(phase=self.phase))
            self.phase = self._books.policy_version = None
            self._end_seqs = []
            self._ending = False

    # --- Regroup

    def _ask_layout(self, policy: LayoutPolicy) -> None:
        view = LayoutView(
            now=self._outbox.now,
            layout=self.layout,
            num_waiting=self.num_waiting,
            num_unfinished=self.num_unfinished,
            num_delivered=len(self._books.delivered),
            replicas=self._books.views(),
        )
        if (layout := policy.decide(view)) is None:
            return
        try:
            self._regroup(layout, self._regroup_with_kv)
        except RequestRefused as error:
            self.layout_error = f"layout_policy: gave a layout that cannot be had: {error}"
            self._decide("refuse_layout", detail=self.layout_error)
            self._abort(list(self._books.sequences))

    def _check_ranks(self, layout: Layout) -> None:
        if any(rank >= self._world_size for spec in layout.replicas for rank in spec.ranks):
            raise ValueError(f"{layout}: has a rank outside the world; use those below {self._world_size}")

    def _regroup(self, layout: Layout, with_kv: bool) -> None:
        if self._regrouping:
            epoch = self._regrouping.layout.epoch
            raise RequestRefused(f"regroup to epoch {layout.epoch}: one to {epoch} is under way")
        if layout.epoch != self.layout.epoch + 1:
            raise RequestRefused(f"Layout.epoch={layout.epoch}: the next is {self.layout.epoch + 1}")
        try:
            self._check_ranks(layout)
            if self._check_layout is not None:
                self._check_layout(layout)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        if clash := {spec.id for spec in layout.replicas} & self._outside_ids:
            raise RequestRefused(f"Layout.replicas: ids {sorted(clash)} are of replicas outside the world; take others")
        old, new = set(self.layout.replicas), set(layout.replicas)
        leaving = [replica for replica in self._books.replicas.values() if replica.spec in old - new]
        coming = [
            ReplicaRecord(spec=spec, epoch=layout.epoch, outside=False, closed=True)
            for spec in layout.replicas
            if spec not in old
        ]
        self._decide("regroup", detail=f"epoch {layout.epoch}: {layout.replicas}")
        self._regrouping = _Regrouping(layout=layout, leaving=leaving, coming=coming)
        for replica in leaving:
            replica.closed = True
            self._books.touch(replica)
            self._pause(replica, replica.assigned.values(), None, with_kv)

    def _advance_regroup(self) -> None:
        """Orders the regroup when all that leave are empty and quiet; ends it when all that come are ready."""
        regrouping = self._regrouping
        if regrouping is None:
            return
        if not regrouping.ordered and not any(map(self._outbox.is_awaited_of, regrouping.leaving)):
            regrouping.ordered = True
            for replica in regrouping.leaving:
                self._outbox.send(messages.Regroup, replica, layout=regrouping.layout)
                self._books.remove_replica(replica)
            self._send_idle(messages.Regroup, layout=regrouping.layout)
            self.layout = regrouping.layout
            for replica in regrouping.coming:
                replica.version = self._books.policy_version
                self._books.add_replica(replica)
                self._await_ready(replica)
            regrouping.idle = [("idle", rank, self.layout.epoch) for rank in self._idle_ranks()]
            for key in regrouping.idle:
                self._outbox.wait_for(key, None, f"rank {key[1]}", "to be idle after a regroup")
        is_quiet = not any(key in self._outbox.awaited for key in regrouping.idle)
        if regrouping.ordered and is_quiet and all(replica.ready for replica in regrouping.coming):
            for replica in regrouping.coming:
                replica.closed = False
                self._books.touch(replica)
            self._regrouping = None
            self._decide("resume", detail=f"epoch {self.layout.epoch}")
            self._outbox.tell(RegroupComplete(layout=self.layout))

    def _decide(
        self,
        action: str,
        sequence_ids: Iterable[SequenceId] = (),
        replica: ReplicaRecord | None = None,
        detail: str = "",
    ) -> None:
        self.decisions.append(
            Decision(
                now=self._outbox.now,
                action=action,
                sequence_ids=tuple(sequence_ids),
                replica_id=None if replica is None else replica.spec.id,
                detail=detail,
                num_waiting=self.num_waiting,
                num_unfinished=self.num_unfinished,
                replicas=tuple(self._books.views().values()),
            )
        )
