"""A drafter and a verifier with sequences between them, played event by event with the state machines of live runs."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from engines.speculation.verify import num_accepted
from engines.speculation.window import Guesses, Heard

RIGHT, WRONG = 0, 1


@dataclass
class Played:
    """Sequences without an end, whose tokens are all `RIGHT`. A guess is right with probability `p`.

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
        self._guesses = [Guesses(0, self.window, self.ahead) for _ in range(self.batch)]
        self._drawn: list[list[int]] = [[] for _ in range(self.batch)]  # that the drafter takes before its next pass
        self._heard = [Heard() for _ in range(self.batch)]
        self._tokens: list[list[int]] = [[] for _ in range(self.batch)]
        self._drafter_works = self._verifier_works = False
        self._begin()
        while self.num_passes < num_passes:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._begin()
        return sum(map(len, self._tokens)) / self.batch / self._now

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
        for one, drawn in zip(self._guesses, self._drawn, strict=True):
            if drawn:
                one.commit(drawn)
                drawn.clear()
        drafting = [number for number, one in enumerate(self._guesses) if one.room]
        if drafting:
            self._drafter_works = True
            self._after(self.draft_s(len(drafting)) * self._vary(), lambda: self._end_draft(drafting))

    def _end_draft(self, drafting: list[int]) -> None:
        self._drafter_works = False
        messages = []
        for number in drafting:
            one = self._guesses[number]
            one.add([RIGHT if self._draws.random() < self.p else WRONG], [self.p])
            messages.append((self._heard[number], one.num_known, list(one.tokens), list(one.shares), not one.room))

        def arrive() -> None:
            for heard, num_known, tokens, shares, is_all in messages:
                heard.hear(num_known, tokens, shares, is_all=is_all)

        self._after(self.delay_s, arrive)

    def _begin_pass(self) -> None:
        drafts = [one.draft(tokens, self.window).tokens for one, tokens in zip(self._heard, self._tokens, strict=True)]
        if self.mode == "filled":
            rows = [len(draft) + 1 for draft in drafts]
        else:
            rows = [len(draft) if len(draft) == self.window else 0 for draft in drafts]
        if any(rows):
            self._verifier_works = True
            self.num_passes += 1
            self.num_rows += sum(rows)
            self._after(self.verify_s(sum(rows)) * self._vary(), lambda: self._end_pass(drafts, rows))

    def _end_pass(self, drafts: list[list[int]], rows: list[int]) -> None:
        self._verifier_works = False
        drawn = []
        for tokens, draft, taken in zip(self._tokens, drafts, rows, strict=True):
            drawn.append([RIGHT] * (taken and 1 + num_accepted(draft[: taken - 1], [RIGHT] * taken)))
            tokens += drawn[-1]

        def hear() -> None:
            for waiting, more in zip(self._drawn, drawn, strict=True):
                waiting += more

        self._after(self.delay_s, hear)
