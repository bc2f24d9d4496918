"""What drafting and verifying take: the D and V of SpecActor (§4.1), fitted to passes that were timed or priced.

Torch-free.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace
from engines.speculation.drafter import DraftPass

Point = tuple[float, float]
"""(batch, seconds of a pass)."""
Curve = Callable[[float], float]
"""Batch -> seconds."""


@dataclass(frozen=True)
class Affine:
    """Seconds of a pass over a batch, b slope + constant, as in §4.1."""

    slope: float
    constant: float

    def __call__(self, batch: float) -> float:
        return self.slope * batch + self.constant

    @staticmethod
    def fit(points: Iterable[Point]) -> Affine:
        """Returns the line with the least squares of relative errors. Raises ValueError for less than two batches."""
        batches, seconds = np.array(sorted(points), float).reshape(-1, 2).T
        if len(set(batches)) < 2:
            raise ValueError(f"points: have the batches {sorted(set(batches.tolist()))}; give two or more")
        columns = np.stack([batches, np.ones_like(batches)], axis=1) / seconds[:, None]
        slope, constant = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
        return Affine(float(slope), float(constant))


@dataclass(frozen=True)
class Pieces:
    """Lines between the points, and the last one beyond them; below the first batch its seconds.

    One line is off by up to a fifth where the memory bounds small batches and the products large ones (32B on four
    H100, 4 rows each), or by a third (on one).
    """

    batches: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, batch: float) -> float:
        place = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        start, end = self.batches[place - 1], self.batches[place]
        before, after = self.seconds[place - 1], self.seconds[place]
        return max(self.seconds[0], before + (batch - start) / (end - start) * (after - before))

    @staticmethod
    def fit(points: Iterable[Point]) -> Pieces:
        """Larger batches never take less time. Raises ValueError as `Affine.fit`."""
        ordered = sorted(points)
        Affine.fit(ordered)
        batches = sorted({batch for batch, _ in ordered})
        medians = [float(np.median([took for size, took in ordered if size == batch])) for batch in batches]
        return Pieces(tuple(batches), tuple(np.maximum.accumulate(medians).tolist()))


@dataclass(frozen=True)
class Verifier:
    """Seconds of a pass in which each sequence of a batch has as many rows: V, with a curve for each w."""

    curves: tuple[Curve, ...]
    """For 1 row, for 2, and so on."""

    def __call__(self, batch: float, rows: float) -> float:
        """`rows` may be a mean: of 2.5 it returns what is halfway between 2 and 3; below 1, sequences sit out."""
        if rows <= 1:
            return self.curves[0](batch * rows)
        lower = min(math.floor(rows), max(1, len(self.curves) - 1))
        below, above = self.curves[lower - 1](batch), self.curves[min(lower, len(self.curves) - 1)](batch)
        return below + (rows - lower) * (above - below)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the planner knows about speed."""

    drafts: Mapping[str, Curve]
    """By drafting method, D on one GPU: sequences -> seconds of a pass, which gives each of them one guess."""
    verifiers: Mapping[int, Callable[[float, float], float]]
    """By GPUs, V: sequences, rows of each (the guesses and one) -> seconds of a pass. `Verifier` is one."""
    lookups: Collection[str] = ()
    """The methods that find whole drafts, in the seconds of one pass, beside the target alone."""
    delay_s: float = 0.0
    """Of a message between drafter and verifier."""

    def draft(self, method: str, batch: int, num_gpus: int) -> float:
        """Returns D of `num_gpus` drafters of one GPU that share a batch."""
        return self.drafts[method](math.ceil(batch / num_gpus))

    def whole_drafts(self, method: str, batch: int, num_gpus: int, window: int) -> float:
        """Returns the seconds until each sequence of a batch has `window` guesses."""
        passes = min(window, 1) if method in self.lookups else window
        return passes * self.draft(method, batch, num_gpus) if passes else 0.0


def drafter_of(
    pace: Pace,
    spec: ReplicaSpec,
    method: str,
    *,
    batches: Collection[int],
    context: int,
    fit: Callable[[Iterable[Point]], Curve] = Pieces.fit,
) -> Curve:
    """Returns D of one GPU of a replica at this pace, for these batches of sequences with `context` tokens each."""

    def seconds(batch: int) -> float:
        rows = batch * spec.tp_size
        return pace.draft(spec, method, (DraftPass(rows, rows * context),))

    return fit((batch, seconds(batch)) for batch in batches)


def verifier_of(
    pace: Pace,
    spec: ReplicaSpec,
    *,
    batches: Collection[int],
    max_rows: int,
    context: int,
    fit: Callable[[Iterable[Point]], Curve] = Pieces.fit,
) -> Verifier:
    """Returns V of a replica at this pace, through passes of these batches of sequences with `context` tokens each."""

    def seconds(batch: int, rows: int) -> float:
        num_rows, num_context_tokens = batch * rows, batch * (context + rows)
        output = StepOutput(
            num_running=batch,
            num_tokens=num_rows,
            num_context_tokens=num_context_tokens,
            num_pairs=rows * num_context_tokens,
            num_sampled=num_rows,
        )
        return pace.step(spec, output)

    return Verifier(tuple(fit((batch, seconds(batch, rows)) for batch in batches) for rows in range(1, max_rows + 1)))
