"""What a switch takes, and whether KV moves in it or is computed again (PAT §4.3, Eqs. 2 to 4). Torch-free.

The paper takes B sequences of the root mean square of their lengths; here the pairs of attention are counted exactly.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engines.kvcache.cost import PrefillCost
from research.pat.deployment import Deployment
from research.pat.predictor import Point

Tokens = NDArray[np.float64]
_KNOTS = 9


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


def switch_price(
    deployment: Deployment, before: int, after: int, num_tokens: Tokens, num_pairs: Tokens
) -> NDArray[np.float64]:
    """Returns the seconds of switches with contexts of these tokens and pairs of attention, elementwise: of the faster
    way for KV, min(T_move, T_recomp)."""
    return np.minimum(*_both_ways(deployment, before, after, num_tokens, num_pairs))


def moves_kv(deployment: Deployment, before: int, after: int, contexts: Tokens) -> bool:
    """Returns whether moving the KV of these sequences takes no longer than computing it again in TP size `after`.
    True where no prefill was profiled, and where the TP size stays."""
    moving, again = _both_ways(deployment, before, after, contexts.sum(keepdims=True), np.array([_pairs(contexts)]))
    return before == after or bool(moving <= again)


def _both_ways(
    deployment: Deployment, before: int, after: int, num_tokens: Tokens, num_pairs: Tokens
) -> tuple[Tokens, Tokens]:
    """Returns the seconds of switches in which KV moves, and of those in which replicas with equal shares prefill it
    again (Eq. 4): infinite where no prefill was profiled. The first are exact at a few numbers of tokens and straight
    in between, since asking for each rung of a plan would take most of a decision's time."""
    knots = np.unique(np.linspace(num_tokens.min(), num_tokens.max(), _KNOTS))
    moving = np.interp(num_tokens, knots, [deployment.switch_seconds(before, after, one) for one in knots.tolist()])
    if after not in deployment.prefills:
        return moving, np.full_like(moving, np.inf)
    cost, num_replicas = deployment.prefills[after], deployment.num_ranks // after
    again = cost.latency + (cost.seconds_per_token * num_tokens + cost.seconds_per_pair * num_pairs) / num_replicas
    return moving, deployment.switch_seconds(before, after, 0.0) + again


def _pairs(contexts: Tokens) -> float:
    """Returns the pairs of a token and a token that it attends to, itself included."""
    return float((contexts * (contexts + 1)).sum() / 2)
