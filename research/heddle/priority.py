"""Which trajectory a replica runs first: Heddle, §4.2, Algorithm 1, and what it is compared with. Torch-free.

A function here gives the `priority` of a dispatch, which stays while the turn runs: the trajectories of a replica are
ordered anew when they return from their tools (Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engines.coordination.views import SequenceView


class Estimate(NamedTuple):
    """What is expected of a trajectory, in generated tokens; the mean of the others, where nothing predicts it."""

    remaining: float
    total: float


Priority = Callable[[SequenceView, Estimate], float]


def by_remaining(sequence: SequenceView, estimate: Estimate) -> float:
    """Progressive priority scheduling: what has most tokens to come is first (Algorithm 1)."""
    return estimate.remaining


def by_total(sequence: SequenceView, estimate: Estimate) -> float:
    """As `by_remaining`, with the tokens that were generated already, by which placement sorts."""
    return estimate.total


def shortest_first(sequence: SequenceView, estimate: Estimate) -> float:
    """Autellix: what has least tokens to come is first."""
    return -estimate.remaining


def first_come(sequence: SequenceView, estimate: Estimate) -> float:
    """The order of submission. A replica keeps what it has begun, with `EngineConfig.priority_margin=inf`."""
    return -float(sequence.index)


def round_robin(sequence: SequenceView, estimate: Estimate) -> float:
    """All are equal: the order in which turns come to the replica."""
    return 0.0
