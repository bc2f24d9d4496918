"""The model of a rollout in a serving process: the engine's thread steps it, another thread brings what it is to do.

Whoever calls it holds its lock for as long as a step or a command takes: the engine's thread waits for no longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from engines.control import messages as m
from engines.parallel.layout import ReplicaSpec
from engines.replica.engine import LocalEngine
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace
from engines.rollout.steps import Stepper
from engines.rollout.worker import NO_WEIGHTS
from engines.rollout.worker_core import WorkerCore
from engines.sequence import SequenceId, SequenceState, Work
from engines.serving.coserve import CoServing, Lent, Turn

log = logging.getLogger(__name__)


class _Turnstile:
    """A lock that whoever has waited longest gets: the engine's thread, which takes it again at once, passes nobody."""

    def __init__(self) -> None:
        self._queue, self._lock = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._queue:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Tenant:
    """A `Beside` of `EngineThread`; from `lend` to `take_back` also a replica of a rollout."""

    def __init__(self, engine: LocalEngine, coserving: CoServing, *, pace: Pace | None = None) -> None:
        """With a `pace`, a step of the rollout takes at least its seconds."""
        self.engine, self._coserving = engine, coserving
        assert engine.share is not None, "its KV lies in pages"
        self._pages = engine.share
        self._lock = _Turnstile()
        self._stepper = Stepper(engine, 0, pace)
        self._core = WorkerCore(0)
        self._events: SimpleQueue[m.Event] = SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._phase = -1
        self.closed = "it is not lent"
        """Why it does nothing; empty while it is lent and runs."""
        self._stopped = ""
        """Why it cannot be lent any more."""

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

    def alone(self) -> AbstractContextManager[object]:
        return self._lock

    @property
    def has_work(self) -> bool:
        return not self.closed and self._core.has_work

    def arrived(self, state: SequenceState, at: float) -> None:
        self._coserving.times.arrived(state, at)

    def left(self, sequence_id: SequenceId) -> None:
        self._coserving.times.left(sequence_id)

    def served(self, output: StepOutput, start: float) -> None:
        with self._lock, self._closing("what serving uses could not be noted"):
            self._coserving.stepped("serving", output, start, time.monotonic())

    def next(self) -> Turn | None:
        with self._lock:
            if not self.closed:
                with self._closing("whose step is next could not be decided"):
                    now = time.monotonic()
                    turn = self._coserving.next(now)
                    self._put_released(self._coserving.take_released(), now)
                    return turn
            return "serving" if self._coserving.serves else None

    def step(self) -> bool:
        has_stepped = False
        with self._lock, self._closing("a step of the rollout has failed"):
            output, record = self._stepper.step()
            end = record.start + record.seconds
            self._coserving.stepped("rollout", output, record.start, end)
            for event in self._core.on_step(output, record.seconds, end):
                self._events.put(event)
            has_stepped = bool(output.num_running or output.released or output.fetched)
        return has_stepped

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = reason
            self._close(reason)

    @contextmanager
    def _closing(self, problem: str) -> Iterator[None]:
        """After an error the rollout is closed, and serving goes on."""
        try:
            yield
        except Exception as error:
            log.exception("serving: %s", problem)
            self._close(f"{type(error).__name__}: {error}")

    def _close(self, reason: str) -> None:
        """Lets all sequences go. It does nothing from now on, and keeps its pages until `take_back`."""
        if self.closed:
            return
        self.closed = reason
        works: list[Work] = []
        try:
            works = self._coserving.take_released() + self.engine.replica.pause()
        except Exception:
            log.exception("serving: the rollout's sequences are dropped")
            self.engine.replica.clear()
        self._put_released(works, time.monotonic())

    def _put_released(self, works: list[Work], now: float) -> None:
        for event in self._core.let_go(works, now):
            self._events.put(event)

    # -- for the thread that brings commands

    def lend(self, spec: ReplicaSpec, *, max_kv_tokens: int) -> None:
        """Makes it this replica, which has no weights yet; its announcement is the first of its events.
        `max_kv_tokens`: see `Replica`. Raises RuntimeError after `stop`."""
        config = self.engine.config
        with self._lock:
            if self._stopped:
                raise RuntimeError(self._stopped)
            assert self.closed and not self.engine.replica.num_sequences
            now = time.monotonic()
            self.engine.spec = spec
            self.engine.wake_up()
            self.engine.replica.limit(max_kv_tokens)
            self._core, self._events, self._phase = WorkerCore(spec.ranks[0]), SimpleQueue(), -1
            self._core.take_place(0, spec.id, self.engine.replica, now)
            self.closed = ""
            self._coserving.begin(now)
            ready = self._core.event(
                m.ReplicaReady,
                max_num_seqs=config.max_num_seqs,
                num_kv_tokens=self.engine.num_kv_tokens,
                block_size=config.block_size,
                policy_version=NO_WEIGHTS,
                reads_kv=self.engine.mover.store is not None,
            )
            self._events.put(ready)

    def take_back(self, reason: str) -> list[m.Event]:
        """Ends the loan: weights and all pages are released. Returns the last events."""
        with self._lock:
            self._close(reason)
            self._coserving.end()
            self.engine.sleep(weights=True)
            self._pages.check_integrity()
            assert not self._pages.num_pages, "a page is kept after the loan"
        return self._taken()

    def obey(self, command: m.Command) -> None:
        """Applies a command to the rollout's sequences; the answers are among the events. Without effect when it is
        closed."""
        now = time.monotonic()
        with self._lock:
            if self.closed:
                return
            if isinstance(command, m.SubmitWork) and command.phase != self._phase:
                self._phase = command.phase
                self._coserving.begin(now)
            for event in self._core.obey(command, now):
                self._events.put(event)
            self._stepper.wait_for_transfers(now)
        self._wake()

    def load(self, command: m.LoadWeights, load: Callable[[], int]) -> None:
        """Calls `load`, which gives the engine the weights and returns their checksum, while the serving model steps.
        Raises what `load` raises."""
        with self._lock:
            if self.closed:
                return
            if self.engine.replica.num_sequences:
                raise RuntimeError(f"weights of version {command.version} came while sequences run on older ones")
            self._pages.reclaim(self._pages.num_pages)  # so that the engine's thread finds nothing that `load` changes
        checksum = load()
        self.say(m.WeightsLoaded, acks=command.seq, version=command.version, checksum=checksum)

    def say(self, kind: type[m.Event], **fields: object) -> None:
        with self._lock:
            self._events.put(self._core.event(kind, **fields))

    def take_events(self) -> list[m.Event]:
        """Returns what has happened since the last call. An idle tenant's budget is made anew at times, so that the
        coordinator learns of memory that has become free."""
        now = time.monotonic()
        with self._lock:
            if not self.closed and self._coserving.renew(now):
                self._events.put(self._core.report(now))
        return self._taken()

    def _taken(self) -> list[m.Event]:
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def use(self) -> Use:
        """Returns what is lent now."""
        with self._lock:
            self._coserving.observe(time.monotonic())
            return Use(
                num_pages=self._pages.pool.num_pages,
                num_lent_pages=self._pages.num_pages,
                budget_pages=self._coserving.budget,
                lent=replace(self._coserving.lent),
            )


@dataclass(frozen=True, kw_only=True)
class Use:
    """Of the pages, and of time."""

    num_pages: int
    num_lent_pages: int
    budget_pages: int
    lent: Lent
