"""Runs the environments of trajectories in processes that may fail: each call has an answer, in time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from algos.environments.forked import END_S, ForkedWorker, LostError
from algos.environments.protocol import Call, EnvironmentConfig, Ready, Result
from algos.workers.process import WorkerError, WorkerProcess
from engines.rollout.environment import Answer, FailureKind
from engines.sequence import SequenceId

logger = logging.getLogger(__name__)

_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")
"""What the processes get of the run's environment variables, beside PYTHONPATH."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""There are many workers; and the import of NumPy would start threads."""

_MOST_BAD_STARTS = 8
"""A call tries so many workers that end as they start, for example because the template does."""


@dataclass(eq=False, kw_only=True)
class _Trajectory:
    sequence_id: SequenceId
    number: int
    calls: list[Call] = field(default_factory=list)
    """All so far. An object that is made anew gets each of them once."""
    num_done: int = 0
    """Calls that the present object has had."""
    worker: ForkedWorker | None = None
    task: asyncio.Task[None] | None = None
    failure: FailureKind | None = None
    is_ended: bool = False


class EnvironmentPool:
    """The environments of one class, or of tools, named by import path (`engines.rollout.environment.Environments`).

    A thread passes calls to `config.workers` processes, and their answers back. An object stays in its worker. Sync
    calls of one worker run one after another, async ones together; a new object goes to the worker with the fewest.

    A worker may end: by user code, by a kill from outside, for its memory. It is replaced at once. Its objects are made
    anew on other workers when they are next called: they get `reset` and the texts of the earlier turns, once each,
    and those answers are dropped. A call that ran in it is made once more, on a new object in a worker of its own:
    which of several calls has ended the worker cannot be known, and a kill from outside is no call's fault. A call
    that loses this worker, too, fails ("lost"). A call that hangs fails at once ("timed_out") if it ran alone.

    Use it as a context manager. It may serve many rollouts; its counts go on.
    """

    def __init__(self, spec: str, config: EnvironmentConfig | None = None) -> None:
        """Starts the processes. Raises `ValueError` when what `spec` names cannot be used."""
        module, colon, names = spec.rpartition(":")
        if not (colon and module and all(name.strip().isidentifier() for name in names.split(","))):
            raise ValueError(
                f'environment={spec!r}: must be "path/to/file.py:Class" or "package.module:Class"; '
                'for tools "path/to/file.py:function,other"'
            )
        self.spec = spec
        self.config = config or EnvironmentConfig()
        # Absolute, since the template works elsewhere.
        self._target = f"{os.path.abspath(module)}:{names}" if module.endswith(".py") else spec
        self.failures: Counter[FailureKind] = Counter()
        """Trajectories whose environment failed, by kind."""
        self.failed: dict[SequenceId, FailureKind] = {}
        """These trajectories, until somebody clears it: `sample_groups` does so for each rollout. One is here before
        its answer or reward comes."""
        self.num_calls = 0
        self.tool_seconds = 0.0
        """The sum of what the calls took."""
        self._numbers = itertools.count()
        self._trajectories: dict[SequenceId, _Trajectory] = {}
        self._workers: list[ForkedWorker] = []
        self._living: set[ForkedWorker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._folder = tempfile.mkdtemp(prefix="curtail-environments-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()
        try:
            self._template = self._start_template()
            self.ready = self._template.ready
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerError):
                raise ValueError(f"environment={spec!r}: cannot be used: {error}") from None
            raise
        for note in self.ready.notes:
            logger.warning("environment %s: %s", spec, note)

    def check(self, columns: Iterable[str]) -> None:
        """Raises `ValueError` when `reset` requires a column that is not there."""
        if missing := {*self.ready.required} - {*columns}:
            raise ValueError(
                f"environment={self.spec!r}: reset wants {sorted(missing)}, the task has only the columns "
                f"{sorted(columns)}: rename its parameter, give it a default, or add the column"
            )

    @property
    def has_reward(self) -> bool:
        """Whether its class has a `get_reward`."""
        return "get_reward" in self.ready.methods

    @property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template; none for an environment with a `step` of its own."""
        return self.ready.tools

    def begin(self, sequence_id: SequenceId, columns: Mapping[str, Any], answer: Callable[[Answer], None]) -> None:
        """Raises `ValueError` for columns that are missing or not plain data."""
        self.check(columns)
        accepted = self.ready.accepted
        own = {name: value for name, value in columns.items() if accepted is None or name in accepted}
        call = Call(object=next(self._numbers), method="reset", columns=own)
        try:
            msgspec.msgpack.encode(call)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"columns of {sequence_id}: cannot be sent to the environment ({error}): must be plain data (text, "
                "numbers of 64 bits, lists, dicts)"
            ) from None
        one = self._trajectories[sequence_id] = _Trajectory(sequence_id=sequence_id, number=call.object)
        self._post(self._ask, one, call, answer)

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        one = self._trajectories[sequence_id]
        text = text.encode(errors="replace").decode()  # half a surrogate cannot be sent
        self._post(self._ask, one, Call(object=one.number, method="step", text=text), answer)

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        """`reward` gets `failed_reward` if a call of the trajectory failed. Nothing is done if `begin` raised."""
        if one := self._trajectories.pop(sequence_id, None):
            self._post(self._end, one, reward)

    def close(self) -> None:
        """Kills all processes and removes their folders. No answer comes after that."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if hasattr(self, "_template"):
            self._template.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        if self._is_closed:
            raise ValueError(f"environment={self.spec!r}: the pool is closed; make a new EnvironmentPool")
        self._loop.call_soon_threadsafe(function, *args)

    # What follows runs on the pool's thread.

    def _ask(self, one: _Trajectory, call: Call, answer: Callable[[Answer], None]) -> None:
        one.calls.append(call)
        one.task = self._spawn(self._answer(one, answer))

    def _end(self, one: _Trajectory, reward: Callable[[float | None], None] | None) -> None:
        one.is_ended = True
        self._spawn(self._finish(one, reward))

    async def _answer(self, one: _Trajectory, answer: Callable[[Answer], None]) -> None:
        result = await self._run(one)
        if not one.is_ended:
            self._count(one, result)
            names = ("text", "role", "seconds", "failure", "error")
            fields = {name: getattr(result, name) for name in names}
            answer(Answer(done=result.done or result.failure is not None, **fields))

    async def _finish(self, one: _Trajectory, reward: Callable[[float | None], None] | None) -> None:
        """Asks for the reward, closes the object, and releases it."""
        assert one.task is not None
        await one.task
        given = self.config.failed_reward if self.has_reward else None
        wants_reward = reward is not None and given is not None and one.failure is None
        call = Call(object=one.number, method="end", wants_reward=wants_reward)
        if wants_reward:
            one.calls.append(call)
            result = await self._run(one)
            self._count(one, result)
            given = given if result.reward is None else result.reward
        elif one.worker is not None and not one.worker.is_lost:
            with contextlib.suppress(LostError):
                await one.worker.call(call)
        if reward is not None:
            reward(given)
        if one.worker is not None:
            one.worker.objects.discard(one.number)
            if one.worker not in self._workers:
                one.worker.kill()

    def _count(self, one: _Trajectory, result: Result) -> None:
        self.num_calls += 1
        self.tool_seconds += result.seconds
        if result.failure is None:
            return
        if not self.failures[result.failure]:
            kind = result.failure.replace("_", " ")
            logger.warning("environment %s: a call %s; the first one: %s", self.spec, kind, result.error[:500])
        one.failure = self.failed[one.sequence_id] = result.failure
        self.failures[result.failure] += 1

    async def _run(self, one: _Trajectory) -> Result:
        """Makes the calls that the trajectory's object has not had. Returns the result of the last one."""
        num_losses = num_bad_starts = 0
        while True:
            try:
                if one.worker is None or one.worker.is_lost:
                    one.worker, one.num_done = self._choose(is_alone=num_losses > 0), 0
                    one.worker.objects.add(one.number)
                result = await one.worker.call(one.calls[one.num_done])
                one.num_done += 1
                if result.failure is not None or one.num_done == len(one.calls):
                    return result
            except LostError as lost:
                assert one.worker is not None
                num_losses += lost.was_sent
                num_bad_starts += not one.worker.has_started
                if lost.is_certain or num_losses == 2 or num_bad_starts == _MOST_BAD_STARTS:
                    return lost.result
            except Exception as error:  # no process can be started, for example; each call has an answer
                logger.exception("environment %s: a call cannot be made", self.spec)
                return Result(object=one.number, failure="lost", error=f"{type(error).__name__}: {error}")

    def _choose(self, *, is_alone: bool) -> ForkedWorker:
        """Returns the worker for a new object. `is_alone`: one that gets no other."""
        if is_alone:
            return self._fork()
        if len(self._workers) < self.config.workers:
            self._workers.append(self._fork())
        return min(self._workers, key=lambda worker: len(worker.objects))

    def _fork(self) -> ForkedWorker:
        """Orders a new worker. If the template was lost, starts another one, for which all calls wait."""
        try:
            worker = ForkedWorker(self._template.sock, self.ready, self.config, self._replace)
        except OSError:
            self._template.kill()
            self._template = self._start_template()
            worker = ForkedWorker(self._template.sock, self.ready, self.config, self._replace)
        self._living.add(worker)
        return worker

    def _replace(self, worker: ForkedWorker) -> None:
        """The worker was lost."""
        self._living.discard(worker)
        if worker in self._workers:
            self._workers.remove(worker)
            if worker.has_started and not self._is_closed:  # otherwise the next call tries again
                with contextlib.suppress(WorkerError):
                    self._workers.append(self._fork())

    def _start_template(self) -> WorkerProcess[Ready]:
        os.makedirs(self._folder, exist_ok=True)
        config = replace(self.config, writable=tuple(map(os.path.abspath, self.config.writable)))
        environ = {name: os.environ[name] for name in (*_KEPT, *config.environ) if name in os.environ}
        template = WorkerProcess(
            "algos.environments.worker",
            [self._target, msgspec.json.encode(config).decode()],
            Ready,
            self.config.start_timeout_s,
            environ={**_ONE_THREAD, **environ, "HOME": self._folder, "TMPDIR": self._folder},
            folder=self._folder,
        )
        template.sock.settimeout(END_S)
        return template

    async def _start(self) -> None:
        self._workers = [self._fork() for _ in range(self.config.workers)]
        for worker in [*self._workers]:
            await worker.started
            if worker.is_lost:
                raise ValueError(f"environment={self.spec!r}: its processes end as they start; see stderr")

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        for worker in self._living:
            worker.kill()
        if self._living:
            await asyncio.wait([worker.ended for worker in self._living], timeout=END_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
