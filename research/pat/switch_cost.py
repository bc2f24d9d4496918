"""Whether KV moves in a switch, or is computed again (PAT §4.2, Eqs. 3 and 4). Torch-free.

The paper takes B sequences of the root mean square of their lengths; here the pairs of attention are counted exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engines.kvcache.cost import PrefillCost
from research.pat.lookahead import Deployment
from research.pat.predictor import Point


def fit_prefills(points: Iterable[Point]) -> PrefillCost:
    """Fits the cost to prefills of equally long sequences, by least squares of relative errors; see `Point`. A cost
    that noise makes negative is left out. Raises ValueError without points."""
    rows = np.array([(1.0, tokens, _pairs(np.full(batch, tokens / batch)), s) for batch, tokens, s in points])
    if not len(rows):
        raise ValueError("prefills: there are no points; profile again")
    terms, seconds = rows[:, :3], rows[:, 3]
    used = [0, 1, 2]
    while True:
        scaled = terms[:, used] / seconds[:, None]
        sizes = np.linalg.norm(scaled, axis=0)  # tokens and pairs differ by orders of magnitude
        found = np.linalg.lstsq(scaled / sizes, np.ones(len(rows)), rcond=None)[0] / sizes
        if found.min() >= 0:
            break
        used.pop(int(np.argmin(found * sizes)))
    costs = dict.fromkeys(range(3), 0.0) | dict(zip(used, found.tolist(), strict=True))
    return PrefillCost(latency=costs[0], seconds_per_token=costs[1], seconds_per_pair=costs[2])


def recompute_seconds(cost: PrefillCost, num_replicas: int, contexts: NDArray[np.float64]) -> float:
    """Returns the seconds in which replicas with equal shares prefill sequences of these lengths (Eq. 4)."""
    tokens, pairs = float(contexts.sum()), _pairs(contexts)
    return cost.latency + (cost.seconds_per_token * tokens + cost.seconds_per_pair * pairs) / num_replicas


def moves_kv(deployment: Deployment, before: int, after: int, contexts: NDArray[np.float64]) -> bool:
    """Returns whether moving the KV of these sequences takes no longer than computing it again in TP size `after`.
    True where no prefill was profiled."""
    if after not in deployment.prefills:
        return True
    tokens = float(contexts.sum())
    moving = deployment.switch_seconds(before, after, tokens) - deployment.switch_seconds(before, after, 0.0)
    return moving <= recompute_seconds(deployment.prefills[after], deployment.num_ranks // after, contexts)


def _pairs(contexts: NDArray[np.float64]) -> float:
    """Returns the pairs of a token and a token that it attends to, itself included."""
    return float((contexts * (contexts + 1)).sum() / 2)
