"""Which serving replicas a training job borrows: the idlest, each for one job at a time (ROSE §3, system workflow).

Torch-free. `now` is in seconds of any clock, and must not fall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.constraints import NonNegative, Seconds, check_fields


@dataclass
class MeanUse:
    """The mean share of a replica's KV memory that serving used within a sliding window.

    Use stays what it was until the next observation. Constant time per observation, amortised.
    """

    window_s: Seconds = 3600.0
    """The paper's example."""
    _spans: deque[tuple[float, float]] = field(default_factory=deque)
    """(start, use), each until the next one's start; the first one may begin before the window."""
    _sum: float = 0.0
    """Integral of the use over all spans but the last, from their starts."""

    def __post_init__(self) -> None:
        check_fields(self)

    def observe(self, now: float, use: float) -> None:
        """Takes a use from 0 to 1. Raises ValueError for another."""
        if not 0 <= use <= 1:
            raise ValueError(f"use={use}: a share of the KV memory, give one from 0 to 1")
        if self._spans:
            start, before = self._spans[-1]
            self._sum += (now - start) * before
        self._spans.append((now, use))
        self._expire(now)

    def mean(self, now: float) -> float:
        """Returns the mean over the window, or since the first observation if that is later. Raises ValueError without
        an observation."""
        if not self._spans:
            raise ValueError("MeanUse: nothing was observed; observe each replica before it may be lent")
        self._expire(now)
        (first, use), (last, at_last) = self._spans[0], self._spans[-1]
        start = max(first, now - self.window_s)
        if start >= now:
            return at_last
        return (self._sum + (now - last) * at_last - (start - first) * use) / (now - start)

    def _expire(self, now: float) -> None:
        while len(self._spans) > 1 and self._spans[1][0] <= now - self.window_s:
            start, use = self._spans.popleft()
            self._sum -= (self._spans[0][0] - start) * use
        if len(self._spans) == 1:
            self._sum = 0.0


@dataclass
class Lending:
    """The book of which replicas are lent to which job."""

    cool_down_s: NonNegative = 5.0
    """How long a replica gets no rollouts after one has stalled there; ours (the paper: it "reroutes")."""
    borrowers: dict[int, str] = field(default_factory=dict)
    """Replica -> the job that has it."""
    _stalled: dict[int, float] = field(default_factory=dict)
    """Replica -> when a rollout last stalled there."""

    def __post_init__(self) -> None:
        check_fields(self)

    def lend(self, job: str, count: int, uses: Mapping[int, float], now: float) -> list[int]:
        """Lends the job up to `count` of the replicas in `uses` (replica -> mean use), the idlest first; ties: by id.

        Those of other jobs, and those where a rollout has just stalled, are left out. Raises ValueError for a count
        below 1, or a job that has some already.
        """
        if count < 1:
            raise ValueError(f"count={count}: must be at least 1 replica")
        if job in self.borrowers.values():
            raise ValueError(f"job={job!r}: has borrowed replicas already; release them first")
        free = [replica for replica in uses if replica not in self.borrowers and not self._is_cooling(replica, now)]
        lent = sorted(free, key=lambda replica: (uses[replica], replica))[:count]
        self.borrowers.update(dict.fromkeys(lent, job))
        return lent

    def release(self, job: str) -> list[int]:
        """Takes all replicas back from the job; returns them."""
        released = self.of(job)
        for replica in released:
            del self.borrowers[replica]
        return released

    def stall(self, replica: int, now: float) -> None:
        """A rollout made no progress on this replica. It stays lent."""
        self._stalled[replica] = now

    def of(self, job: str) -> list[int]:
        """Returns the replicas that the job has."""
        return sorted(replica for replica, borrower in self.borrowers.items() if borrower == job)

    def ready(self, job: str, now: float) -> list[int]:
        """Returns the replicas that may get the job's next turns: without those where one has just stalled."""
        return [replica for replica in self.of(job) if not self._is_cooling(replica, now)]

    def _is_cooling(self, replica: int, now: float) -> bool:
        return now - self._stalled.get(replica, float("-inf")) < self.cool_down_s
