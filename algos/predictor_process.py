"""A length predictor in a process of its own, which answers beside the tools. Heddle, §4.1, Fig. 9.

    predictor = LengthPredictorProcess(trunk, saved)
    llm.generate(prompts, environment=pool, predictor=predictor)
    predictor.fit(trajectories)

One thread sends what is asked, another takes the answers. Each ask is answered once, whatever the process does.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from algos.predictor_messages import Answers, Ask, Fit, Fitted, Ready
from algos.trajectory_lengths import Trajectory
from algos.workers.messages import receive, send
from algos.workers.process import WorkerError, WorkerProcess
from engines.constraints import Seconds, check_fields
from engines.decoding import DecodeError
from engines.rollout.prediction import Context

logger = logging.getLogger(__name__)
_ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""It takes one core, and no GPU."""
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class PredictorConfig:
    """Limits on the predictor's process."""

    timeout_s: Seconds = 10.0
    """What is not answered after this time has no estimate."""
    start_timeout_s: Seconds = 120.0
    """Limit on starting the process and reading the model."""
    fit_timeout_s: Seconds = 600.0
    """Limit on a fit."""

    def __post_init__(self) -> None:
        check_fields(self)


Take = Callable[[Answers | Fitted | None], None]
"""Gets the process's reply, None where there is none in time."""


class LengthPredictorProcess:
    """The process and its two threads (`engines.rollout.prediction.LengthPredictor`).

    Before the first fit it has no estimates. Nor has a process that was lost, until `revive`. Use it as a context
    manager; nothing may be asked after `close`.
    """

    source = "length_predictor"

    def __init__(self, trunk: Path, saved: Path, config: PredictorConfig | None = None) -> None:
        """`trunk`: the checkpoint that is fitted. `saved`: the folder of the last fit, which is read if it is there.

        Raises ValueError when the trunk is no checkpoint, or what is saved was fitted for another model.
        """
        self.config = config or PredictorConfig()
        self._trunk, self._saved = trunk, saved
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[float, Take]] = {}
        """Deadline, and what takes the reply, by number."""
        self._lost = threading.Event()
        self._is_closed = False
        self._start()

    @property
    def is_lost(self) -> bool:
        """Whether the process cannot answer any more."""
        return self._lost.is_set()

    @property
    def is_fitted(self) -> bool:
        return self._is_fitted

    @property
    def pid(self) -> int:
        """Of the process that predicts."""
        return self._worker.ready.pid

    def ask(self, contexts: Sequence[Context], answer: Callable[[Sequence[float]], None]) -> None:
        def take(reply: Answers | Fitted | None) -> None:
            known = reply.remaining if isinstance(reply, Answers) else []
            answer(known if len(known) == len(contexts) else [math.nan] * len(contexts))

        message = Ask(number=next(self._numbers), contexts=list(contexts))
        self._put(message, self.config.timeout_s, take)

    def fit(self, trajectories: Sequence[Trajectory], seed: int = 0) -> Future[Fitted]:
        """Fits anew, beside the caller; then the process predicts with the new model, which it has saved. Asks in the
        meantime wait. The result raises `WorkerError` when the fit failed or took too long."""
        done: Future[Fitted] = Future()

        def take(reply: Answers | Fitted | None) -> None:
            if isinstance(reply, Fitted) and not reply.error:
                self._is_fitted = True
                done.set_result(reply)
                return
            error = reply.error if isinstance(reply, Fitted) else "the process ended, or the time was up"
            done.set_exception(WorkerError(f"the length predictor cannot be fitted: {error}"))
            if reply is None:
                self._lose("a fit had no end")

        message = Fit(number=next(self._numbers), trajectories=list(trajectories), seed=seed)
        self._put(message, self.config.fit_timeout_s, take)
        return done

    def revive(self) -> None:
        """If the process was lost, starts another, with what is saved."""
        if self.is_lost:
            self.close()
            self._start()

    def close(self) -> None:
        """Kills the process. What was asked has no estimate."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lost.set()
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join()
        self._to.close()
        self._worker.kill()

    def __enter__(self) -> LengthPredictorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        try:
            self._worker: WorkerProcess[Ready] = WorkerProcess(
                "algos.predictor_worker",
                [str(self._trunk.absolute()), str(self._saved.absolute())],
                Ready,
                self.config.start_timeout_s,
                environ={**os.environ, **_ENVIRON},
            )
        except WorkerError as error:
            raise ValueError(f"predictor={str(self._saved)!r}: cannot be used: {error}") from None
        self._is_fitted = self._worker.ready.is_fitted
        self._to = self._worker.sock.dup()  # each thread sets its own timeout
        self._is_closed = False
        self._lost.clear()
        self._outgoing = queue.SimpleQueue[Ask | Fit | None]()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._send_all, self._receive_all)]
        for thread in self._threads:
            thread.start()

    def _put(self, message: Ask | Fit, timeout_s: float, take: Take) -> None:
        with self._lock:
            self._pending[message.number] = (time.monotonic() + timeout_s, take)
        self._outgoing.put(message)

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                if not self.is_lost:
                    send(self._to, message, deadline=time.monotonic() + self.config.timeout_s)
            except OSError as error:  # a TimeoutError is one
                self._lose(f"it does not read: {error}")
            if self.is_lost:
                self._expire(math.inf)
        self._expire(math.inf)

    def _receive_all(self) -> None:
        """Takes the replies, and gives up waiting for them."""
        poller = select.poll()
        poller.register(self._worker.sock, select.POLLIN)
        while not self.is_lost:
            with self._lock:
                next_deadline = min((deadline for deadline, _ in self._pending.values()), default=math.inf)
            # What is asked during this wait has a later deadline, or is late by `_POLL_S`.
            if poller.poll(1000 * min(max(0.001, next_deadline - time.monotonic()), _POLL_S)):
                try:
                    deadline = time.monotonic() + self.config.timeout_s
                    reply: Answers | Fitted = receive(self._worker.sock, Answers | Fitted, deadline=deadline)  # type: ignore[arg-type]
                    with self._lock:
                        _, take = self._pending.pop(reply.number, (0.0, None))
                    _call(take, reply)
                except (EOFError, OSError, DecodeError) as error:
                    self._lose(str(error))
            self._expire(time.monotonic())
        self._expire(math.inf)

    def _expire(self, now: float) -> None:
        with self._lock:
            late = [number for number, (deadline, _) in self._pending.items() if deadline <= now]
            takes = [self._pending.pop(number)[1] for number in late]
        for take in takes:
            _call(take, None)

    def _lose(self, why: str) -> None:
        if not self.is_lost:
            logger.warning("the length predictor has no estimates until the next rollout: %s", why)
        self._lost.set()


def _call(take: Take | None, reply: Answers | Fitted | None) -> None:
    """`take`: None for a reply that comes too late."""
    try:
        if take is not None:
            take(reply)
    except Exception:  # the thread must go on, since others wait for it
        logger.exception("a reply of the length predictor cannot be taken")
