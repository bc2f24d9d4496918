"""Unfinished trajectories in the order of their predicted lengths. Torch-free."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from engines.coordination.views import EndedView, SequenceView
from engines.sequence import SequenceId
from research.heddle.priority import Estimate


class Expected(NamedTuple):
    """A trajectory, in generated tokens."""

    total: float
    """As predicted, or as it has already."""
    done: float


class Ranks:
    """Trajectories by predicted total, longest first, ties by id. A change moves at most the entries of a list, which
    takes some microseconds with ten thousand of them.

    One that nothing has predicted counts as long as the mean of those that something has.
    """

    def __init__(self) -> None:
        self._order: list[tuple[float, SequenceId]] = []
        self._keys: dict[SequenceId, float] = {}
        self._predicted: dict[SequenceId, float] = {}
        self._done: dict[SequenceId, int] = {}
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._keys

    def __iter__(self) -> Iterator[SequenceId]:
        """The longest first."""
        return (sequence_id for _, sequence_id in self._order)

    @property
    def mean(self) -> float:
        """Of the predicted totals; 0 without one."""
        return max(0.0, self._sum / len(self._predicted)) if self._predicted else 0.0

    def total(self, sequence_id: SequenceId) -> float:
        return -self._keys[sequence_id]

    def expected(self) -> list[Expected]:
        """The longest first, as they were when they were last put."""
        return [Expected(-key, float(self._done[sequence_id])) for key, sequence_id in self._order]

    def rank(self, sequence_id: SequenceId) -> int:
        """How many come before it."""
        return bisect_left(self._order, (self._keys[sequence_id], sequence_id))

    def put(self, sequence: SequenceView) -> None:
        """Adds a trajectory, or gives it the place of its present prediction."""
        sequence_id = sequence.sequence_id
        self._done[sequence_id] = sequence.num_generated
        if sequence.prediction is not None:
            total = sequence.prediction.total
            self._sum += total - self._predicted.get(sequence_id, 0.0)
            self._predicted[sequence_id] = total
        key = -self.estimate(sequence).total
        if self._keys.get(sequence_id) != key:
            self._take(sequence_id)
            self._keys[sequence_id] = key
            insort(self._order, (key, sequence_id))

    def remove(self, ended: EndedView) -> None:
        """One that is not here is no error."""
        self._take(ended.sequence_id)
        self._done.pop(ended.sequence_id, None)
        self._sum -= self._predicted.pop(ended.sequence_id, 0.0)

    def _take(self, sequence_id: SequenceId) -> None:
        key = self._keys.pop(sequence_id, math.nan)
        if key == key:
            del self._order[bisect_left(self._order, (key, sequence_id))]

    def estimate(self, sequence: SequenceView) -> Estimate:
        prediction = sequence.prediction
        total = max(self.mean if prediction is None else prediction.total, sequence.num_generated)
        return Estimate(total - sequence.num_generated, total)
