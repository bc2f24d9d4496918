"""Rewards beside a rollout: finished completions are scored while others are still generated."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from algos.rewards.protocol import Result
from algos.rewards.runner import UNANSWERED, FailureKind, RewardRunner
from engines.models.chat import Messages

logger = logging.getLogger(__name__)

ItemKey = tuple[int, int]
"""(uid of the problem, sample index)."""
_MOST_CHUNKS = 16
"""Chunks that are sent together to an async function; a sync function gets one at a time."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A completion to score."""

    key: ItemKey
    prompt: str | Messages
    completion: str
    columns: Mapping[str, Any]


class RewardPool:
    """Scores one rollout. Call `add` during the rollout, `stop` after it, then `finish` with the other completions.

    A thread sends the added completions to the runner's process, a bounded number at a time, sorted by key. All
    completions of a failed call get `failed_reward`; the call is not repeated. Use the pool as a context manager, so
    that an error ends the thread, without a wait for its call.
    """

    def __init__(self, runner: RewardRunner) -> None:
        """Starts the thread."""
        self._runner = runner
        self._waiting: deque[Item] = deque()
        self._added: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True for each completion that was added; then False."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._error: BaseException | None = None
        self._rewards: dict[ItemKey, float] = {}
        self._failed: Counter[FailureKind] = Counter()
        self._first_errors: dict[FailureKind, str] = {}
        self._num_hangs = self._num_given_up = 0
        self.seconds_beside = 0.0
        """Seconds that the thread spent in reward calls, before `stop`."""
        self._thread.start()

    def add(self, item: Item) -> None:
        """Queues a completion and returns at once. Any thread may call it, until `stop`."""
        self._waiting.append(item)
        self._added.put(True)

    def stop(self) -> list[ItemKey]:
        """Waits for the running call, whose time the runner limits, and starts no other.

        Returns the keys of the completions scored so far; other completions that were added are dropped. Raises
        ValueError for errors that no completion has caused: a column that the function requires is missing, a column is
        not plain data, or the function cannot be imported.
        """
        self._end()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return list(self._rewards)

    def finish(self, rest: Iterable[Item]) -> tuple[dict[ItemKey, float], Counter[FailureKind]]:
        """Scores the rest. Returns the rewards of all scored completions, which are finite, and the number of failed
        ones by kind; logs one warning per kind. Raises the same errors as `stop`."""
        if items := list(rest):
            self._score(items)
        spec, config, num_items = self._runner.spec, self._runner.config, len(self._rewards)
        for kind, count in sorted(self._failed.items()):
            logger.warning(
                "reward %s: %d of %d completions %s and get %g; the first: %s",
                *(spec, count, num_items, kind.replace("_", " "), config.failed_reward),
                self._first_errors[kind][:500],
            )
        if self._num_given_up:
            logger.warning(
                "reward %s: gave up on %d of %d completions after %d hangs or ends of its process (max_failures=%d, "
                "timeout_s=%g): mend the function, make it faster, or raise these limits",
                *(spec, self._num_given_up, num_items, self._num_hangs, config.max_failures, config.timeout_s),
            )
        return self._rewards, self._failed

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._is_stopped = True
        self._added.put(False)

    def _run(self) -> None:
        while self._added.get() and not self._is_stopped:
            self._score_waiting()

    def _score_waiting(self) -> None:
        """Scores the completions added first, unless earlier calls have taken all of them."""
        if not self._waiting or self._error is not None:
            return
        try:
            is_async = self._runner.ready.is_async
            most = self._runner.config.completions_per_call(is_async) * (_MOST_CHUNKS if is_async else 1)
            start = time.monotonic()
            self._score([self._waiting.popleft() for _ in range(min(most, len(self._waiting)))])
            self.seconds_beside += time.monotonic() - start
        except BaseException as error:
            self._error = error

    def _score(self, items: list[Item]) -> None:
        items = sorted(items, key=lambda item: item.key)
        arguments: dict[str, list[Any]] = {name: [item.columns[name] for item in items] for name in items[0].columns}
        arguments["prompts"] = [item.prompt for item in items]
        arguments["completions"] = [item.completion for item in items]
        with self._runner.turn(items[0].columns) as ready:
            used = {k: v for k, v in arguments.items() if ready.accepted is None or k in ready.accepted}
            size = self._runner.config.completions_per_call(ready.is_async)
            slices = [slice(at, min(at + size, len(items))) for at in range(0, len(items), size)]
            # An async function is called on all slices together, a sync one on one slice at a time.
            for together in [slices] if ready.is_async else [[one] for one in slices]:
                for one, result in zip(together, self._call(together, used), strict=True):
                    self._take(items[one], result)

    def _call(self, slices: list[slice], arguments: dict[str, list[Any]]) -> list[Result]:
        runner, config = self._runner, self._runner.config
        if runner.closed or self._num_hangs >= config.max_failures:
            self._num_given_up += sum(one.stop - one.start for one in slices)
            return [Result(part=UNANSWERED, kind="timed_out", error="not called")] * len(slices)
        results = runner.call(slices, arguments)
        hang = next((result for result in results if result.kind == "timed_out"), None)
        if hang and not self._num_hangs:  # logged at once: `finish` reports only after all calls
            logger.warning("reward %s: a call timed out (timeout_s=%g): %s", runner.spec, config.timeout_s, hang.error)
        self._num_hangs += hang is not None or not runner.has_worker
        if len(slices) == 1:
            return results
        # One call has ended the process for all that ran in it: each call without an answer is made again, alone.
        pairs = zip(slices, results, strict=True)
        return [self._call([one], arguments)[0] if result.part == UNANSWERED else result for one, result in pairs]

    def _take(self, items: list[Item], result: Result) -> None:
        kind: FailureKind = "invalid" if result.kind == "ok" else result.kind
        values = result.values if result.kind == "ok" else [None] * len(items)
        if None in values:
            self._failed[kind] += values.count(None)
            self._first_errors.setdefault(kind, result.error)
        for item, value in zip(items, values, strict=True):
            self._rewards[item.key] = self._runner.config.failed_reward if value is None else value
