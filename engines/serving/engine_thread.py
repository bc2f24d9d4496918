"""The one thread that steps a replica while others speak HTTP. Requests come by a queue; what they generate leaves as
the difference of each sequence's state between two steps. Torch-free.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engines.replica.replica import Replica, StepOutput
from engines.rollout.generation import make_states
from engines.sequence import Completion, Ranked, SamplingParams, SequenceId, SequenceState, Work
from engines.serving.coserve import Turn

_MOST_FAILURES = 3
"""Steps that fail one after another before the engine gives up."""
LOOK_AGAIN_S = 0.005
"""When the tenant has work, and could not step: until it is asked again."""
log = logging.getLogger(__name__)


@dataclass(eq=False, frozen=True, kw_only=True)
class Job:
    """A request: some prompts, each `params.n` times."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    streams: bool
    """Whether its tokens are wanted as they come; else the first one of each completion, and the completion."""
    arrived: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class Tokens:
    """New tokens of a job's completion number `index`, those of its first prompt first."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[Ranked]]
    completion: Completion | None = None
    """When it has ended."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The job will get no more tokens."""

    reason: str


@dataclass(frozen=True)
class Left:
    """The engine holds nothing of the job any more; no event follows."""


Event = Tokens | Failed | Left


@dataclass(frozen=True, kw_only=True)
class Load:
    """The replica between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    broken: str = ""
    """Why the engine does nothing any more; empty while it runs."""


@dataclass(frozen=True, kw_only=True)
class _Abort:
    job: Job


@dataclass(kw_only=True)
class _Open:
    """A sequence in the replica. Its state grows there."""

    job: Job
    index: int
    state: SequenceState
    num_told: int = 0


@dataclass(frozen=True)
class _Look:
    """The tenant has got work."""


class Beside(Protocol):
    """A model that steps in the same thread, when the replica that serves does not. `Tenant` is one."""

    @property
    def has_work(self) -> bool: ...

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` must be called when it gets work; by any thread."""
        ...

    def alone(self) -> AbstractContextManager[object]:
        """Returns what is held while the replica that serves changes: those who bring the model's work look at it."""
        ...

    def next(self) -> Turn | None:
        """Returns who steps now."""
        ...

    def step(self) -> bool:
        """Steps once, and returns whether that did anything. Does not raise for errors of its own."""
        ...

    def arrived(self, state: SequenceState, at: float) -> None:
        """A sequence of a request has come."""
        ...

    def left(self, sequence_id: SequenceId) -> None:
        """A sequence of a request was aborted."""
        ...

    def served(self, output: StepOutput, start: float) -> None:
        """The replica that serves has stepped."""
        ...

    def stop(self, reason: str) -> None:
        """It will not be stepped any more."""
        ...


class EngineThread:
    """Owns a replica from `start` to `stop`: nobody else may call it meanwhile, except `Replica.check`."""

    def __init__(
        self,
        replica: Replica,
        *,
        run_seed: int,
        tell: Callable[[list[tuple[Job, Event]]], None],
        beside: Beside | None = None,
        pace: Callable[[StepOutput], float] | None = None,
    ) -> None:
        """`tell` is called by this thread, at most once per step. With `pace`, a step takes at least the seconds that
        it returns."""
        self._replica, self._run_seed, self._tell = replica, run_seed, tell
        self._beside, self._pace = beside, pace
        self._orders: queue.SimpleQueue[Job | _Abort | _Look | None] = queue.SimpleQueue()
        self._taken: deque[Job | _Abort | _Look | None] = deque()
        self._waits_s = 0.0
        """How long the next wait for orders may last, although there is work."""
        if beside is not None:
            beside.attach(lambda: self._orders.put(_Look()))
        self._open: dict[SequenceId, _Open] = {}
        self._ids: dict[Job, list[SequenceId]] = {}
        self._events: list[tuple[Job, Event]] = []
        self._uids = count()
        self._num_failures = self._num_steps = 0
        self._broken = ""
        self._has_stopped = False
        self.load = Load()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._report()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """For any thread. Events of the job follow, and end with `Left`."""
        self._orders.put(job)

    def abort(self, job: Job) -> None:
        """For any thread. A job that has ended meanwhile is no error."""
        self._orders.put(_Abort(job=job))

    def stop(self, timeout_s: float = 10.0) -> None:
        """Drops what runs, and ends the thread."""
        self._orders.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._has_stopped:
            try:
                self._wait_for_orders()
                while self._taken:
                    self._take(self._taken.popleft())
                if not (self._broken or self._has_stopped):
                    self._turn()
            except Exception:
                log.exception("serving: the engine's thread has failed")
                self._break("the engine's thread has failed; see the server's log")
            self._report()

    def _wait_for_orders(self) -> None:
        """Takes what has been asked since the last step. Waits while there is nothing to do."""
        if not self._taken and (self._broken or not self._has_work):
            self._taken.append(self._orders.get())
        elif not self._taken and self._waits_s:
            with contextlib.suppress(queue.Empty):
                self._taken.append(self._orders.get(timeout=self._waits_s))
        while True:
            try:
                self._taken.append(self._orders.get_nowait())
            except queue.Empty:
                return

    def _alone(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._beside is None else self._beside.alone()

    @property
    def _has_work(self) -> bool:
        return self._replica.has_work or (self._beside is not None and self._beside.has_work)

    def _turn(self) -> None:
        turn: Turn | None = "serving" if self._replica.has_work else None
        if self._beside is not None:
            turn = self._beside.next()
        self._waits_s = 0.0
        if turn == "rollout":
            assert self._beside is not None
            if self._beside.step():
                return
            turn = "serving" if self._replica.has_work else None
        if turn == "serving":
            self._step()
        elif self._has_work:
            self._waits_s = LOOK_AGAIN_S

    def _take(self, order: Job | _Abort | _Look | None) -> None:
        if isinstance(order, _Look):
            return
        if order is None:
            self._has_stopped = True
            with self._alone():
                self._replica.clear()
            self._stop_beside("the server has stopped")
        elif isinstance(order, _Abort):
            for sequence_id in self._ids.get(order.job, ()):
                if self._open.pop(sequence_id, None) is not None:
                    with self._alone():
                        self._replica.abort(sequence_id)
                    self._forget(sequence_id)
            self._leave(order.job)
        elif self._broken:
            self._events += [(order, Failed(reason=self._broken)), (order, Left())]
        else:
            self._submit(order)

    def _submit(self, job: Job) -> None:
        self._ids[job] = []
        try:
            states = make_states(
                job.prompts,
                job.params,
                [next(self._uids) for _ in job.prompts],
                run_seed=self._run_seed,
                policy_step=self._replica.policy_version,
            )
            for index, state in enumerate(states):
                with self._alone():
                    self._replica.submit(Work(state=state))
                self._open[state.sequence_id] = _Open(job=job, index=index, state=state)
                self._ids[job].append(state.sequence_id)
                if self._beside is not None:
                    self._beside.arrived(state, job.arrived)
        except ValueError as error:  # `Replica.check` has let it pass
            self._events.append((job, Failed(reason=str(error))))
            self._take(_Abort(job=job))

    def _leave(self, job: Job) -> None:
        if self._ids.pop(job, None) is not None:
            self._events.append((job, Left()))

    def _forget(self, sequence_id: SequenceId) -> None:
        if self._beside is not None:
            self._beside.left(sequence_id)

    def _step(self) -> None:
        start = time.monotonic()
        try:
            with self._alone():
                output = self._replica.step()
        except Exception as error:
            log.exception("serving: a step has failed")
            self._num_failures += 1
            self._fail_all(f"a step of the engine has failed ({type(error).__name__}); see the server's log")
            if self._num_failures >= _MOST_FAILURES:
                self._break(f"{_MOST_FAILURES} steps of the engine have failed one after another")
            return
        assert not output.released, "no sequence here is bounded or has turns"
        self._num_failures, self._num_steps = 0, self._num_steps + 1
        if self._pace is not None:
            time.sleep(max(0.0, start + self._pace(output) - time.monotonic()))
        if self._beside is not None:
            self._beside.served(output, start)
        ended = {one.state.sequence_id: one.completion for one in output.finished}
        for sequence_id, one in self._open.items():
            if len(one.state.tokens) - one.state.num_prompt_tokens > one.num_told or sequence_id in ended:
                self._tell_new(one, ended.get(sequence_id))
        for sequence_id in ended:
            job = self._open.pop(sequence_id).job
            self._ids[job].remove(sequence_id)
            if not self._ids[job]:
                self._leave(job)

    def _tell_new(self, one: _Open, completion: Completion | None) -> None:
        state, start = one.state, one.num_told
        one.num_told = len(state.tokens) - state.num_prompt_tokens
        if one.job.streams:
            tokens = Tokens(
                index=one.index,
                token_ids=state.tokens[state.num_prompt_tokens + start :],
                logprobs=state.logprobs[start:],
                top_logprobs=state.top_logprobs[start:],
                completion=completion,
            )
            self._events.append((one.job, tokens))
        elif completion is not None or not start:
            first = Tokens(index=one.index, token_ids=[], logprobs=[], top_logprobs=[], completion=completion)
            self._events.append((one.job, first))

    def _fail_all(self, reason: str) -> None:
        """All requests end, as the step may fail because of any of them; the engine goes on."""
        jobs = list(self._ids)
        for sequence_id in self._open:
            self._forget(sequence_id)
        self._open.clear()
        for job in jobs:
            self._events.append((job, Failed(reason=reason)))
            self._leave(job)
        with self._alone():
            self._replica.clear()

    def _stop_beside(self, reason: str) -> None:
        if self._beside is not None:
            self._beside.stop(reason)

    def _break(self, reason: str) -> None:
        self._broken = reason
        try:
            self._stop_beside(reason)
            self._fail_all(reason)
        except Exception:
            log.exception("serving: the replica cannot be cleared")

    def _report(self) -> None:
        replica, blocks = self._replica, self._replica.scheduler.blocks
        self.load = Load(
            num_running=replica.num_sequences - replica.num_waiting,
            num_waiting=replica.num_waiting,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_preemptions=replica.scheduler.num_preemptions,
            num_steps=self._num_steps,
            broken=self._broken,
        )
        events, self._events = self._events, []
        if events:
            self._tell(events)
