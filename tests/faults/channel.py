"""Control connections that are late, repeat themselves, and outside the world lose messages."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.control.ends import Joined, Lost, Notice, Received, Woken
from engines.control.transport import Client, Server


@dataclass(kw_only=True)
class Faults:
    """How often, as shares of the messages, and how long."""

    rng: random.Random
    late: float = 0.0
    max_late_s: float = 0.02
    repeated: float = 0.0
    lost: float = 0.0
    """Within a connection, which the transport never does."""
    counts: Counter[str] = field(default_factory=Counter)

    def happens(self, share: float, what: str) -> bool:
        happens = self.rng.random() < share
        self.counts[what] += happens
        return happens


class Held:
    """Messages on their way: originals in order, repetitions any time after."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._items: list[tuple[float, int, Any]] = []
        self._counter = itertools.count()
        self._last_due = 0.0

    @property
    def is_holding(self) -> bool:
        return bool(self._items)

    def next_due(self) -> Any:
        """Returns what has arrived by now, or None."""
        is_due = bool(self._items) and self._items[0][0] <= time.monotonic()
        return heapq.heappop(self._items)[2] if is_due else None

    def put(self, item: Any, *, may_repeat: bool) -> None:
        faults = self._faults
        due = time.monotonic()
        if faults.happens(faults.late, "late"):
            due += faults.rng.uniform(0, faults.max_late_s)
        self._last_due = due = max(due, self._last_due)
        heapq.heappush(self._items, (due, next(self._counter), item))
        if may_repeat and faults.happens(faults.repeated, "repeated"):
            again = due + faults.rng.choice([0.0, faults.rng.uniform(0, 5 * faults.max_late_s)])
            heapq.heappush(self._items, (again, next(self._counter), item))

    def receive(self, receive: Callable[[float], Any], take: Callable[[Any], None], timeout_s: float) -> Any:
        """As an end's `receive`, which is the argument; `take` puts what came."""
        deadline = time.monotonic() + timeout_s
        while True:
            while (item := receive(0.0)) is not None:
                take(item)
            if (item := self.next_due()) is not None:
                return item
            now = time.monotonic()
            wait_s = min([deadline, *(due for due, _, _ in self._items[:1])]) - now
            if now >= deadline:
                return None
            if (item := receive(max(0.0, wait_s))) is not None:
                take(item)


class FaultyClient:
    """A `Client` with faults."""

    def __init__(self, end: Client, faults: Faults) -> None:
        self.name = end.name
        self._end, self._faults, self._held = end, faults, Held(faults)

    def receive(self, timeout_s: float) -> bytes | None:
        return self._held.receive(self._end.receive, lambda item: self._held.put(item, may_repeat=True), timeout_s)

    def send(self, payload: bytes) -> None:
        self._end.send(payload)
        if self._faults.happens(self._faults.repeated, "repeated"):
            self._end.send(payload)

    def close(self) -> None:
        self._end.close()


class FaultyServer:
    """A `Server` with faults. `on_notice` is called with each notice that the coordinator is about to take, and with
    None whenever it looks for one, in its thread.
    """

    def __init__(self, end: Server, faults: Faults, on_notice: Callable[[Notice | None], None]) -> None:
        self._end, self.faults, self._held = end, faults, Held(faults)
        self.on_notice = on_notice
        self.address = end.address
        self._told = set(end.peers())

    def receive(self, timeout_s: float) -> Notice | None:
        self.on_notice(None)
        notice: Notice | None = self._held.receive(self._end.receive, self._take, timeout_s)
        if isinstance(notice, Joined):
            self._told.add(notice.peer)
        elif isinstance(notice, Lost):
            self._told.discard(notice.peer)
        if not isinstance(notice, Woken | None):  # else what it does when it is woken would wake it
            self.on_notice(notice)
        return notice

    def wake(self) -> None:
        self._end.wake()

    def _take(self, notice: Notice) -> None:
        is_message = isinstance(notice, Received)
        if not (is_message and self.faults.happens(self.faults.lost, "events lost")):
            self._held.put(notice, may_repeat=is_message)

    def send(self, peer: str, payload: bytes) -> None:
        if self.faults.happens(self.faults.lost / 4, "commands lost"):  # dearer: only silence tells
            return
        for _ in range(1 + self.faults.happens(self.faults.repeated, "repeated")):
            try:
                self._end.send(peer, payload)
            except ConnectionError:
                if peer not in self._told:  # else its Lost is late
                    raise

    def peers(self) -> list[str]:
        return self._end.peers()

    def close(self, reason: str = "the coordinator has closed") -> None:
        self._end.close(reason)
