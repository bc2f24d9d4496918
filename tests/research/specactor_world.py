"""A drafter and a verifier with sequences between them, played event by event, for SpecActor's formulas."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Chain:
    """Guesses of one sequence, each made from the ones before it."""

    end: int
    """The position behind the last one."""
    wrong: int | None = None
    """The first wrong one."""
    arrived: int = 0
    """The end that the verifier knows."""

    def fits(self, num_tokens: int) -> bool:
        return self.wrong is None or self.wrong >= num_tokens


@dataclass
class Played:
    """Sequences without an end. A guess is right with probability `p`.

    `draft_s`: sequences in a pass -> its seconds; `verify_s`: rows -> seconds. Both vary by `jitter`, as in life, since
    otherwise a ratio of V and D that is a fraction of small numbers keeps the phase in which it began.
    """

    draft_s: Callable[[int], float]
    verify_s: Callable[[int], float]
    p: float
    window: int
    mode: str
    batch: int
    delay_s: float = 0.0
    ahead: bool = True
    jitter: float = 0.05
    seed: int = 0
    num_passes: int = 0
    num_rows: int = 0
    _now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def rate(self, num_passes: int) -> float:
        """Returns tokens per second of a sequence."""
        self._draws, self._numbers = random.Random(self.seed), count()
        self._chains = [Chain(0) for _ in range(self.batch)]
        self._seen, self._known, self._heard = list(self._chains), [0] * self.batch, [0] * self.batch
        self._drafter_works = self._verifier_works = False
        self._begin()
        while self.num_passes < num_passes:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._begin()
        return sum(self._known) / self.batch / self._now

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), event))

    def _vary(self) -> float:
        return 1 + self.jitter * (self._draws.random() - 0.5)

    def _begin(self) -> None:
        """Whoever does nothing begins a pass, after all that happens at this moment."""
        if self._events and self._events[0][0] == self._now:
            return
        if not self._drafter_works:
            self._begin_draft()
        if not self._verifier_works:
            self._begin_pass()

    def _begin_draft(self) -> None:
        for number, heard in enumerate(self._heard):
            if not self._chains[number].fits(heard) or self._chains[number].end < heard:
                self._chains[number] = Chain(heard)
        limit = self.window * (2 if self.ahead else 1)
        room = [one.end - heard < limit for one, heard in zip(self._chains, self._heard, strict=True)]
        drafting = [number for number in range(self.batch) if room[number]]
        if drafting:
            self._drafter_works = True
            self._after(self.draft_s(len(drafting)) * self._vary(), lambda: self._end_draft(drafting))

    def _end_draft(self, drafting: list[int]) -> None:
        self._drafter_works = False
        for number in drafting:
            chain = self._chains[number]
            if self._draws.random() >= self.p and chain.wrong is None:
                chain.wrong = chain.end
            chain.end += 1
        ends = [(number, self._chains[number], self._chains[number].end) for number in drafting]

        def arrive() -> None:
            for number, chain, end in ends:
                self._seen[number], chain.arrived = chain, end

        self._after(self.delay_s, arrive)

    def _begin_pass(self) -> None:
        rows = []
        for chain, known in zip(self._seen, self._known, strict=True):
            come = max(0, chain.arrived - known) if chain.fits(known) else 0
            if self.mode == "filled":
                rows.append(min(come, self.window) + 1)
            else:
                rows.append(self.window if come >= self.window else 0)
        if any(rows):
            self._verifier_works = True
            self.num_passes += 1
            self.num_rows += sum(rows)
            self._after(self.verify_s(sum(rows)) * self._vary(), lambda: self._end_pass(rows))

    def _end_pass(self, rows: list[int]) -> None:
        self._verifier_works = False
        for number, taken in enumerate(rows):
            known, chain = self._known[number], self._seen[number]
            wrong = chain.wrong if chain.fits(known) else None
            self._known[number] += taken if wrong is None else min(taken, wrong - known + 1)
        known = list(self._known)

        def hear() -> None:
            self._heard = known

        self._after(self.delay_s, hear)
