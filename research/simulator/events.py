"""Virtual time: what happens when. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Appointment:
    """Something that will happen, unless it is cancelled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def keep(self) -> bool:
        """Acts, and returns True; returns False when it was cancelled."""
        if self._action is None:
            return False
        self._action()
        return True


class EventQueue:
    """Runs actions in the order of their times. No clock of the machine enters.

    Actions of one time run in the order of their `rank`, so that this order does not depend on when they were
    scheduled; only those of one rank run in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """The time of the action that runs, in seconds."""
        self._heap: list[tuple[float, tuple[int, ...], int, Appointment]] = []
        self._count = 0

    def at(self, time: float, rank: tuple[int, ...], action: Callable[[], None]) -> Appointment:
        """Schedules an action. Raises ValueError for a time that has passed."""
        if time < self.now:
            raise ValueError(f"time={time}: has passed, since it is {self.now}; give a later one")
        appointment = Appointment(action)
        heapq.heappush(self._heap, (time, rank, self._count, appointment))
        self._count += 1
        return appointment

    def run_next(self) -> bool:
        """Runs the next action and returns True; returns False when there is none."""
        while self._heap:
            time, _, _, appointment = heapq.heappop(self._heap)
            before, self.now = self.now, time
            if appointment.keep():
                return True
            self.now = before
        return False
