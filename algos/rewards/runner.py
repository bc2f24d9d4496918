"""Runs a user's reward function in a process of its own, under a wall-clock limit: it can fail, but not stop a run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from algos.rewards.protocol import Batch, Hello, Part, Ready, Result, receive, send

logger = logging.getLogger(__name__)

FailureKind = Literal["raised", "timed_out", "invalid"]
_GRACE = 0.2
"""An async function is cancelled at the limit, and its process killed this share of it later if that did not help."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Limits on a reward function."""

    timeout_s: float = 10.0
    """Wall-clock limit of one call of the function, that is of one chunk."""
    chunk_size: int = 16
    """Completions per call of the function."""
    failed_reward: float = 0.0
    """Reward of a completion that could not be scored."""
    max_failures: int = 8
    """Hangs after which a `score` gives up on what is left to call; or failures of other kinds that took as long."""
    start_timeout_s: float = 120.0
    """Limit on starting the process, the imports of the function's module included."""

    def __post_init__(self) -> None:
        checks = (
            ("timeout_s", self.timeout_s > 0, "above 0 (seconds)"),
            ("chunk_size", self.chunk_size >= 1, "at least 1"),
            ("failed_reward", abs(self.failed_reward) < float("inf"), "a finite number"),
            ("max_failures", self.max_failures >= 1, "at least 1"),
            ("start_timeout_s", self.start_timeout_s > 0, "above 0 (seconds)"),
        )
        for name, ok, want in checks:
            if not ok:
                raise ValueError(f"RewardConfig.{name}={getattr(self, name)!r}: must be {want}")


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """What `RewardRunner.score` returns. The three counts are of completions, and disjoint."""

    rewards: list[float]
    """One per completion, all finite."""
    num_raised: int
    """The function raised, returned a wrong number of rewards, or ended its process."""
    num_timed_out: int
    """The function took longer than `timeout_s`, or `score` had given up before it could be called."""
    num_invalid: int
    """The reward was not a finite number. None, TRL's "does not apply", counts as such."""
    seconds: float


class RewardRunner:
    """A reward function of TRL's signature, `(prompts, completions, **columns) -> list[float]`, sync or async.

    It is named by import path, "package.module:function" or "path/to/file.py:function", runs in a subprocess that is
    started at the first use and kept, and gets the arguments that it declares (all of them if it takes `**kwargs`).
    The chunks of a sync function run one after the other, those of an async one together in one event loop.

    Use it as a context manager, or `close` it. Threads may share it; their calls then take turns.
    """

    def __init__(self, spec: str, config: RewardConfig | None = None) -> None:
        """Starts nothing yet. Raises `ValueError` when `spec` has not the form of an import path."""
        module, colon, function = spec.rpartition(":")
        if not (colon and module and all(name.isidentifier() for name in function.split("."))):
            raise ValueError(f'reward={spec!r}: must be "package.module:function" or "path/to/file.py:function"')
        self.spec = spec
        self.config = config or RewardConfig()
        # Absolute, since the worker may have to be started again after a change of directory.
        self._target = f"{Path(module).absolute()}:{function}" if module.endswith(".py") else spec
        self._worker: _Worker | None = None
        self._ready: Ready | None = None
        self._start_s = 0.0
        self._lock = threading.Lock()
        self._closed = False

    def check(self, columns: Iterable[str] = ()) -> None:
        """Start the worker now. Raises `ValueError` when the function cannot be imported, or wants an argument that is
        neither `prompts` nor `completions` nor one of `columns`."""
        with self._lock:
            self._check(columns)

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]] | None = None
    ) -> RewardResult:
        """Rewards of N completions, each with its prompt and its entry of every column (lists of length N).

        A chunk that fails is tried again one completion at a time, so that only the culprit gets `failed_reward`.
        Raises `ValueError` for what no completion can be blamed for: lengths that differ, a column that the function
        wants and does not get, one that is not plain data, a function that cannot be imported.
        """
        start = time.monotonic()
        arguments = {**(columns or {}), "prompts": list(prompts), "completions": list(completions)}
        for name, values in arguments.items():
            if len(values) != len(completions):
                raise ValueError(f"{name}: has {len(values)} entries for {len(completions)} completions: must be equal")
        with self._lock:
            ready = self._check(columns or ())
            used = {k: v for k, v in arguments.items() if ready.accepted is None or k in ready.accepted}
            try:
                tally = self._score(used, len(completions), is_async=ready.is_async)
            except BaseException:  # an answer may still be on its way; never mistake it for the next call's
                self._stop_worker()
                raise
        tally.report(self.spec, self.config)
        return RewardResult(
            rewards=tally.rewards,
            num_raised=tally.counts["raised"],
            num_timed_out=tally.counts["timed_out"],
            num_invalid=tally.counts["invalid"],
            seconds=time.monotonic() - start,
        )

    def close(self) -> None:
        """Kill the worker. A `score` under way in another thread gives up after the call that it is waiting for."""
        self._closed = True
        with self._lock:
            self._stop_worker()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, columns: Iterable[str]) -> Ready:
        if self._closed:
            raise ValueError(f"reward={self.spec!r}: the runner is closed; make a new RewardRunner")
        if self._ready is None:
            try:
                self._ready = self._start_worker().ready
            except _WorkerError as error:
                raise ValueError(
                    f"reward={self.spec!r}: cannot be used: {error}. "
                    'Name an importable function as "package.module:function" or "path/to/file.py:function"'
                ) from None
        missing = set(self._ready.required) - {"prompts", "completions", *columns}
        if missing:
            raise ValueError(
                f"reward={self.spec!r}: the function wants {sorted(missing)}, the task has only the columns "
                f"{sorted(columns)}: rename its parameter, give it a default, or add the column"
            )
        return self._ready

    def _start_worker(self) -> _Worker:
        if self._worker is None:
            start = time.monotonic()
            self._worker = _Worker(self._target, self.config.start_timeout_s)
            self._start_s = time.monotonic() - start
        return self._worker

    def _stop_worker(self) -> str:
        worker, self._worker = self._worker, None
        return worker.kill() if worker else "is not running"

    def _score(self, arguments: dict[str, list[Any]], num_items: int, *, is_async: bool) -> _Tally:
        """First every chunk, then the items of those that failed. An async function's calls share one batch."""
        config = self.config
        tally = _Tally(rewards=[config.failed_reward] * num_items)
        chunks = [
            range(first, min(first + config.chunk_size, num_items)) for first in range(0, num_items, config.chunk_size)
        ]

        def batches(parts: list[range]) -> list[list[range]]:
            return ([parts] if parts else []) if is_async else [[part] for part in parts]

        queue = deque(batches(chunks))
        while queue:
            batch = queue.popleft()
            if self._closed or tally.num_hangs >= config.max_failures or tally.lost_s >= self._patience_s():
                tally.give_up(sum(map(len, batch)))
                continue
            start = time.monotonic()
            results, is_hang = self._call(batch, arguments)
            suspects: list[range] = []
            for part, result in zip(batch, results, strict=True):
                if result is None:  # in one batch with a hang that may be another part's: try it alone
                    queue.append([part])
                elif result.kind == "ok":
                    tally.accept(part, result)
                elif len(part) == 1:
                    tally.fail(result.kind, 1, result.error)
                else:
                    suspects += [range(item, item + 1) for item in part]
            if any(result is None or result.kind != "ok" for result in results):
                tally.num_hangs += is_hang
                tally.lost_s += time.monotonic() - start
            queue.extend(batches(suspects))
        return tally

    def _patience_s(self) -> float:
        """What `max_failures` hangs would take."""
        return self.config.max_failures * (self._limit_s() + self._start_s)

    def _limit_s(self) -> float:
        """How long the worker may be silent while it has something to do."""
        assert self._ready is not None
        return self.config.timeout_s * (1.0 + _GRACE * self._ready.is_async)

    def _call(self, batch: list[range], arguments: dict[str, list[Any]]) -> tuple[list[Result | None], bool]:
        """The result of each part, None where the worker was lost and another part may be to blame; and whether any
        part took too long."""
        results: list[Result | None] = [None] * len(batch)
        limit_s = self._limit_s()
        kind: Literal["raised", "timed_out"] = "raised"
        try:
            worker = self._start_worker()
            message = Batch(parts=[_encode(part, arguments) for part in batch], timeout_s=self.config.timeout_s)
            send(worker.sock, message, deadline=time.monotonic() + limit_s)
            for _ in batch:  # coroutines of a batch may take turns, so the clock restarts when one is done
                result = receive(worker.sock, Result, deadline=time.monotonic() + limit_s)
                results[result.part] = result
            return results, any(result is not None and result.kind == "timed_out" for result in results)
        except UnicodeEncodeError as failure:  # a lone surrogate in a model's output
            error = f"{type(failure).__name__}: {failure}"
        except TimeoutError:
            self._stop_worker()
            kind, error = "timed_out", f"not done after {self.config.timeout_s:g} s"
        except _WorkerError as failure:
            error = f"the worker could not be started again: {failure}"
        except (EOFError, ConnectionError, msgspec.DecodeError, IndexError):
            error = f"the worker process {self._stop_worker()}"
        if len(batch) == 1:
            results = [Result(part=0, kind=kind, error=error)]
        return results, kind == "timed_out"


def _encode(part: range, arguments: dict[str, list[Any]]) -> msgspec.Raw:
    sliced = {name: values[part.start : part.stop] for name, values in arguments.items()}
    try:
        return msgspec.Raw(msgspec.msgpack.encode(Part(num_items=len(part), arguments=sliced)))
    except (TypeError, OverflowError) as error:
        for name, values in sliced.items():
            try:
                msgspec.msgpack.encode(values)
            except (TypeError, OverflowError):
                raise ValueError(
                    f"columns[{name!r}]: cannot be sent to the reward process ({error}): must be plain data "
                    "(text, numbers of 64 bits, lists, dicts)"
                ) from None
        raise


@dataclass(kw_only=True)
class _Tally:
    """The rewards of one `score`, all failed to begin with, and what went wrong."""

    rewards: list[float]
    counts: Counter[FailureKind] = field(default_factory=Counter)
    first_errors: dict[FailureKind, str] = field(default_factory=dict)
    num_given_up: int = 0
    num_hangs: int = 0
    lost_s: float = 0.0

    def accept(self, part: range, result: Result) -> None:
        for item, value in zip(part, result.values, strict=True):
            if value is None:
                self.fail("invalid", 1, result.error)
            else:
                self.rewards[item] = value

    def fail(self, kind: FailureKind, num_items: int, error: str) -> None:
        self.counts[kind] += num_items
        self.first_errors.setdefault(kind, error)

    def give_up(self, num_items: int) -> None:
        self.num_given_up += num_items
        self.fail("timed_out", num_items, "not called")

    def report(self, spec: str, config: RewardConfig) -> None:
        """One warning per kind of failure."""
        for kind, count in sorted(self.counts.items()):
            logger.warning(
                "reward %s: %d of %d completions %s and get %g; the first: %s",
                *(spec, count, len(self.rewards), kind.replace("_", " "), config.failed_reward),
                self.first_errors[kind][:500],
            )
        if self.num_given_up:
            logger.warning(
                "reward %s: gave up on %d of %d completions after %d hangs and %.1f s in failing calls "
                "(max_failures=%d, timeout_s=%g): make the function faster, or raise these limits",
                *(spec, self.num_given_up, len(self.rewards), self.num_hangs, self.lost_s),
                *(config.max_failures, config.timeout_s),
            )


class _WorkerError(Exception):
    """The worker could not be started; the message says why."""


class _Worker:
    """The process, its connection, and its lifeline (a pipe on its stdin that carries nothing, see `worker.py`)."""

    def __init__(self, target: str, timeout_s: float) -> None:
        """Raises `_WorkerError` when the process is not ready after `timeout_s` or cannot load the function."""
        deadline = time.monotonic() + timeout_s
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "algos.rewards.worker", target, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            send(self.sock, Hello(sys_path=[entry or os.getcwd() for entry in sys.path]), deadline=deadline)
            self.ready = receive(self.sock, Ready, deadline=deadline)
        except TimeoutError:
            self.kill()
            raise _WorkerError(f"its imports took more than start_timeout_s={timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise _WorkerError(f"the process {self.kill()} while importing it; see stderr") from None
        except BaseException:
            self.kill()
            raise
        if self.ready.error:
            self.kill()
            raise _WorkerError(self.ready.error)

    def kill(self) -> str:
        """Kill the process group, reap the process and free its descriptors. Returns how the process had ended."""
        # The group before the wait: until the process is reaped its id cannot be another's.
        os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.sock.close()
        return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
