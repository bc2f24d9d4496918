"""How many pages a rollout may hold beside a serving model: preemptive sharing (ROSE §4.1, Table 2). Torch-free.

The paper gives H and the factor; marks and window are ours. What remains of the pool beside the
rollout's budget is the serving model's, and H of it is to stay unused: the marks lie in H, and move as the budget does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from engines.constraints import Fraction, Seconds, Share, check_fields
from engines.serving.policies import MemoryView


@dataclass(frozen=True, kw_only=True)
class SharingOptions:
    """Options of `ServingFirst`. Raises ValueError for a bad field."""

    headroom: Share = 0.2
    """H, as a share of the pool's pages (the paper's example: of the GPU's memory)."""
    window_s: Seconds = 60.0
    """How far back the serving model's use counts, when a phase begins."""
    high: Fraction = 0.5
    """Share of H that the serving model may use; beyond it, the rollout is cut."""
    low: Fraction = 0.25
    """Share of H that it may still use after a cut."""
    factor: Annotated[int, Meta(ge=2, description="an integer of at least 2")] = 2
    """By which a cut divides the budget."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.low > self.high:
            raise ValueError(f"SharingOptions.low={self.low}: must be at most high={self.high}")


class ServingFirst:
    """A `MemoryPolicy`: a budget for each phase of rollouts, which bursts of serving cut, and which never grows in it.

    A cut ends the pressure: where dividing the budget once leaves serving above the low mark, it is divided again at
    once. So the next cut needs another rise through H, and serving and budget fit the pool whenever serving takes
    at most (1 - high) H between two looks. A single division cannot promise this for budgets below H.
    """

    def __init__(self, options: SharingOptions | None = None) -> None:
        self.options = options or SharingOptions()
        self._use = PeakUse(self.options.window_s)

    def observe(self, view: MemoryView) -> None:
        self._use.observe(view.now, view.num_serving)

    def begin(self, view: MemoryView) -> int:
        self.observe(view)
        return max(0, view.num_pages - self._use.peak(view.now) - self.headroom(view))

    def cut(self, view: MemoryView) -> int | None:
        budget = view.budget
        if not budget or view.num_serving <= self._mark(view, budget, self.options.high):
            return None
        while budget and view.num_serving > self._mark(view, budget, self.options.low):
            budget //= self.options.factor
        return budget

    def headroom(self, view: MemoryView) -> int:
        return math.ceil(self.options.headroom * view.num_pages - 1e-9)

    def _mark(self, view: MemoryView, budget: int, share: float) -> float:
        """Returns the serving model's pages when it uses this share of H."""
        return view.num_pages - budget - (1 - share) * self.headroom(view)


@dataclass(frozen=True)
class StaticSplit:
    """A `MemoryPolicy`: the rollout has a fixed share of the pool, and keeps it (Table 2: static partition).

    It is a split only where the serving model may not take more than the rest. Raises ValueError for a bad field.
    """

    share: Fraction = 0.5

    def __post_init__(self) -> None:
        check_fields(self)

    def observe(self, view: MemoryView) -> None:
        """Serving's use changes nothing."""

    def begin(self, view: MemoryView) -> int:
        return int(self.share * view.num_pages + 1e-9)

    def cut(self, view: MemoryView) -> None:
        return None

    def headroom(self, view: MemoryView) -> int:
        return 0


class PeakUse:
    """The most pages in use within a sliding window, in constant time per observation, amortised.

    Use stays what it was until the next observation. Times must not fall.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._falling: deque[tuple[int, float]] = deque()
        """Pages, each fewer than those before them; and until when."""

    def observe(self, now: float, pages: int) -> None:
        if self._falling:
            self._falling[-1] = self._falling[-1][0], now
        while self._falling and self._falling[-1][0] <= pages:
            self._falling.pop()
        self._falling.append((pages, math.inf))
        self._expire(now)

    def peak(self, now: float) -> int:
        """Returns the most pages that were in use from `now - window_s` on; 0 if nothing was observed."""
        self._expire(now)
        return self._falling[0][0] if self._falling else 0

    def _expire(self, now: float) -> None:
        while self._falling and self._falling[0][1] < now - self.window_s:
            self._falling.popleft()
