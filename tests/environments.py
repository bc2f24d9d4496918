"""Environments for tests, run by threads of the test's own process."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines.rollout.environment import Answer, Environment, Observation
from engines.sequence import SequenceId


class Echo:
    """Says a part of each turn again, and ends after a number of turns that the texts decide."""

    def __init__(self, *, has_reward: bool = True) -> None:
        self.texts: list[str] = []
        self._has_reward = has_reward

    def reset(self, greeting: str | None = None, most: int = 4, **columns: Any) -> str | None:
        self._most = most
        return greeting

    def step(self, text: str) -> Observation | None:
        self.texts.append(text)
        if len(self.texts) >= self._most or sum(map(ord, text)) % 11 == 3:
            return None
        return Observation(text=f"{len(self.texts)}:{text[-4:]}{text[:2]}>")

    def get_reward(self) -> float | None:
        return float(sum(map(len, self.texts))) if self._has_reward else None


class Local:
    """Runs environments on threads; counts the calls, and keeps the objects."""

    def __init__(self, make: Callable[[], Environment] = Echo, num_threads: int = 4, delay_s: float = 0.0) -> None:
        self._make = make
        self._delay_s = delay_s
        self._random = random.Random(0)
        self._threads = ThreadPoolExecutor(num_threads)
        self.objects: dict[SequenceId, Any] = {}
        self.ended: Counter[SequenceId] = Counter()
        self.num_calls = 0

    def begin(self, sequence_id: SequenceId, columns: Mapping[str, Any], answer: Callable[[Answer], None]) -> None:
        assert sequence_id not in self.objects, "a trajectory begins twice"
        self.objects[sequence_id] = environment = self._make()
        self._call(lambda: environment.reset(**columns), answer, is_first=True)

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        assert not self.ended[sequence_id], "a turn after the end"
        environment = self.objects[sequence_id]
        self._call(lambda: environment.step(text), answer, is_first=False)

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        self.ended[sequence_id] += 1
        assert self.ended[sequence_id] == 1, "a trajectory ends twice"
        if reward is not None:
            self._threads.submit(lambda: reward(self.objects[sequence_id].get_reward()))

    def _call(self, call: Callable[[], Any], answer: Callable[[Answer], None], *, is_first: bool) -> None:
        self.num_calls += 1
        delay_s = self._random.random() * self._delay_s

        def run() -> None:
            time.sleep(delay_s)
            try:
                given = call()
            except Exception as error:
                answer(Answer(text=None, done=True, seconds=0.0, failure="raised", error=repr(error)))
                return
            text = given.text if isinstance(given, Observation) else given
            is_over = given.done if isinstance(given, Observation) else given is None and not is_first
            role = given.role if isinstance(given, Observation) else "user"
            answer(Answer(text=text, done=is_over, role=role))

        self._threads.submit(run)

    def texts(self) -> dict[SequenceId, list[str]]:
        return {id_: one.texts for id_, one in self.objects.items()}

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
