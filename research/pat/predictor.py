"""Seconds of a decode step by batch size, context and TP size, interpolated between profiled points (PAT §4.2)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Point = tuple[int, int, float]
"""(sequences, sum of their context lengths in tokens, seconds of a decode step), of one replica."""


class StepPredictor:
    """For each profiled batch size a piecewise-linear curve over context tokens; a batch size between two profiled ones
    gets the line between their curves at the same tokens (Fig. 6).

    Below the first profiled point of a curve its value counts. Beyond the last one the curve goes on with the slope of
    all its points, since noise makes that of two points steep or negative; beyond the largest batch, the line through
    the last two batch sizes goes on. Neither falls.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        """Raises ValueError for fewer than two batch sizes, or for a batch size with fewer than two points."""
        curves: dict[int, dict[int, float]] = {}
        for batch, num_tokens, seconds in points:
            curves.setdefault(batch, {})[num_tokens] = seconds
        if len(curves) < 2 or any(len(curve) < 2 for curve in curves.values()):
            sizes = {batch: len(curve) for batch, curve in sorted(curves.items())}
            raise ValueError(f"points by batch size: {sizes}; give two batch sizes or more, each with two or more")
        self._batches = np.array(sorted(curves), dtype=float)
        self._curves = [_Curve(*np.array(sorted(curves[batch].items())).T) for batch in sorted(curves)]

    def seconds(self, batch: ArrayLike, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Returns seconds, elementwise; 0 where the batch is empty."""
        batch, num_tokens = np.broadcast_arrays(np.asarray(batch, float), np.asarray(num_tokens, float))
        values = np.stack([curve.seconds(num_tokens) for curve in self._curves])
        lower = np.clip(np.searchsorted(self._batches, batch, side="right") - 1, 0, len(self._batches) - 2)
        start, end = self._batches[lower], self._batches[lower + 1]
        share = np.maximum(0.0, (batch - start) / (end - start))
        below, above = (np.take_along_axis(values, one[None], axis=0)[0] for one in (lower, lower + 1))
        within, beyond = np.minimum(share, 1.0), np.maximum(share - 1.0, 0.0)
        rise = above - below
        return np.where(batch > 0, below + within * rise + beyond * np.maximum(rise, 0.0), 0.0)


class _Curve:
    """A line through points, and beyond them with their slope by least squares, at least 0."""

    def __init__(self, xs: NDArray[np.float64], ys: NDArray[np.float64]) -> None:
        self._xs, self._ys = xs, ys
        offsets = xs - xs.mean()
        self._slope = max(0.0, float((offsets * ys).sum() / (offsets**2).sum()))

    def seconds(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(x, self._xs, self._ys) + self._slope * np.maximum(0.0, x - self._xs[-1])
