"""Runs a user's reward function in a process of its own, under a wall-clock limit: it can fail, but not stop a run."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from algos.rewards.protocol import Batch, Part, Ready, Result
from algos.workers.messages import receive, send
from algos.workers.process import WorkerError, WorkerProcess
from engines.constraints import Count, Finite, Seconds, check_fields
from engines.decoding import DecodeError

FailureKind = Literal["raised", "timed_out", "invalid"]
"""raised: the function raised, returned a wrong number of rewards, or ended its process. timed_out: a call took longer
than `timeout_s`, the process did not start again, or no more calls are made (`max_failures`). invalid: the reward was
no number from -1e30 to 1e30 (None, TRL's "does not apply", included)."""
_GRACE = 0.2
"""An async function is cancelled at `timeout_s`; if it goes on, its process is killed this share of the limit later."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Limits on a reward function."""

    timeout_s: Seconds = 10.0
    """Wall-clock limit of one call of the function (one chunk)."""
    chunk_size: Count | None = None
    """Completions per call of the function. If a call raises, hangs, ends its process or returns a wrong number of
    rewards, all its completions fail. None: 1, for an async function 16. Raise it if the function is faster in bulk."""
    failed_reward: Finite = 0.0
    """Reward of a completion that could not be scored."""
    max_failures: Count = 8
    """After this many hangs or ends of the function's process in a rollout, its other completions are not scored."""
    start_timeout_s: Seconds = 120.0
    """Limit on starting the process, including the imports of the function's module."""
    beside_rollout: bool = True
    """Score completions as they finish, during the rollout: timing then decides which ones share a call. Off: score
    after the rollout, in calls that do not depend on timing; with `chunk_size` = group size a call gets one group."""

    def __post_init__(self) -> None:
        check_fields(self)

    def completions_per_call(self, is_async: bool) -> int:
        """The most completions per call."""
        return self.chunk_size or (16 if is_async else 1)


UNANSWERED = 0


class RewardRunner:
    """A reward function of TRL's signature, `(prompts, completions, **columns) -> list[float]`, sync or async.

    It is named by import path, "package.module:function" or "path/to/file.py:function", runs in a subprocess that is
    started at the first use and kept, and gets the arguments that it declares (all of them if it takes `**kwargs`).
    The chunks of a sync function run one after the other, the chunks of an async one together in one event loop.

    Use it as a context manager, or `close` it. Threads may share it; their calls then take turns.
    """

    def __init__(self, spec: str, config: RewardConfig | None = None) -> None:
        """Starts nothing yet. Raises `ValueError` when `spec` does not have the form of an import path."""
        module, colon, function = spec.rpartition(":")
        if not (colon and module and all(name.isidentifier() for name in function.split("."))):
            raise ValueError(f'reward={spec!r}: must be "package.module:function" or "path/to/file.py:function"')
        self.spec = spec
        self.config = config or RewardConfig()
        self.closed = False
        # Absolute, since the worker may have to be started again after a change of directory.
        self._target = f"{Path(module).absolute()}:{function}" if module.endswith(".py") else spec
        self._worker: WorkerProcess[Ready] | None = None
        self._ready: Ready | None = None
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)

    def check(self, columns: Iterable[str] = ()) -> Ready:
        """Starts the worker now. Raises `ValueError` when the function cannot be imported, or requires an argument
        other than `prompts`, `completions` and `columns`."""
        ready = self.ready
        missing = set(ready.required) - {"prompts", "completions", *columns}
        if missing:
            raise ValueError(
                f"reward={self.spec!r}: the function wants {sorted(missing)}, the task has only the columns "
                f"{sorted(columns)}: rename its parameter, give it a default, or add the column"
            )
        return ready

    def close(self) -> None:
        """Kills the worker. Waits for another thread's call in progress; that thread then makes no further call."""
        self.closed = True
        with self._lock:
            self._stop_worker()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ready(self) -> Ready:
        """The arguments that the function takes. Starts the worker if it has not been started."""
        with self._lock:
            if self.closed:
                raise ValueError(f"reward={self.spec!r}: the runner is closed; make a new RewardRunner")
            if self._ready is None:
                try:
                    self._ready = self._start_worker().ready
                except WorkerError as error:
                    raise ValueError(
                        f"reward={self.spec!r}: cannot be used: {error}. "
                        'Name an importable function as "package.module:function" or "path/to/file.py:function"'
                    ) from None
            return self._ready

    @contextlib.contextmanager
    def turn(self, columns: Iterable[str]) -> Iterator[Ready]:
        """Reserves the worker for this thread. Raises `ValueError` as `check` does."""
        with self._lock:
            ready = self.check(columns)
            try:
                yield ready
            except BaseException:  # the worker may still be busy with a call that nobody waits for
                self._stop_worker()
                raise

    @property
    def has_worker(self) -> bool:
        """Whether the worker process exists: the last call has not ended it."""
        return self._worker is not None

    def call(self, slices: list[slice], arguments: dict[str, list[Any]]) -> list[Result]:
        """Calls the function with each slice of the arguments and returns one result per slice, of part `UNANSWERED`
        where the worker was lost before it answered. Requires `turn`."""
        numbers = [next(self._numbers) for _ in slices]
        parts: dict[int, Part] = {}
        results: dict[int, Result] = {}
        kind: Literal["raised", "timed_out"] = "raised"
        error = ""
        for number, items in zip(numbers, slices, strict=True):
            try:
                parts[number] = _part(items, arguments)
            except UnicodeEncodeError as failure:  # a lone surrogate in a model's output
                text = f"{type(failure).__name__}: {failure}"
                results[number] = Result(part=number, kind="raised", error=text)
        try:
            try:
                self._exchange(parts, results)
            except ConnectionError:  # the worker ended before it read the message: no completion caused this
                self._stop_worker()
                self._exchange(parts, results)
        except TimeoutError:
            self._stop_worker()
            kind, error = "timed_out", f"not done after {self.config.timeout_s:g} s"
        except WorkerError as failure:
            kind, error = "timed_out", f"the worker could not be started again: {failure}"
        except (EOFError, ConnectionError, DecodeError):
            error = f"the worker process {self._stop_worker()}"
        # A worker that was lost has not sent all results.
        return [results.get(number) or Result(part=UNANSWERED, kind=kind, error=error) for number in numbers]

    def _exchange(self, parts: dict[int, Part], results: dict[int, Result]) -> None:
        worker = self._start_worker()
        limit_s = self.config.timeout_s * (1.0 + _GRACE * worker.ready.is_async)
        batch = Batch(parts=parts, timeout_s=self.config.timeout_s)
        send(worker.sock, batch, deadline=time.monotonic() + limit_s)
        deadline = time.monotonic() + limit_s
        while missing := parts.keys() - results.keys():
            result = receive(worker.sock, Result, deadline=deadline)
            if result.part in missing:  # user code can reach the socket, too
                results[result.part] = result
                deadline = time.monotonic() + limit_s  # coroutines of a batch may take turns

    def _start_worker(self) -> WorkerProcess:
        if self._worker is not None and self._worker.has_ended():
            self._stop_worker()
        if self._worker is None:
            self._worker = WorkerProcess("algos.rewards.worker", [self._target], Ready, self.config.start_timeout_s)
        return self._worker

    def _stop_worker(self) -> str:
        worker, self._worker = self._worker, None
        return worker.kill() if worker else "is not running"


def _part(items: slice, arguments: dict[str, list[Any]]) -> Part:
    """Raises `UnicodeEncodeError` for text that cannot be encoded, `ValueError` for a column that is not plain data."""
    part = Part(num_items=items.stop - items.start, arguments={name: v[items] for name, v in arguments.items()})
    for name, values in part.arguments.items():
        try:
            msgspec.msgpack.encode(values)
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"columns[{name!r}]: cannot be sent to the reward process ({error}): must be plain data "
                "(text, numbers of 64 bits, lists, dicts)"
            ) from None
    return part
