"""The coordinator's logic as a pure state machine: events in, commands out. Torch-free.

It has no clock, socket, thread or tensor: a live coordinator and the simulator run the same object. Its input is a
`Request` of the caller or an `Event` of a replica; its output is a list of `Command`s to replicas and `Result`s for the
caller. The same events at the same times give the same output.

    sequence   submitted -> waiting -> assigned -> delivered
                              ^           |  released, paused (move, regroup), replica lost
                              +-----------+
    trajectory submitted -> parked -> waiting -> assigned -> parked (its turn has ended) -> waiting ... -> delivered
    replica    formed or launched -> ready -> (weights loaded) -> accepts -> closed -> gone
    regroup    pause changed replicas -> all paused: Regroup -> new replicas ready: resume
    phase      begun -> ending -> nothing unfinished: EndPhase -> all acknowledged: complete

Each sequence is delivered exactly once: only its present replica's events count, channels keep their order, and each
replica's events are numbered. A `SequenceState` in an output is also the core's own record: a transport must copy it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from engines.control import messages
from engines.control.messages import Command, Event
from engines.coordination import requests
from engines.coordination.attendance import Attendance
from engines.coordination.books import Books
from engines.coordination.dispatcher import Dispatcher
from engines.coordination.outbox import Outbox
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.coordination.records import PhaseRecord, ReplicaRecord
from engines.coordination.regroup import Regrouper, check_ranks
from engines.coordination.requests import Request, RequestRefused, Result
from engines.coordination.views import Decision, Passage, Wait
from engines.parallel.layout import Layout

# Events about sequences that count only within their own phase. Answers are checked against what is awaited.
_OF_THE_PHASE = (
    messages.StepReported,
    messages.SequencesFinished,
    messages.SequencesReleased,
    messages.WorkRejected,
)
_ASK_LAYOUT = (messages.StepReported, messages.SequencesFinished)


class RolloutCore:
    """Decides which replica runs which sequence; see the module. Callers change it only by `on_event`.

    Each event takes the same path: it is checked here, it changes the books, and the steps that it makes possible (a
    regroup, dispatches, the phase's end) put commands and results in the outbox, whose content is returned.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        world_size: int,
        schedule_policy: SchedulePolicy,
        layout_policy: LayoutPolicy | None = None,
        check_layout: Callable[[Layout, Layout, int], None] | None = None,
        keeps_kv: Callable[[Layout, Layout], bool] = lambda before, after: False,
        timeout_s: float = 60.0,
    ) -> None:
        """`layout` is that of the torchrun world, which has `world_size` ranks (0: no world, replicas are only added).

        `check_layout(before, after, longest)` raises ValueError, before any command is sent, for a layout that the
        world cannot have after the present one, as where no replica holds `longest` tokens: the most that an unfinished
        sequence may have, or more than the model's context.
        `keeps_kv(before, after)` returns whether the ranks can exchange the KV in their caches in that regroup; else it
        is stored and loaded. `timeout_s` is the longest wait for an answer, and for an event of a replica that has
        sequences.
        """
        check_ranks(layout, world_size)
        self._outbox = Outbox(timeout_s)
        self._books = Books(self._outbox, layout, world_size)
        self._attendance = Attendance(self._books, self._outbox)
        self._dispatcher = Dispatcher(self._books, self._outbox, schedule_policy)
        self._regrouper = Regrouper(
            self._books,
            self._outbox,
            self._dispatcher,
            policy=layout_policy,
            check_layout=check_layout,
            keeps_kv=keeps_kv,
        )
        self.decisions: deque[Decision] = self._books.decisions
        """The latest decisions."""
        self.ignored: Counter[str] = self._books.ignored
        """Events without effect, by reason."""
        self._shut_down = False

    @property
    def layout(self) -> Layout:
        return self._books.layout

    @property
    def phase(self) -> int | None:
        """Number of the open phase; None if none is open."""
        return None if self._books.phase is None else self._books.phase.number

    @property
    def ending(self) -> bool:
        """Whether the end of the open phase was requested: no more sequences may be submitted."""
        return self._books.phase is not None and self._books.phase.is_ending

    @property
    def failed(self) -> str | None:
        """Why the run cannot go on."""
        return self._books.failed

    @property
    def regrouping(self) -> bool:
        """Whether a regroup is under way."""
        return self._regrouper.under_way is not None

    @property
    def layout_error(self) -> str | None:
        """Why the layout policy's last layout was refused, which has aborted this phase, or the last one."""
        return self._regrouper.layout_error

    @property
    def passages(self) -> list[Passage]:
        """Where the trajectories of the open phase, or of the last one, have been."""
        return self._books.passages

    @property
    def waits(self) -> list[Wait]:
        """What they have waited for, and what was done for them meanwhile."""
        return self._books.waits

    @property
    def num_unfinished(self) -> int:
        """Sequences submitted and not delivered."""
        return len(self._books.sequences)

    @property
    def num_parked(self) -> int:
        """Unfinished trajectories between two turns."""
        return len(self._books.parked)

    @property
    def num_waiting(self) -> int:
        """Unfinished sequences that wait for any replica."""
        return len(self._books.waiting)

    def check_integrity(self) -> None:
        """Asserts the books' invariants; linear in the number of sequences."""
        self._books.check_integrity()

    def on_event(self, event: Request | Event, now: float) -> list[Command | Result]:
        """Processes one event at time `now` (seconds, any clock that does not go back); returns commands and results.

        Raises RequestRefused for a request that does not fit the state, which is then unchanged. Raises RuntimeError
        for an invalid answer of a policy, and passes on what a policy raises: the event has then taken
        effect, and the output so far is returned by the next call. An invalid layout of the layout policy ends the
        phase; see `layout_error`. Replicas' events never raise: those without effect are counted in `ignored`.
        """
        if self.failed is not None or self._shut_down:
            self.ignored["the core has failed or is shut down"] += 1
            return []
        self._outbox.now = now
        if isinstance(event, Request):
            self._on_request(event)
        elif isinstance(event, messages.ReplicaLost) or event.replica_id is None:
            self._on_unnumbered(event)
        else:
            self._on_numbered(event)
        if self.failed is None and not self._shut_down:
            self._advance(asks_layout=isinstance(event, _ASK_LAYOUT))
        return self._outbox.drain()

    # --- Requests

    def _on_request(self, request: Request) -> None:
        match request:
            case requests.BeginPhase():
                self._begin_phase(request)
            case requests.SubmitSequences():
                self._submit(request)
            case requests.RequestMove():
                self._require_phase(request)
                self._dispatcher.move(request)
            case requests.AnswerTurns():
                self._require_phase(request)
                self._dispatcher.answer(request.answers)
            case requests.NotePredictions():
                for answer in request.answers:
                    self._books.note_prediction(answer, request.source)
            case requests.RequestAbort():
                self._require_phase(request)
                self._dispatcher.abort(request.sequence_ids)
            case requests.RequestRegroup():
                self._require_phase(request)
                self._regrouper.begin(request.layout, request.with_kv, request.places)
            case requests.AssumeLayout():
                if self.phase is not None:
                    raise RequestRefused(f"AssumeLayout: phase {self.phase} is open; send RequestRegroup")
                self._regrouper.assume(request.layout)
            case requests.RequestEndPhase():
                self._request_end(request)
            case requests.AddReplica():
                self._regrouper.check_id(request.spec.id)
                self._attendance.add(request.spec)
            case requests.RequestShutdown():
                self._shutdown()
            case requests.Tick():
                self._attendance.check_deadlines()

    def _require_phase(self, request: Request) -> PhaseRecord:
        phase = self._books.phase
        if phase is None or phase.is_ending:
            raise RequestRefused(f"{type(request).__name__}: no phase is open; send BeginPhase first")
        return phase

    def _begin_phase(self, request: requests.BeginPhase) -> None:
        if self.phase is not None or request.phase <= self._outbox.phase:
            raise RequestRefused(
                f"BeginPhase.phase={request.phase}: open is {self.phase}, the last was {self._outbox.phase}; "
                "end a phase before the next, and count up"
            )
        replicas = self._books.replicas.values()
        stale = [
            r for r in replicas if r.outside and r.ready and not r.holds(request.policy_version, request.weights_source)
        ]
        if stale and request.weights_source is None:
            raise RequestRefused(
                f"BeginPhase.weights_source=None: {stale[0]} holds version {stale[0].version}, not "
                f"{request.policy_version}; name a source to load from"
            )
        self._outbox.phase = request.phase
        self._regrouper.layout_error = None
        for replica in replicas:
            if not replica.outside:
                replica.version = request.policy_version
            if replica.ready is None:
                self._outbox.wait_for(replica.ready_key, replica, "to be ready")
        self._books.begin_phase(
            PhaseRecord(
                number=request.phase, policy_version=request.policy_version, weights_source=request.weights_source
            )
        )
        for replica in stale:
            self._attendance.load_weights(replica)

    def _submit(self, request: requests.SubmitSequences) -> None:
        self._require_phase(request)
        ids = set()
        for state in request.states:
            id_ = state.sequence_id
            if id_ in self._books.sequences or id_ in self._books.delivered or id_ in ids:
                raise RequestRefused(f"SubmitSequences: sequence {id_} is there already; give each its own key")
            if state.num_response_tokens >= state.params.most_tokens:
                raise RequestRefused(f"SubmitSequences: sequence {id_} has its max_tokens={state.params.max_tokens}")
            ids.add(id_)
        for state in request.states:
            self._books.submit(state)

    def _request_end(self, request: requests.RequestEndPhase) -> None:
        phase = self._require_phase(request)
        if self.num_unfinished and not request.abort:
            raise RequestRefused(
                f"RequestEndPhase: {self.num_unfinished} sequences are unfinished; wait for them, or use abort=True"
            )
        self._dispatcher.abort(list(self._books.sequences))
        phase.is_ending = True

    def _shutdown(self) -> None:
        if self.phase is not None:
            raise RequestRefused(f"RequestShutdown: phase {self.phase} is open; end it first")
        self._send_all(messages.Shutdown)
        self._shut_down = True

    def _send_all(self, kind: Callable[..., Command], awaits: str = "") -> list[int]:
        """Sends the command to every replica's leader and to every idle rank; returns the commands' `seq`s."""
        books = self._books
        replicas = [r for r in books.replicas.values() if r.ready is not None or not r.outside]
        seqs = [self._outbox.send(kind, replica, awaits) for replica in replicas]
        return seqs + [self._outbox.send_idle(kind, rank, self.layout.epoch, awaits) for rank in books.idle_ranks()]

    # --- Events of replicas

    def _on_unnumbered(self, event: Event) -> None:
        """Handles the loss of a process, or an event of an idle rank."""
        if not isinstance(event, messages.ReplicaLost):
            is_idle = isinstance(event, messages.RankIdle)
            key = ("idle", event.rank, event.epoch) if is_idle else getattr(event, "acks", None)
            if not self._outbox.answered(key, None):
                self.ignored["an answer that nobody waits for"] += 1
        elif event.replica_id is None:
            self._books.fail(f"rank {event.rank} (idle) is lost: {event.reason}")
        elif replica := self._present(event):
            self._attendance.lose(replica, event.reason)

    def _present(self, event: Event) -> ReplicaRecord | None:
        replica = None if event.replica_id is None else self._books.replicas.get(event.replica_id)
        if replica is None or replica.epoch != event.epoch:
            self.ignored["from a replica that is gone"] += 1
            return None
        return replica

    def _on_numbered(self, event: Event) -> None:
        replica = self._present(event)
        if replica is None:
            return
        if event.seq < replica.num_events:
            self.ignored["repeated"] += 1
            return
        if event.seq > replica.num_events:
            self._attendance.lose(replica, f"its event {replica.num_events} is missing, {event.seq} came")
            return
        replica.num_events += 1
        replica.last_heard = self._outbox.now
        acks = getattr(event, "acks", None)
        if isinstance(event, _OF_THE_PHASE) and event.phase != self.phase:
            self.ignored["from another phase"] += 1
        elif acks is not None and not self._outbox.answered(acks, replica):
            self.ignored["an answer that nobody waits for"] += 1
        else:
            self._books.touch(replica)
            self._on_news(event, replica)

    def _on_news(self, event: Event, replica: ReplicaRecord) -> None:
        books = self._books
        match event:
            case messages.ReplicaReady():
                self._attendance.announce(event, replica)
            case messages.StepReported():
                books.note_progress(event, replica)
            case messages.SequencesFinished() | messages.SequencesAborted():
                for finished in event.finished:
                    if sequence := books.find_assigned(finished.state.sequence_id, replica):
                        books.deliver(sequence, finished)
            case messages.SequencesReleased():
                books.take_back(event.works, replica)
            case messages.SequencesPaused():
                books.take_back(event.works, replica)
                if kept := [s for s in replica.assigned.values() if s.pause_seq == event.acks]:
                    self._attendance.lose(replica, f"it paused and kept sequence {kept[0].id}")
            case messages.WorkRejected():
                books.fail(f"{replica} refused sequence {event.sequence_id}: {event.reason}")
            case messages.WeightsLoaded():
                self._attendance.note_weights(event, replica)

    # --- What follows

    def _advance(self, *, asks_layout: bool) -> None:
        """Takes every step that an event has made possible."""
        if asks_layout:
            self._regrouper.consider()
        self._regrouper.advance()
        self._dispatcher.dispatch()
        phase = self._books.phase
        if phase is not None and phase.is_ending and not self.num_unfinished and not self.regrouping:
            self._advance_end(phase)
        nobody_is_left = self.num_unfinished and not self._books.replicas
        self._wait_while(nobody_is_left, "anybody", "the launcher", "to add a replica, as none is left")
        self._watch_policy()

    def _advance_end(self, phase: PhaseRecord) -> None:
        if not phase.end_seqs:
            self._books.decide("end_phase")
            phase.end_seqs = self._send_all(messages.EndPhase, "to end the phase")
        if not any(seq in self._outbox.awaited for seq in phase.end_seqs):
            self._outbox.tell(requests.PhaseComplete(phase=phase.number))
            self._books.phase = None

    def _watch_policy(self) -> None:
        """Sets a deadline for the schedule policy while sequences wait, no replica has any and no answer is awaited."""
        books = self._books
        is_idle = books.waiting and not any(r.assigned for r in books.replicas.values())
        is_stuck = is_idle and not self._outbox.awaited.keys() - {"dispatch"}
        self._wait_while(is_stuck, "dispatch", "the schedule policy", "to dispatch a sequence, as none runs")

    def _wait_while(self, condition: object, key: str, who: str, what: str) -> None:
        if condition:
            self._outbox.wait_for(key, who, what)
        else:
            self._outbox.awaited.pop(key, None)
