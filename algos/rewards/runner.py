"""Runs a user's reward function in a process of its own, under a wall-clock limit: it can fail, but not stop a run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from algos.rewards.process import WorkerError, WorkerProcess
from algos.rewards.protocol import Batch, Part, Ready, Result, receive, send

logger = logging.getLogger(__name__)

FailureKind = Literal["raised", "timed_out", "invalid"]
_MOST_S = 1e6
"""Longest limit: sockets and timers take no number of seconds that is much longer."""
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
    beside_rollout: bool = True
    """Score completions as they finish, while others are generated: a call then gets what has finished by then. Off:
    after it, in calls that depend on nothing timed; with a `chunk_size` of the group size each gets a group."""

    def __post_init__(self) -> None:
        checks = (
            ("timeout_s", 0 < self.timeout_s <= _MOST_S, f"above 0, and at most {_MOST_S:g} (seconds)"),
            ("chunk_size", isinstance(self.chunk_size, int) and self.chunk_size >= 1, "an integer of at least 1"),
            ("failed_reward", abs(self.failed_reward) < float("inf"), "a finite number"),
            ("max_failures", isinstance(self.max_failures, int) and self.max_failures >= 1, "an integer of at least 1"),
            ("start_timeout_s", 0 < self.start_timeout_s <= _MOST_S, f"above 0, and at most {_MOST_S:g} (seconds)"),
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
        self.closed = False
        # Absolute, since the worker may have to be started again after a change of directory.
        self._target = f"{Path(module).absolute()}:{function}" if module.endswith(".py") else spec
        self._worker: WorkerProcess | None = None
        self._ready: Ready | None = None
        self._start_s = 0.0
        self._lock = threading.Lock()
        self._call_numbers = itertools.count(1)

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
        scoring = Scoring(self)
        scoring.add(prompts, completions, columns)
        return scoring.finish()

    @property
    def is_async(self) -> bool:
        """Whether the function is; starts the worker if need be."""
        with self._lock:
            return self._load().is_async

    def close(self) -> None:
        """Kill the worker. A `score` under way in another thread gives up after the call that it is waiting for."""
        self.closed = True
        with self._lock:
            self._stop_worker()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self) -> Ready:
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

    def _check(self, columns: Iterable[str]) -> Ready:
        ready = self._load()
        missing = set(ready.required) - {"prompts", "completions", *columns}
        if missing:
            raise ValueError(
                f"reward={self.spec!r}: the function wants {sorted(missing)}, the task has only the columns "
                f"{sorted(columns)}: rename its parameter, give it a default, or add the column"
            )
        return ready

    @contextlib.contextmanager
    def turn(self, columns: Iterable[str] | None) -> Iterator[Ready]:
        """For `Scoring`: the worker, for this thread alone. Raises `ValueError` as `check`; with None, when all has
        been checked before, nothing, not even for a runner closed since."""
        with self._lock:
            ready = self._check(columns) if columns is not None else self._ready
            assert ready is not None
            try:
                yield ready
            except BaseException:  # an answer may still be on its way; never mistake it for the next call's
                self._stop_worker()
                raise

    def _start_worker(self) -> WorkerProcess:
        if self._worker is not None and self._worker.has_ended():
            self._stop_worker()
        if self._worker is None:
            start = time.monotonic()
            self._worker = WorkerProcess(self._target, self.config.start_timeout_s)
            self._start_s = time.monotonic() - start
        return self._worker

    def _stop_worker(self) -> str:
        worker, self._worker = self._worker, None
        return worker.kill() if worker else "is not running"

    @property
    def patience_s(self) -> float:
        """What `max_failures` hangs would take."""
        return self.config.max_failures * (self._limit_s() + self._start_s)

    def _limit_s(self) -> float:
        """How long the worker may be silent while it has something to do."""
        assert self._ready is not None
        return self.config.timeout_s * (1.0 + _GRACE * self._ready.is_async)

    def call(self, batch: list[range], arguments: dict[str, list[Any]]) -> tuple[list[Result | None], bool]:
        """For `Scoring`, in its turn. The result of each part, None where the worker was lost and another part may be
        to blame; and whether any part took too long."""
        results: list[Result | None] = [None] * len(batch)
        number = next(self._call_numbers)
        kind: Literal["raised", "timed_out"] = "raised"
        try:
            parts = [_encode(part, arguments) for part in batch]
            message = Batch(call=number, parts=parts, timeout_s=self.config.timeout_s)
            try:
                self._exchange(message, results)
            except ConnectionError:  # the worker ended before it took the message: no completion is to blame
                self._stop_worker()
                self._exchange(message, results)
            return results, any(result is not None and result.kind == "timed_out" for result in results)
        except UnicodeEncodeError as failure:  # a lone surrogate in a model's output
            error = f"{type(failure).__name__}: {failure}"
        except TimeoutError:
            self._stop_worker()
            kind, error = "timed_out", f"not done after {self.config.timeout_s:g} s"
        except WorkerError as failure:
            error = f"the worker could not be started again: {failure}"
        except (EOFError, ConnectionError, msgspec.DecodeError, IndexError):
            error = f"the worker process {self._stop_worker()}"
        if len(batch) == 1:
            results = [Result(call=number, part=0, kind=kind, error=error)]
        return results, kind == "timed_out"

    def _exchange(self, batch: Batch, results: list[Result | None]) -> None:
        worker, limit_s = self._start_worker(), self._limit_s()
        send(worker.sock, batch, deadline=time.monotonic() + limit_s)
        deadline = time.monotonic() + limit_s
        while None in results:
            result = receive(worker.sock, Result, deadline=deadline)
            if result.call == batch.call and results[result.part] is None:  # user code can reach the socket, too
                results[result.part] = result
                deadline = time.monotonic() + limit_s  # coroutines of a batch may take turns


class Scoring:
    """The scoring of a set of completions in several goes, with one allowance of failures and one report.

    `add` scores what it can; what failed is tried again by `finish`, when all that is sound has been scored.
    """

    def __init__(self, runner: RewardRunner) -> None:
        self._runner = runner
        self._tally = _Tally()
        self._arguments: dict[str, list[Any]] = {}
        self._again: deque[list[range]] = deque()
        """Batches of parts whose first call failed."""
        self._seconds = 0.0

    def add(
        self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]] | None = None
    ) -> None:
        """Calls the function for N more completions. Arguments and errors as `RewardRunner.score`."""
        start = time.monotonic()
        arguments = {**(columns or {}), "prompts": list(prompts), "completions": list(completions)}
        for name, values in arguments.items():
            if len(values) != len(completions):
                raise ValueError(f"{name}: has {len(values)} entries for {len(completions)} completions: must be equal")
        runner, first, size = self._runner, len(self._tally.rewards), self._runner.config.chunk_size
        with runner.turn(columns or ()) as ready:
            used = {k: v for k, v in arguments.items() if ready.accepted is None or k in ready.accepted}
            if self._arguments and used.keys() != self._arguments.keys():
                raise ValueError(
                    f"columns: {sorted(used)} now, {sorted(self._arguments)} before; give all completions the same"
                )
            for name, values in used.items():
                self._arguments.setdefault(name, []).extend(values)
            self._tally.rewards += [runner.config.failed_reward] * len(completions)
            end = len(self._tally.rewards)
            chunks = [range(at, min(at + size, end)) for at in range(first, end, size)]
            for batch in _batches(chunks, ready):
                self._call(batch, ready)
        self._seconds += time.monotonic() - start

    def finish(self) -> RewardResult:
        """Tries again what failed, one completion at a time; the rewards of all, in the order in which they came."""
        start = time.monotonic()
        if self._again:
            with self._runner.turn(None) as ready:
                while self._again:
                    self._call(self._again.popleft(), ready)
        self._tally.report(self._runner.spec, self._runner.config)
        return RewardResult(
            rewards=self._tally.rewards,
            num_raised=self._tally.counts["raised"],
            num_timed_out=self._tally.counts["timed_out"],
            num_invalid=self._tally.counts["invalid"],
            seconds=self._seconds + time.monotonic() - start,
        )

    def _call(self, batch: list[range], ready: Ready) -> None:
        runner, tally = self._runner, self._tally
        if runner.closed or tally.num_hangs >= runner.config.max_failures or tally.lost_s >= runner.patience_s:
            tally.give_up(sum(map(len, batch)))
            return
        start = time.monotonic()
        results, is_hang = runner.call(batch, self._arguments)
        if is_hang and not tally.num_hangs:  # at once: a report comes only after all calls
            limit_s = runner.config.timeout_s
            logger.warning("reward %s: a call was not done after timeout_s=%g", runner.spec, limit_s)
        suspects: list[range] = []
        for part, result in zip(batch, results, strict=True):
            if result is None:  # in one batch with a hang that may be another part's: try it alone
                self._again.append([part])
            elif result.kind == "ok":
                tally.accept(part, result)
            elif len(part) == 1:
                tally.fail(result.kind, 1, result.error)
            else:
                tally.note_call(len(part), result.error)
                suspects += [range(item, item + 1) for item in part]
        if any(result is None or result.kind != "ok" for result in results):
            tally.num_hangs += is_hang
            tally.lost_s += time.monotonic() - start
        self._again.extend(_batches(suspects, ready))


def _batches(parts: list[range], ready: Ready) -> list[list[range]]:
    """What is called at a time: an async function's parts all together, a sync one's singly."""
    if ready.is_async:
        return [parts] if parts else []
    return [[part] for part in parts]


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
    """The rewards of a `Scoring`, all failed to begin with, and what went wrong."""

    rewards: list[float] = field(default_factory=list)
    counts: Counter[FailureKind] = field(default_factory=Counter)
    first_errors: dict[FailureKind, str] = field(default_factory=dict)
    num_given_up: int = 0
    num_hangs: int = 0
    lost_s: float = 0.0
    failed_call: str = ""
    """The first call for several completions that failed, in words."""

    def accept(self, part: range, result: Result) -> None:
        for item, value in zip(part, result.values, strict=True):
            if value is None:
                self.fail("invalid", 1, result.error)
            else:
                self.rewards[item] = value

    def fail(self, kind: FailureKind, num_items: int, error: str) -> None:
        self.counts[kind] += num_items
        self.first_errors.setdefault(kind, error)

    def note_call(self, num_items: int, error: str) -> None:
        self.failed_call = self.failed_call or f"of {num_items} completions: {error}"

    def give_up(self, num_items: int) -> None:
        self.num_given_up += num_items
        self.fail("timed_out", num_items, "not called")

    def report(self, spec: str, config: RewardConfig) -> None:
        """One warning per kind of failure."""
        if self.failed_call and not self.counts:
            logger.warning(
                "reward %s: a call failed that failed for none of its completions alone; the rewards are those of "
                "single calls. It was %s",
                *(spec, self.failed_call[:500]),
            )
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
