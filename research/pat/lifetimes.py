"""How many tokens unfinished sequences will still generate, estimated from those that have ended. Torch-free.

PAT (§4.2) takes the limit for all of them, which promises more from a switch than it gives. The estimate here is the
product-limit estimator (Kaplan and Meier, 1958): a sequence that is still running, or that was cut at its cap, counts
as one that has survived its length, so that neither short sequences, which end first, nor caps bias it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engines.sequence import FinishReason

Lengths = NDArray[np.float64]
Lifetime = tuple[int, bool]
"""(generated tokens, whether the sequence was cut there and would have gone on)."""
_MOST = 20_000


def lifetimes_of(ended: Iterable[tuple[int, FinishReason]]) -> list[Lifetime]:
    """Returns the lifetimes of sequences with these generated tokens that were not aborted."""
    return [(num_generated, reason == "length") for num_generated, reason in ended if reason != "abort"]


def run_to_limit(generated: Lengths, limits: Lengths) -> Lengths:
    """Returns the tokens to come if every sequence runs to its limit (PAT §4.2, est_rem_time)."""
    return limits - generated


class Lifetimes:
    """Learns lengths; estimates tokens to come."""

    def __init__(self, ended: Iterable[Lifetime] = ()) -> None:
        """`ended`: sequences that ended before, as in earlier rollouts."""
        self._ended = deque(ended, maxlen=_MOST)
        self._sorted: tuple[Lengths, Lengths] | None = None

    def add(self, ended: Iterable[Lifetime]) -> None:
        """Learns of sequences that have ended. The latest 20,000 count."""
        self._ended.extend(ended)
        self._sorted = None

    def remaining(self, generated: Lengths, limits: Lengths) -> Lengths:
        """Returns the expected tokens to come of each unfinished sequence, at least 1 and at most up to its limit.

        Sequences get evenly spread quantiles of the lengths that are left to them, in an order that mixes them, so that
        the set as a whole has the estimated distribution. Longer than all that have ended by themselves, they run to
        their limit.
        """
        lengths, survival = self._curve(generated)
        count = len(generated)
        shares = (np.argsort(np.argsort((np.arange(count) * 0.6180339887498949) % 1.0)) + 0.5) / count
        here = np.concatenate([[1.0], survival])[np.searchsorted(lengths, generated, side="right")]
        # The first length at which the estimated survival falls to the sequence's quantile.
        places = np.searchsorted(-survival, -(here * (1 - shares)), side="left")
        ends = np.where(places < len(lengths), np.append(lengths, np.inf)[places], limits)
        return np.clip(ends, generated + 1, np.maximum(limits, generated + 1)) - generated

    def means(self, generated: Lengths, limits: Lengths) -> Lengths:
        """Returns the mean of the tokens to come of sequences that have come as far as each unfinished one."""
        lengths, survival = self._curve(generated)
        starts, shares = np.append(0.0, lengths), np.append(1.0, survival)
        areas = np.append(0.0, np.cumsum(shares[:-1] * np.diff(starts)))

        def area(length: Lengths) -> Lengths:
            """The integral of the surviving share up to these lengths."""
            place = np.searchsorted(starts, length, side="right") - 1
            return areas[place] + shares[place] * (length - starts[place])

        here = shares[np.searchsorted(starts, generated, side="right") - 1]
        return (area(np.maximum(limits, generated)) - area(generated)) / here

    def _curve(self, running: Lengths) -> tuple[Lengths, Lengths]:
        """Returns lengths at which sequences have ended, rising, and the share that survives each of them."""
        if self._sorted is None:
            rows = np.array(self._ended, float).reshape(-1, 2)
            self._sorted = np.sort(rows[:, 0]), np.sort(rows[rows[:, 1] == 0, 0])
        everyone, ends = self._sorted
        lengths, deaths = np.unique(ends, return_counts=True)
        alive = np.sort(running)
        at_risk = len(everyone) - np.searchsorted(everyone, lengths, side="left")
        at_risk = at_risk + len(alive) - np.searchsorted(alive, lengths, side="left")
        return lengths, np.cumprod(1.0 - deaths / np.maximum(at_risk, 1), dtype=np.float64)
