"""The thread that drives the core: notices of the transport in, commands out. On rank 0; torch-free."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable

from engines.control import messages
from engines.control.transport import Lost, Received, ServerEnd
from engines.rollout.core import RolloutCore
from engines.rollout.requests import (
    BeginPhase,
    Deliver,
    DiscardKV,
    Failed,
    PhaseComplete,
    Request,
    RequestEndPhase,
    SubmitSequences,
    Tick,
)
from engines.rollout.telemetry import Mark
from engines.sequence import Finished, KVHandle, SequenceState

POLL_S = 0.02
"""Longest that a posted request waits, and shortest time between two looks at the deadlines."""


class Coordinator:
    """Owns the core and the server's end. `roll_out` and `close` belong to one thread; `post` to any."""

    def __init__(
        self,
        core: RolloutCore,
        server: ServerEnd,
        *,
        num_ranks: int,
        timeout_s: float,
        discard_kv: Callable[[KVHandle], None] | None = None,
    ) -> None:
        self.core = core
        self._server = server
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._discard_kv = discard_kv
        self._posted: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._stopped = False
        self._on_finished: Callable[[Finished], None] | None = None
        self._finished: list[Finished] = []
        self._complete = False

    def post(self, request: Request) -> None:
        """Asks the core for something while a rollout runs: a move, an abort, a regroup."""
        self._posted.put(request)

    def stop(self) -> None:
        """Makes a running `roll_out` give up: the process that it waits for will not go on."""
        self._stopped = True

    def wait_for_ranks(self) -> None:
        """Returns when every rank has joined. Raises RuntimeError naming those that have not."""
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
        on_finished: Callable[[Finished], None] | None = None,
    ) -> list[Finished]:
        """Completes the sequences on the world's replicas; returns them in the order in which they ended.

        `on_finished` is called for each, as it comes. Raises RuntimeError naming who was waited for, or what went
        wrong where.
        """
        self._on_finished, self._finished, self._complete = on_finished, [], False
        self._take(BeginPhase(phase=phase, policy_version=policy_version))
        self._take(SubmitSequences(states=tuple(states)))
        ended = False
        ticked = time.monotonic()
        while not self._complete:
            if self._stopped:
                raise RuntimeError("coordinator: was stopped, since rank 0 does not go on")
            while not self._posted.empty():
                self._take(self._posted.get())
            if not ended and self.core.num_unfinished == 0 and not self.core.regrouping:
                ended = True
                self._take(RequestEndPhase())
                continue
            notice = self._server.receive(POLL_S)
            if isinstance(notice, Received):
                self._take(messages.decode_event(notice.payload))
            elif isinstance(notice, Lost):
                raise RuntimeError(f"coordinator: {notice.peer} is lost: {notice.reason}")
            if time.monotonic() - ticked > POLL_S:
                ticked = time.monotonic()
                self._take(Tick())
        return self._finished

    def marks(self) -> list[Mark]:
        """What was decided so far, for a timeline; dispatches are left out, since steps show them."""
        return [
            Mark(name=one.action, time=one.now, replica_id=one.replica_id, detail=one.detail)
            for one in self.core.decisions
            if one.action != "dispatch"
        ]

    def close(self) -> None:
        self._server.close()

    def _take(self, event: Request | messages.Event) -> None:
        for output in self.core.on_event(event, time.monotonic()):
            match output:
                case Deliver():
                    self._finished.append(output.finished)
                    if self._on_finished is not None:
                        self._on_finished(output.finished)
                case DiscardKV():
                    if self._discard_kv is not None:
                        self._discard_kv(output.kv)
                case PhaseComplete():
                    self._complete = True
                case Failed():
                    raise RuntimeError(f"coordinator: {output.reason}")
                case _ if isinstance(output, messages.Command):
                    self._server.send(peer_of(output.rank), messages.encode(output))


def peer_of(rank: int) -> str:
    """The name under which a rank joins."""
    return f"rank-{rank}"
