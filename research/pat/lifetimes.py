"""How many tokens unfinished sequences will still generate, estimated from those that have ended. Torch-free.

PAT (§4.2) takes the limit for all of them, which promises more from a switch than it gives. The estimate here is the
product-limit estimator (Kaplan and Meier, 1958): a sequence that is still running counts as one that has survived its
present length, so that short sequences, which end first, do not bias it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.float64]
_MOST = 20_000


def run_to_limit(generated: Lengths, limits: Lengths) -> Lengths:
    """Returns the tokens to come if every sequence runs to its limit (PAT §4.2, est_rem_time)."""
    return limits - generated


class Lifetimes:
    """Learns lengths; estimates tokens to come."""

    def __init__(self, ended: Iterable[int] = ()) -> None:
        """`ended`: generated tokens of sequences that ended before, as in earlier rollouts."""
        self._ended = deque(map(float, ended), maxlen=_MOST)
        self._sorted: Lengths | None = None

    def add(self, num_generated: int) -> None:
        """Learns that a sequence has ended. The latest 20,000 count."""
        self._ended.append(float(num_generated))
        self._sorted = None

    def remaining(self, generated: Lengths, limits: Lengths) -> Lengths:
        """Returns the expected tokens to come of each unfinished sequence, at least 1 and at most up to its limit.

        Sequences get evenly spread quantiles of the lengths that are left to them, in an order that mixes them, so that
        the set as a whole has the estimated distribution. Longer than all that have ended, they run to their limit.
        """
        lengths, survival = self._curve(generated)
        count = len(generated)
        shares = (np.argsort(np.argsort((np.arange(count) * 0.6180339887498949) % 1.0)) + 0.5) / count
        here = np.concatenate([[1.0], survival])[np.searchsorted(lengths, generated, side="right")]
        # The first length at which the estimated survival falls to the sequence's quantile.
        places = np.searchsorted(-survival, -(here * (1 - shares)), side="left")
        ends = np.where(places < len(lengths), np.append(lengths, np.inf)[places], limits)
        return np.clip(ends, generated + 1, np.maximum(limits, generated + 1)) - generated

    def _curve(self, running: Lengths) -> tuple[Lengths, Lengths]:
        """Returns lengths at which sequences have ended, rising, and the share that survives each of them."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._ended))
        lengths, deaths = np.unique(self._sorted, return_counts=True)
        alive = np.sort(running)
        at_risk = len(self._sorted) - np.searchsorted(self._sorted, lengths, side="left")
        at_risk = at_risk + len(alive) - np.searchsorted(alive, lengths, side="left")
        return lengths, np.cumprod(1.0 - deaths / np.maximum(at_risk, 1), dtype=np.float64)
