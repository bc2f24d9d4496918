"""Whether a switch moves KV or computes it again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engines.kvcache.cost import PrefillCost
from research.pat.controller import PatController
from research.pat.switch_cost import fit_prefills, moves_kv, recompute_seconds
from tests.research.test_pat_controller import A40, LENGTHS, deployment, view_of

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


def test_recomputing_counts_the_pairs_of_each_sequence() -> None:
    lengths = [5, 700, 31]
    alone = sum(COST.seconds(length) - COST.latency for length in lengths)
    assert recompute_seconds(COST, 1, np.array(lengths, float)) == pytest.approx(COST.latency + alone)
    assert recompute_seconds(COST, 4, np.array(lengths, float)) == pytest.approx(COST.latency + alone / 4)


def test_kv_moves_where_the_link_is_faster_than_a_prefill() -> None:
    contexts = np.full(9, 12288.0)
    fast = deployment()
    prefill = A40[8].step_seconds(1, 12288, 12288, pairs=12288 * 12289 / 2, logit_rows=1)
    assert recompute_seconds(fast.prefills[8], 1, contexts) == pytest.approx(9 * prefill, rel=0.3), "as the pace says"
    assert moves_kv(fast, 2, 8, contexts)

    slow = replace(fast, switch_seconds=lambda before, after, tokens: 2.0 + tokens / 100)
    assert not moves_kv(slow, 2, 8, contexts)
    assert moves_kv(replace(slow, prefills={}), 2, 8, contexts), "nothing is known"
    for one in (fast, slow):
        policy = PatController(one, ended=LENGTHS.draw(500, seed=9))
        change = policy.decide(view_of([5, 0, 7] * 5, size=1))
        assert change is not None and change.with_kv == policy.log[0].with_kv
        assert change.with_kv == moves_kv(one, 1, change.layout.replicas[0].tp_size, np.array([21.0, 16.0, 23.0] * 5))
