"""How far a drafter's estimates carry over to what is drawn: learnt from the drafts that were tried. Torch-free."""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from engines.speculation.drafter import Draft


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
        lengths = np.array([len(draft.tokens) for draft in drafts])
        exists = np.arange(lengths.max()) < lengths[:, None]
        estimates = np.ones((len(drafts), 1 + exists.shape[1]))
        estimates[:, 1:][exists] = [*chain.from_iterable(draft.probabilities for draft in drafts)]
        rates = np.array(self._hits) / np.array(self._tries)
        shares = self._CLASSES * estimates[:, 1:] / np.maximum(estimates[:, :-1], 1e-12)
        classes = np.minimum(shares.astype(np.int64), self._CLASSES - 1)
        return np.multiply.accumulate(rates[classes], axis=1) * exists

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
