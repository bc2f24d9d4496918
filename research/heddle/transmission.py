"""Which KV moves now: Heddle, §5.3, "KV Cache Migration". Torch-free.

The paper does not say when an epoch begins: here whenever something is asked for or has ended. The longest trajectory
goes first. One that shares a replica with another that moves waits.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engines.sequence import SequenceId


@dataclass(frozen=True, order=True)
class Transmission:
    """The KV of a trajectory, from one replica to another. They are ordered: the longest first, ties by id."""

    negative_length: float
    sequence_id: SequenceId
    source: int
    target: int
    seconds: float


class Transmissions:
    """Those that wait, and those that run. Time is passed in."""

    def __init__(self) -> None:
        self._waiting: list[Transmission] = []
        self._running: dict[SequenceId, tuple[float, Transmission]] = {}
        """When each ends."""

    def ask(self, transmission: Transmission) -> None:
        """Replaces an earlier one of this trajectory that has not begun."""
        self.cancel(transmission.sequence_id)
        insort(self._waiting, transmission)

    def cancel(self, sequence_id: SequenceId) -> Transmission | None:
        """Forgets and returns the trajectory's transmission, if it has not begun."""
        for place, one in enumerate(self._waiting):
            if one.sequence_id == sequence_id:
                return self._waiting.pop(place)
        return None

    def begin(self, now: float) -> list[Transmission]:
        """Begins an epoch: returns what begins now, the longest first."""
        self._running = {id_: one for id_, one in self._running.items() if one[0] > now}
        busy = {replica for _, one in self._running.values() for replica in (one.source, one.target)}
        begun, waiting = list[Transmission](), list[Transmission]()
        for one in self._waiting:
            if busy.isdisjoint((one.source, one.target)):
                busy |= {one.source, one.target}
                begun.append(one)
                self._running[one.sequence_id] = now + one.seconds, one
            else:
                waiting.append(one)
        self._waiting = waiting
        return begun

    def left_s(self, sequence_id: SequenceId, now: float) -> float:
        """Seconds until the trajectory's running transmission ends; 0 of none."""
        end, _ = self._running.get(sequence_id, (now, None))
        return max(0.0, end - now)
