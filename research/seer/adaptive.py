"""How long drafts should be (Seer §4.4, "adaptive speculation range"; §5): two policies. Torch-free.

The paper names thresholds by concurrency and gives neither their values nor the algorithm. `Thresholds` is one reading
of it. `MarginalGain` is ours: it adds draft tokens, the likeliest first, as long as tokens per second rise. Both need
the time of a pass by its rows, and have no clock: what they decide is a function of what they were given.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import mul
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from engines.constraints import Count, NonNegative, check_value
from engines.speculation.drafter import Draft
from engines.speculation.policy import RowSeconds
from engines.speculation.verify import num_accepted

Slack = Annotated[float, Meta(ge=1, description="at least 1")]


class Calibration:
    """How often a draft token is drawn, once all before it were, by the drafter's estimate of that: ten classes.

    A drafter's estimate is a share of what it has seen; how far that carries over differs by drafter, text and
    temperature. Until a class has been tried, the estimate counts as it is, with the weight of ten tries. Old tries
    lose weight, since the text changes: by new tries, and by `forget`.
    """

    _CLASSES, _PRIOR, _MOST = 10, 10.0, 2000.0

    def __init__(self) -> None:
        self._prior = [self._PRIOR * (number + 0.5) / self._CLASSES for number in range(self._CLASSES)]
        self._tries = [self._PRIOR] * self._CLASSES
        self._hits = list(self._prior)

    def paths(self, drafts: list[Draft]) -> NDArray[np.float64]:
        """Returns for each draft, [drafts, longest], the probability that each token and all before it are drawn; 0
        beyond its end."""
        rates = [hits / tries for hits, tries in zip(self._hits, self._tries, strict=True)]
        longest = max(len(draft.tokens) for draft in drafts)
        rows = []
        for draft in drafts:
            chances = (rates[number] for number in self._classes(draft.probabilities))
            rows.append([*accumulate(chances, mul), *[0.0] * (longest - len(draft.tokens))])
        return np.array(rows)

    def observe(self, probabilities: list[float], num_accepted: int) -> None:
        """Learns that of a draft with these estimates, as in `Draft`, the first `num_accepted` tokens were drawn."""
        for place, number in enumerate(self._classes(probabilities[: num_accepted + 1])):
            self._tries[number] += 1
            self._hits[number] += place < num_accepted
            if self._tries[number] > self._MOST:
                self._tries[number] /= 2
                self._hits[number] /= 2

    def forget(self, share: float) -> None:
        """Takes back this share of what was learnt."""
        for number, prior in enumerate(self._prior):
            self._tries[number] += share * (self._PRIOR - self._tries[number])
            self._hits[number] += share * (prior - self._hits[number])

    def _classes(self, probabilities: list[float]) -> list[int]:
        """Returns each token's class, by its probability if all before it were drawn."""
        before = [1.0, *probabilities]
        return [
            min(self._CLASSES - 1, int(self._CLASSES * path / max(last, 1e-12)))
            for last, path in zip(before, probabilities, strict=False)
        ]


class _Table:
    """The seconds of passes by their rows, each computed once; more rows never take less time."""

    def __init__(self, seconds: RowSeconds) -> None:
        self._compute = seconds
        self._seconds = [0.0]

    def upto(self, rows: int) -> list[float]:
        """Returns the first `rows` + 1 entries, or more; entry i is of i rows."""
        for count in range(len(self._seconds), rows + 1):
            self._seconds.append(max(self._seconds[-1], self._compute(count)))
        return self._seconds


class _Branch(NamedTuple):
    """The beginning of another path of a draft."""

    draft: int
    path: int
    length: int
    gain: float
    """Expected tokens beyond those of the paths before it."""


class MarginalGain:
    """A `SpeculationPolicy`: the drafts that make the expected tokens per second of the pass as many as possible.

    A pass of n tokens with k draft tokens takes `seconds(n + k)` and yields a token for each sequence, and each draft
    token with the probability of its path (`Calibration`). A path's probabilities do not rise, so that the k likeliest
    draft tokens are whole beginnings of drafts: all k are tried out, none included. Where k = 0 was best for some
    passes, drafts are looked up in fewer and fewer of them, until the batch is smaller; and what was learnt is slowly
    forgotten, so that they are tried again. Another path of a draft is taken whole or not at all: it adds the
    probabilities of the tokens that no path before it has, for a row per token and one more.
    """

    _PATIENCE, _MOST_SKIPPED, _FORGOTTEN = 8, 64, 0.02

    def __init__(self, seconds: RowSeconds, *, margin: float = 0.05) -> None:
        """Drafts must promise a gain of more than `margin`, since times and probabilities are estimates.

        Raises ValueError for a negative one.
        """
        check_value("MarginalGain.margin", margin, NonNegative)
        self._table = _Table(seconds)
        self._margin = margin
        self._calibration = Calibration()
        self._num_vain = 0
        """Passes in a row for which no draft was worth it."""
        self._num_skipped = 0
        self._vain_tokens = 0
        """Tokens of the smallest of these passes."""

    def wants(self, num_tokens: int, num_sequences: int) -> bool:
        if self._num_vain < self._PATIENCE or num_tokens < self._vain_tokens:
            return True
        self._num_skipped += 1
        if self._num_skipped < min(self._MOST_SKIPPED, 2 ** (self._num_vain - self._PATIENCE)):
            return False
        self._num_skipped = 0
        return True

    def shorten(self, num_tokens: int, drafts: list[Draft]) -> list[Draft]:
        if not any(draft.tokens for draft in drafts):
            return drafts
        paths = self._calibration.paths(drafts)
        gains = paths.ravel()
        order = np.argsort(-gains, kind="stable")[: np.count_nonzero(gains)]
        owners, gains, rows = order // paths.shape[1], gains[order], np.ones(len(order), np.int64)
        branches = self._branches(drafts)
        if branches:
            owners = np.concatenate([owners, -1 - np.arange(len(branches))])
            gains = np.concatenate([gains, [one.gain for one in branches]])
            rows = np.concatenate([rows, [1 + one.length for one in branches]])
            order = np.argsort(-gains / rows, kind="stable")
            owners, gains, rows = owners[order], gains[order], rows[order]
        yields = len(drafts) + np.concatenate([[0.0], np.cumsum(gains)])
        ends = num_tokens + np.concatenate([[0], np.cumsum(rows)])
        rates = yields / np.array(self._table.upto(int(ends[-1])))[ends]
        best = int(rates.argmax())
        if rates[best] <= (1 + self._margin) * rates[0]:
            best = 0
        if not best:
            self._calibration.forget(self._FORGOTTEN)
        self._num_vain = 0 if best else self._num_vain + 1
        self._vain_tokens = num_tokens if self._num_vain <= 1 else min(self._vain_tokens, num_tokens)
        chosen = owners[:best]
        lengths = np.bincount(chosen[chosen >= 0], minlength=len(drafts)).tolist()
        others = [[0] * len(draft.others) for draft in drafts]
        for number in (-1 - chosen[chosen < 0]).tolist():
            others[branches[number].draft][branches[number].path] = branches[number].length
        return [draft.cut(length, more) for draft, length, more in zip(drafts, lengths, others, strict=True)]

    def _branches(self, drafts: list[Draft]) -> list[_Branch]:
        """Returns for each other path the beginning with the most expected tokens per row."""
        places = [(number, path) for number, draft in enumerate(drafts) for path in range(len(draft.others))]
        if not places:
            return []
        found = []
        chances = self._calibration.paths([drafts[number].others[path] for number, path in places])
        for (number, path), probabilities in zip(places, chances, strict=True):
            draft = drafts[number]
            tokens = draft.others[path].tokens
            shared = max(num_accepted(tokens, one.tokens) for one in (draft, *draft.others[:path]))
            if shared < len(tokens):
                gains = probabilities[shared : len(tokens)].cumsum()
                length = shared + 1 + int((gains / np.arange(shared + 2, len(tokens) + 2)).argmax())
                found.append(_Branch(number, path, length, float(gains[length - shared - 1])))
        return found

    def observe(self, probabilities: list[float], num_accepted: int) -> None:
        self._calibration.observe(probabilities, num_accepted)


class Thresholds:
    """A `SpeculationPolicy`: all drafts have one length, by the number of sequences and the acceptance so far.

    The knee is the most rows whose pass takes at most `slack` times as long as a pass without drafts. The length is the
    sequences' share of the rows below the knee, times the average acceptance rate; below 1 nothing is drafted. Other
    paths of the same length take what is left of the share.
    """

    _WEIGHT = 0.02  # of a new draft in the average
    _RECOVERY = 0.002  # of the average in a pass without drafts, so that they are tried again

    def __init__(self, seconds: RowSeconds, *, slack: float = 1.1, most: int = 16) -> None:
        """Raises ValueError for a slack below 1 or a length below 1."""
        check_value("Thresholds.slack", slack, Slack)
        check_value("Thresholds.most", most, Count)
        self._table = _Table(seconds)
        self._slack, self._most = slack, most
        self._acceptance = 1.0

    def wants(self, num_tokens: int, num_sequences: int) -> bool:
        if self._length(num_tokens, num_sequences) >= 1:
            return True
        self._acceptance = min(1.0, self._acceptance + self._RECOVERY)
        return False

    def _num_rows(self, num_tokens: int, num_sequences: int) -> int:
        """Returns a sequence's share of the rows below the knee."""
        most = num_tokens + self._most * num_sequences
        seconds = self._table.upto(most)
        knee = bisect_right(seconds, self._slack * seconds[num_tokens], hi=most + 1) - 1
        return (knee - num_tokens) // num_sequences

    def _length(self, num_tokens: int, num_sequences: int) -> int:
        return int(self._acceptance * self._num_rows(num_tokens, num_sequences))

    def shorten(self, num_tokens: int, drafts: list[Draft]) -> list[Draft]:
        length = self._length(num_tokens, len(drafts))
        others = [length] * ((self._num_rows(num_tokens, len(drafts)) - length) // (1 + length))
        return [draft.cut(length, others) for draft in drafts]

    def observe(self, probabilities: list[float], num_accepted: int) -> None:
        self._acceptance += self._WEIGHT * (num_accepted / len(probabilities) - self._acceptance)
