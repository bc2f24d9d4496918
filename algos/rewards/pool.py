"""Rewards beside a rollout: what has finished is scored while the rest is generated."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from algos.rewards.runner import RewardResult, RewardRunner, Scoring

ItemKey = tuple[int, int]
"""(position of the problem, sample index)."""
_MOST_CHUNKS = 16
"""Chunks of an async function that are handed over at a time; a sync one gets them singly."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A completion to score."""

    key: ItemKey
    prompt: str
    completion: str
    columns: Mapping[str, Any]


class RewardPool:
    """Scores one rollout. `add` and go on; `stop` when the rollout has ended; then `finish` with what is left.

    A thread hands what has been added to the runner's process, a bounded number of completions at a time, those of a
    call in the order of their keys. What waits holds no more than references to the completions. Use it as a context
    manager, so that an error ends the thread.
    """

    def __init__(self, runner: RewardRunner) -> None:
        """Starts nothing yet."""
        self._runner = runner
        self._scoring = Scoring(runner)
        self._waiting: deque[Item] = deque()
        self._taken: list[ItemKey] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds_beside = 0.0
        """Spent in calls before `stop`."""

    def add(self, item: Item) -> None:
        """Returns at once. Any thread may call it, until `stop`."""
        with self._changed:
            assert not self._stopping, "an item came after the rollout's end"
            self._waiting.append(item)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="reward-pool", daemon=True)
                self._thread.start()

    def stop(self) -> list[ItemKey]:
        """Waits for the call under way, which the runner's limits bound, and begins no other.

        Returns the keys of what was called for; what was added and is not among them has been dropped. Raises what
        `RewardRunner.score` raises.
        """
        self._tell_to_stop()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return list(self._taken)

    def finish(self, rest: Iterable[Item]) -> tuple[dict[ItemKey, float], RewardResult]:
        """Scores the rest, in the order of the keys; returns the rewards of all, and the result that they are from."""
        rest = sorted(rest, key=lambda item: item.key)
        if rest:
            self._score(rest)
        result = self._scoring.finish()
        return dict(zip(self._taken, result.rewards, strict=True)), result

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell_to_stop()

    def _tell_to_stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify()

    def _work(self) -> None:
        try:
            is_async = self._runner.is_async
            most = self._runner.config.completions_per_call(is_async) * (_MOST_CHUNKS if is_async else 1)
            while items := self._take(most):
                start = time.monotonic()
                self._score(items)
                self.seconds_beside += time.monotonic() - start
        except BaseException as error:
            self._error = error

    def _take(self, most: int) -> list[Item]:
        """The next items, the earliest first; none when it is time to stop."""
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait()
            return sorted(
                (self._waiting.popleft() for _ in range(min(most, len(self._waiting)))), key=lambda item: item.key
            )

    def _score(self, items: list[Item]) -> None:
        self._taken += [item.key for item in items]
        self._scoring.add(
            [item.prompt for item in items],
            [item.completion for item in items],
            {name: [item.columns[name] for item in items] for name in items[0].columns},
        )
