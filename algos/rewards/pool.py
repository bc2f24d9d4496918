"""Rewards beside a rollout: what has finished is scored while the rest is generated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    call in the order of their keys. Use it as a context manager, so that an error ends the thread.
    """

    def __init__(self, runner: RewardRunner) -> None:
        """Starts nothing yet."""
        self._runner = runner
        self._scoring = Scoring(runner)
        self._waiting: deque[Item] = deque()
        self._taken: list[ItemKey] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-pool")
        self._error: BaseException | None = None
        self.seconds_beside = 0.0
        """Spent in calls before `stop`."""

    def add(self, item: Item) -> None:
        """Returns at once. Any thread may call it, until `stop`."""
        self._waiting.append(item)
        self._thread.submit(self._score_waiting)

    def stop(self) -> list[ItemKey]:
        """Waits for the call under way, which the runner's limits bound, and begins no other.

        Returns the keys of what was called for; what was added and is not among them has been dropped. Raises what
        `RewardRunner.score` raises.
        """
        self._thread.shutdown(cancel_futures=True)
        if self._error is not None:
            raise self._error
        return list(self._taken)

    def finish(self, rest: Iterable[Item]) -> tuple[dict[ItemKey, float], RewardResult]:
        """Scores the rest, in the order of the keys; returns the rewards of all, and the result that they are from."""
        if items := list(rest):
            self._score(items)
        result = self._scoring.finish()
        return dict(zip(self._taken, result.rewards, strict=True)), result

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score_waiting(self) -> None:
        """Those that came first, if an earlier call has not taken them all."""
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
        self._taken += [item.key for item in items]
        self._scoring.add(
            [item.prompt for item in items],
            [item.completion for item in items],
            {name: [item.columns[name] for item in items] for name in items[0].columns},
        )
