"""Drives the core: passes the transport's notices to it, and sends the commands that it returns. Torch-free.

In a torchrun world this runs on rank 0, and the loss of a rank ends the run. Replicas outside the world are added by
`add_replica`; the loss of one is reported to the core, which goes on without it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import signal
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engines.control import messages
from engines.control.ends import Lost, Notice, Received, Woken
from engines.control.transport import Server
from engines.coordination import requests
from engines.coordination.core import RolloutCore
from engines.coordination.requests import Request, RequestRefused, Result
from engines.parallel.layout import Layout, ReplicaSpec
from engines.rollout.telemetry import Mark, TurnSpan, turn_spans
from engines.rollout.turns import Turns
from engines.sequence import Finished, KVPart, SequenceState

POLL_S = 0.02
"""Longest time that a posted request waits, and shortest time between two checks of the deadlines."""
AWAY_S = 1.0
"""A longer time between two events means that this process itself was away: it was stopped, or its caller was busy."""
_MAY_COME_LATE = (requests.RequestMove, requests.RequestAbort, requests.RequestRegroup)


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A process that has ended."""

    replica_id: int
    code: int
    """Negative: the signal that killed it."""
    log_tail: str

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        tail = self.log_tail.strip()
        return f"its process {how}" + (f"; its last output:\n{tail}" if tail else "; it printed nothing")


class Launcher(Protocol):
    """What started the replicas outside the world; `ReplicaLauncher` is one."""

    def kill(self, replica_id: int) -> None: ...

    def poll(self) -> list[Exit]: ...


class Coordinator:
    """Owns the core and the `Server`. Other threads may call only `post`, `add_replica` and `stop`."""

    def __init__(
        self,
        core: RolloutCore,
        server: Server,
        *,
        num_ranks: int,
        timeout_s: float,
        drop_kv: Callable[[KVPart], None],
        launcher: Launcher | None = None,
        check_state: Callable[[SequenceState], object] = lambda _: None,
    ) -> None:
        """`num_ranks` is the torchrun world's; 0 when all replicas are outside. `drop_kv`: see `KVStore.drop`.

        `check_state` raises ValueError for a sequence that could never run, as a replica's refusal would end the run.
        """
        self.core = core
        self._server = server
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._drop_kv = drop_kv
        self._launcher = launcher
        self._check_state = check_state
        self.outside: dict[int, ReplicaSpec] = {}
        """Replicas outside the world, by id, that were added and not lost."""
        self.standing_by: set[int] = set()
        """Ids of the replicas in `outside` that have announced themselves."""
        self.lost: list[str] = []
        """The lost replicas outside the world, each with the reason."""
        self.refused: list[str] = []
        """Errors of posted moves, aborts and regroups that were not possible any more when they were processed, and of
        all requests but `AddReplica` that were still posted when a rollout was abandoned."""
        self._ticked = self._taken = time.monotonic()
        self._absences: list[tuple[float, float]] = []
        """Per absence: the core's time at its end, and the total seconds of all absences up to it."""
        self._posted: queue.SimpleQueue[Request | messages.ReplicaLost] = queue.SimpleQueue()
        self._outputs: deque[messages.Command | Result] = deque()
        """Outputs of the core that are not processed yet: an error in one must not lose the others."""
        self._stopped = False
        self._is_running = False
        self._is_abandoned = False
        self._failure: str | None = None
        """The error that ended the last rollout."""
        self._on_finished: Callable[[Finished], None] | None = None
        self._turns: Turns | None = None
        self._finished: list[Finished] = []
        self._complete = False
        self._began = 0.0
        """The core's time at the last rollout's start."""

    def post(self, request: Request | messages.ReplicaLost) -> None:
        """Queues a request to the core while a rollout runs: a move, an abort, a regroup, more sequences; or, at any
        time, that a replica which was added is lost.

        A move, an abort or a regroup may not be possible any more when it is processed: see `refused`.
        """
        self._posted.put(request)
        self._server.wake()

    def add_replica(self, spec: ReplicaSpec) -> None:
        """Adds a replica outside the world that was launched; it takes part once it has joined and has the weights."""
        self.post(requests.AddReplica(spec=spec))

    def stop(self) -> None:
        """Makes a running `roll_out` raise, because rank 0, for which it waits, does not go on."""
        self._stopped = True

    def wait_for_ranks(self) -> None:
        """Returns when every rank has joined. After `timeout_s`, raises RuntimeError that names the missing ranks."""
        deadline = time.monotonic() + self._timeout_s
        while missing := sorted(set(map(peer_of, range(self._num_ranks))) - set(self._server.peers())):
            if time.monotonic() > deadline:
                raise RuntimeError(f"coordinator: {', '.join(missing)} did not join within {self._timeout_s:g} s")
            notice = self._server.receive(POLL_S)
            if isinstance(notice, Received):
                self._take(messages.decode_event(notice.payload))

    def roll_out(
        self,
        states: Iterable[SequenceState],
        *,
        phase: int,
        policy_version: int,
        weights_source: str | None = None,
        on_finished: Callable[[Finished], None] | None = None,
        turns: Turns | None = None,
    ) -> list[Finished]:
        """Completes the sequences on the present replicas; returns them in the order in which they ended.

        `turns` answers between the turns of trajectories, and is needed where there are any.

        `weights_source` is the folder from which replicas outside the world load `policy_version`. `on_finished` is
        called for each sequence when it ends. Raises ValueError, before anything has begun, for repeated sequences or
        those that `check_state` refuses, and RuntimeError that names the awaited replica, or what failed and where.

        Outside the torchrun world, any error (of `on_finished`, of a policy, an interrupt) first ends the phase: the
        sequences are aborted, so that the replicas are ready for the next rollout.
        """
        if self.core.failed is not None:
            raise RuntimeError(f"coordinator: has failed before ({self.core.failed}); start anew")
        if self._is_running:
            raise RuntimeError("coordinator: a rollout is running; start the next one after it, not in on_finished")
        states = tuple(states)
        self._check(states, turns)
        self._is_running = True
        self._failure = None
        try:
            self._end_abandoned()  # if a second interrupt has left a phase open
            self._on_finished, self._finished, self._complete = on_finished, [], False
            self._turns = turns
            if turns is not None:
                turns.wake = self._server.wake
            self.pump(0.0)  # events since the last phase
            self._began = self._now()
            self._take(requests.BeginPhase(phase=phase, policy_version=policy_version, weights_source=weights_source))
            self._take(requests.SubmitSequences(states=states))
            return self._run()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            if not self._num_ranks:
                self._abandon(error)
            raise
        finally:
            self._is_running = False
            self._on_finished = self._turns = None
            if turns is not None:
                turns.close()

    def _check(self, states: Iterable[SequenceState], turns: Turns | None) -> None:
        for index, state in enumerate(states):
            if state.in_turns and turns is None:
                raise ValueError(f"states[{index}]: is a trajectory (in_turns), and nothing answers it; give turns")
            if state.in_turns and state.observed:
                raise ValueError(f"states[{index}]: is a trajectory that has begun elsewhere; submit it anew")
            try:
                self._check_state(state)
            except ValueError as error:
                raise ValueError(f"states[{index}]: {error}") from None
        repeated = [id_ for id_, count in Counter(state.sequence_id for state in states).items() if count > 1]
        if repeated:
            raise ValueError(f"states: sequence {repeated[0]} comes more than once; give each its own key")

    def _run(self) -> list[Finished]:
        ended = False
        while not self._complete:
            if self._stopped:
                raise RuntimeError("coordinator: was stopped, since rank 0 does not go on")
            self._take_turns()
            self._take_posted()  # also what `on_finished` has just posted
            if not ended and self.core.num_unfinished == 0 and not self.core.regrouping and not self._num_open:
                ended = True
                self._take(requests.RequestEndPhase())
                continue
            self.pump(POLL_S)
        return self._finished

    @property
    def _num_open(self) -> int:
        return 0 if self._turns is None else self._turns.num_open

    def _take_turns(self) -> None:
        if self._turns is None:
            return
        if predictions := self._turns.take_predictions():
            self._take(predictions)
        is_running = self.core.num_unfinished > self.core.num_parked
        if answers := self._turns.take(is_running=is_running):
            self._take(requests.AnswerTurns(answers=answers))
        for finished in self._turns.take_finished():
            self._deliver(finished)

    def _deliver(self, finished: Finished) -> None:
        self._finished.append(finished)
        if self._on_finished is not None:
            self._on_finished(finished)

    def _abandon(self, error: BaseException) -> None:
        """Aborts the open phase's sequences and ends the phase. A problem with that is added to `error` as a note."""
        self._on_finished = None
        self._is_abandoned = True
        try:
            self._end_abandoned()
        except Exception as problem:
            error.add_note(f"and its phase could not be ended: {problem}")

    def _end_abandoned(self) -> None:
        if self.core.failed is None and self.core.phase is not None and not self.core.ending:
            self._take(requests.RequestEndPhase(abort=True))
        while self.core.failed is None and self.core.phase is not None:
            self.pump(POLL_S)
        self._is_abandoned = False

    def pump(self, timeout_s: float) -> None:
        """Processes posted requests and notices, the first awaited for `timeout_s` seconds; then checks the deadlines.

        With replicas outside the world it must be called between phases, too, as they join or are lost at any time.
        """
        self._take_posted()
        notice = self._server.receive(timeout_s)
        while notice is not None:
            self._on_notice(notice)
            self._take_posted()
            notice = self._server.receive(0.0)
        if time.monotonic() - self._ticked > POLL_S:
            # After all received notices: an answer that is already in the inbox is not late.
            for exit_ in self._launcher.poll() if self._launcher is not None else []:
                if exit_.replica_id in self.outside:
                    self._lose(self.outside[exit_.replica_id], str(exit_))
            self._ticked = time.monotonic()
            self._take(requests.Tick())

    def _now(self) -> float:
        """Returns the core's time. This clock stops while this process is away, so that no replica counts as late."""
        now = time.monotonic()
        away_s = self._absences[-1][1] if self._absences else 0.0
        if now - self._taken > AWAY_S:
            away_s += now - self._taken - 1e-6  # slightly less, so that the times before and after differ
            self._absences.append((now - away_s, away_s))
        self._taken = now
        return now - away_s

    def monotonic_time(self, now: float) -> float:
        """Returns the time of `time.monotonic` at which the core's time was `now`."""
        index = bisect_right(self._absences, (now, math.inf))
        return now + (self._absences[index - 1][1] if index else 0.0)

    def assume(self, layout: Layout) -> None:
        """Takes over a layout in which the world's ranks take their places by themselves; only between two phases."""
        self._take(requests.AssumeLayout(layout=layout))

    def shut_down(self) -> None:
        """Sends all processes the command to end; only between two phases."""
        self._take(requests.RequestShutdown())

    def marks(self) -> list[Mark]:
        """Returns the last rollout's decisions, for a timeline; without dispatches, which the steps show."""
        latest = itertools.takewhile(lambda one: one.now >= self._began, reversed(self.core.decisions))
        return [
            Mark(name=one.action, time=self.monotonic_time(one.now), replica_id=one.replica_id, detail=one.detail)
            for one in reversed(list(latest))
            if one.action != "dispatch"
        ]

    def turn_spans(self) -> list[TurnSpan]:
        """Returns where the trajectories of the last rollout were, and when."""
        return turn_spans(self.core.passages, self.monotonic_time, self.core.waits)

    def close(self) -> None:
        """Ends the connections. Peers that still listen get the error that ended the last rollout, if one did."""
        if self._failure is None:
            self._server.close()
        else:
            self._server.close(f"the coordinator has failed: {self._failure}")

    def _take_posted(self) -> None:
        while not self._posted.empty():
            request = self._posted.get()
            if isinstance(request, requests.AddReplica):
                self.outside[request.spec.id] = request.spec
            elif self._is_abandoned and not isinstance(request, messages.ReplicaLost):
                self.refused.append(f"{type(request).__name__}: its rollout was abandoned")
                continue
            try:
                if isinstance(request, requests.SubmitSequences):
                    self._check(request.states, self._turns)
                self._take(request)
            except RequestRefused as error:
                if not isinstance(request, _MAY_COME_LATE):
                    raise
                self.refused.append(str(error))

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Woken):
            return
        spec = next((spec for spec in self.outside.values() if peer_of(spec.ranks[0]) == notice.peer), None)
        if isinstance(notice, Received):
            try:
                event = messages.decode_event(notice.payload)
            except messages.ProtocolError as error:
                if spec is None:
                    raise
                self._lose(spec, str(error))
                return
            if isinstance(event, messages.ReplicaReady) and event.replica_id in self.outside:
                self.standing_by.add(event.replica_id)
            elif isinstance(event, messages.ReplicaReady) and event.rank >= self._num_ranks:
                self._end(event.replica_id, event.rank)  # it was dropped before it came
            self._take(event)
        elif isinstance(notice, Lost) and spec is not None:
            self._lose(spec, f"its control connection ended: {notice.reason}")
        elif isinstance(notice, Lost) and notice.peer in map(peer_of, range(self._num_ranks)):
            raise RuntimeError(f"coordinator: {notice.peer} is lost: {notice.reason}")

    def _lose(self, spec: ReplicaSpec, reason: str) -> None:
        self._take(messages.ReplicaLost.of(spec.id, spec.ranks[0], reason))

    def _drop(self, dropped: requests.ReplicaDropped) -> None:
        """Ends the process of a replica outside the world that the core has dropped; if it was borrowed, the loan."""
        spec = self.outside.pop(dropped.replica_id)
        self.standing_by.discard(spec.id)
        self.lost.append(f"replica {spec.id} (rank {spec.ranks[0]}): {dropped.reason}")
        if self._launcher is not None:
            self._launcher.kill(spec.id)
        self._end(spec.id, spec.ranks[0])

    def _end(self, replica_id: int | None, rank: int) -> None:
        end = messages.Shutdown(replica_id=replica_id, rank=rank, phase=-1, epoch=0, seq=-1)
        with contextlib.suppress(ConnectionError):  # it has left
            self._server.send(peer_of(rank), messages.encode(end))

    def _take(self, event: Request | messages.Event) -> None:
        self._outputs.extend(self.core.on_event(event, self._now()))
        if isinstance(event, requests.SubmitSequences) and self._turns is not None:
            for state in event.states:
                if state.in_turns and not state.observed:
                    self._turns.begin(state)
        while self._outputs:
            match output := self._outputs.popleft():
                case requests.Deliver() if output.finished.state.in_turns and self._turns is not None:
                    self._turns.end(output.finished)
                case requests.Deliver():
                    self._deliver(output.finished)
                case requests.TurnEnded():
                    assert self._turns is not None
                    self._turns.step(output.state, output.text)
                case requests.DiscardKV():
                    for part in output.kv.parts:
                        self._drop_kv(part)
                case requests.PhaseComplete():
                    self._complete = True
                case requests.ReplicaDropped():
                    self._drop(output)
                case requests.Failed():
                    lost = "".join(f"\n  lost before: {one}" for one in self.lost)
                    raise RuntimeError(f"coordinator: {output.reason}{lost}")
                case _ if isinstance(output, messages.Command):
                    self._server.send(peer_of(output.rank), messages.encode(output))


def peer_of(rank: int) -> str:
    """The peer name of a rank, in the world or outside."""
    return f"rank-{rank}"
