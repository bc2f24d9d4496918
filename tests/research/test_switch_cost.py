"""Whether a switch moves KV or computes it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.kvcache.cost import PrefillCost
from research.pat.controller import PatController, PatOptions
from research.pat.deployment import Deployment
from research.pat.switch_cost import fit_prefills, moves_kv, switch_price
from tests.research.test_pat_controller import A40, HISTORY, deployment, view_of

COST = PrefillCost(latency=0.02, seconds_per_token=3e-5, seconds_per_pair=2e-9)


def test_a_cost_is_found_again_from_its_points() -> None:
    points = [(b, b * c, b * COST.seconds(c) - (b - 1) * COST.latency) for b in (1, 2, 4) for c in (64, 1024, 8192)]
    found = fit_prefills(points)
    for name in ("latency", "seconds_per_token", "seconds_per_pair"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=1e-6)
    noisy = fit_prefills([(1, 1, 1.0), (1, 2, 0.9), (2, 4, 0.8)])
    assert min(noisy.latency, noisy.seconds_per_token, noisy.seconds_per_pair) >= 0, "time never falls"
    with pytest.raises(ValueError, match="no points"):
        fit_prefills([])


def recompute_seconds(one: Deployment, after: int, contexts: np.ndarray) -> float:
    """Of a switch that moves no KV, without the rest of the switch."""
    slow = replace(one, switch_seconds=lambda before, after, tokens: 1e9 * (tokens > 0))
    pairs = np.array([(contexts * (contexts + 1)).sum() / 2])
    return float(switch_price(slow, 2, after, contexts.sum(keepdims=True), pairs)[0])


def test_recomputing_counts_the_pairs_of_each_sequence() -> None:
    lengths = [5, 700, 31]
    one = replace(deployment(), prefills=dict.fromkeys((2, 8), COST))
    alone = sum(COST.seconds(length) - COST.latency for length in lengths)
    assert recompute_seconds(one, 8, np.array(lengths, float)) == pytest.approx(COST.latency + alone)
    assert recompute_seconds(one, 2, np.array(lengths, float)) == pytest.approx(COST.latency + alone / 4)


@pytest.mark.parametrize("estimator", ["lookahead", "paper"])
def test_a_plan_knows_that_kv_may_be_computed_again(estimator: Any) -> None:
    """Nine sequences of 700 tokens with 300 to go: to move their KV takes longer than the tail."""
    one = replace(deployment(), switch_seconds=lambda before, after, tokens: 0.05 + tokens / 100)
    policy = PatController(one, PatOptions(estimator=estimator), ended=[(984, False)] * 99)
    change = policy.decide(view_of([684] * 9, size=2, max_tokens=984))
    assert change is not None and change.layout.replicas[0].tp_size == 4 and not change.with_kv
    (found,) = policy.log
    assert found.kept_seconds == pytest.approx(4.66, abs=0.005)
    assert found.seconds == pytest.approx(3.60, abs=0.005)
    only = replace(one, steps={size: one.steps[size] for size in (2, 8)})
    wide = PatController(only, PatOptions(estimator=estimator), ended=[(984, False)] * 99)
    assert wide.decide(view_of([684] * 9, size=2, max_tokens=984)) is not None
    assert wide.log[0].chosen == 8 and wide.log[0].seconds == pytest.approx(3.98, abs=0.005)


def test_kv_moves_where_the_link_is_faster_than_a_prefill() -> None:
    contexts = np.full(9, 12288.0)
    fast = deployment()
    prefill = A40[8].step_seconds(1, 12288, 12288, pairs=12288 * 12289 / 2, logit_rows=1)
    assert recompute_seconds(fast, 8, contexts) == pytest.approx(9 * prefill, rel=0.3), "as the pace says"
    assert moves_kv(fast, 2, 8, contexts)

    slow = replace(fast, switch_seconds=lambda before, after, tokens: 2.0 + tokens / 100)
    assert not moves_kv(slow, 2, 8, contexts)
    assert moves_kv(replace(slow, prefills={}), 2, 8, contexts), "nothing is known"
    for one in (fast, slow):
        policy = PatController(one, ended=HISTORY)
        change = policy.decide(view_of([5, 0, 7] * 5, size=1))
        assert change is not None and change.with_kv == policy.log[0].with_kv
        assert change.with_kv == moves_kv(one, 1, change.layout.replicas[0].tp_size, np.array([21.0, 16.0, 23.0] * 5))
