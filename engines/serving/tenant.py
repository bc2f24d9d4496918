"""The model of a rollout in a serving process: the engine's thread steps it, another thread brings what it is to do.

Whoever calls it holds `lock` for as long as a step or a command takes: the engine's thread waits for no longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from engines.control import messages as m
from engines.replica.engine import LocalEngine
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace
from engines.rollout.steps import Stepper
from engines.rollout.worker_core import WorkerCore
from engines.sequence import SequenceId, SequenceState
from engines.serving.coserve import CoServing, Lent, Turn

log = logging.getLogger(__name__)


class Tenant:
    """A `Beside` of `EngineThread`, and a place in the layout of a rollout."""

    def __init__(self, engine: LocalEngine, coserving: CoServing, *, pace: Pace | None = None) -> None:
        """With a `pace`, a step of the rollout takes at least its seconds."""
        self.engine, self._coserving = engine, coserving
        self._lock = threading.Lock()
        self._stepper = Stepper(engine, 0, pace)
        self._core = WorkerCore(engine.spec.ranks[0])
        self._core.take_place(0, engine.spec.id, engine.replica, time.monotonic())
        self._events: SimpleQueue[m.Event] = SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._phase = -1
        self.broken = ""
        """Why it does nothing any more; empty while it runs."""

    @property
    def lent(self) -> Lent:
        return self._coserving.lent

    @property
    def budget(self) -> int:
        """Pages that it may hold."""
        return self._coserving.budget

    # -- for the engine's thread

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @property
    def has_work(self) -> bool:
        return not self.broken and self._core.has_work

    def arrived(self, state: SequenceState, at: float) -> None:
        self._coserving.times.arrived(state, at)

    def left(self, sequence_id: SequenceId) -> None:
        self._coserving.times.left(sequence_id)

    def served(self, output: StepOutput, start: float) -> None:
        with self._lock:
            self._coserving.stepped("serving", output, start, time.monotonic())

    def next(self) -> Turn | None:
        with self._lock:
            now = time.monotonic()
            turn = self._coserving.next(now)
            for event in self._core.let_go(self._coserving.take_released(), now):
                self._events.put(event)
        return None if self.broken and turn == "rollout" else turn

    def step(self) -> bool:
        with self._lock:
            try:
                output, record = self._stepper.step()
            except Exception as error:
                log.exception("serving: a step of the rollout has failed")
                self._break(f"{type(error).__name__}: {error}")
                return False
            end = record.start + record.seconds
            self._coserving.stepped("rollout", output, record.start, end)
            for event in self._core.on_step(output, record.seconds, end):
                self._events.put(event)
        return bool(output.num_running or output.released or output.fetched)

    def stop(self, reason: str) -> None:
        with self._lock:
            self._break(reason)

    def _break(self, reason: str) -> None:
        """Nothing of it is left; its pages go back when the serving model needs them."""
        self.broken = self.broken or reason
        self.engine.replica.clear()

    # -- for the thread that brings commands

    def ready(self) -> m.Event:
        """Returns its announcement."""
        config = self.engine.config
        with self._lock:
            self._coserving.begin(time.monotonic())
            return self._core.event(
                m.ReplicaReady,
                max_num_seqs=config.max_num_seqs,
                num_kv_tokens=self.engine.num_kv_tokens,
                block_size=config.block_size,
                policy_version=-1,
            )

    def obey(self, command: m.Command) -> list[m.Event]:
        """Applies a command to the rollout's sequences; returns the answers. Raises RuntimeError when it is broken."""
        now = time.monotonic()
        with self._lock:
            if self.broken:
                raise RuntimeError(self.broken)
            if isinstance(command, m.SubmitWork) and command.phase != self._phase:
                self._phase = command.phase
                self._coserving.begin(now)
            events = self._core.obey(command, now)
            self._stepper.wait_for_transfers(now)
        self._wake()
        return events

    def answer(self, kind: type[m.Event], **fields: object) -> m.Event:
        with self._lock:
            event: m.Event = self._core.event(kind, **fields)
        return event

    def take_events(self) -> list[m.Event]:
        """Returns what has happened since the last call. An idle tenant's budget is made anew at times, so that the
        coordinator learns of memory that has become free."""
        now = time.monotonic()
        with self._lock:
            if not self.broken and self._coserving.renew(now):
                self._events.put(self._core.report(now))
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events
