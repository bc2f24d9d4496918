"""Virtual time: what happens when. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Callable

# Of what happens at one time: first messages reach workers, then the coordinator, then steps end, then steps begin.
TO_WORKER, TO_CORE, STEP_END, TURN = range(4)


class EventQueue:
    """Runs actions in the order of their times. No clock of the machine enters.

    Actions of one time run in the order of their `rank`, so that this order does not depend on when they were
    scheduled; only those of one rank run in the order in which they were scheduled.
    """

    def __init__(self, *, now: float) -> None:
        self.now = now
        """The time of the action that runs, in seconds."""
        self._heap: list[tuple[float, tuple[int, ...], int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, rank: tuple[int, ...], action: Callable[[], None]) -> None:
        """Schedules an action. Raises ValueError for a time that has passed."""
        if time < self.now:
            raise ValueError(f"time={time}: has passed, since it is {self.now}; give a later one")
        heapq.heappush(self._heap, (time, rank, self._count, action))
        self._count += 1

    def run_until(self, time: float) -> None:
        """Runs the actions before this time, and stands at it."""
        while self._heap and self._heap[0][0] < time:
            self.run_next()
        self.now = time

    def run_next(self) -> bool:
        """Runs the next action and returns True; returns False when there is none."""
        if not self._heap:
            return False
        self.now, _, _, action = heapq.heappop(self._heap)
        action()
        return True
