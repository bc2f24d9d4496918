"""The cost model of preemption against closed forms, and what it is fitted from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kvcache.cost import (
    CopyCost,
    PassTime,
    PrefillCost,
    SwapCost,
    fit_prefill,
)

COPY = CopyCost(bytes_per_token=4096, out_bandwidth=1e9, in_bandwidth=2e9, latency=1e-3)
PREFILL = PrefillCost(latency=1e-3, seconds_per_token=1e-4, seconds_per_pair=1e-7)


def test_seconds_are_those_of_the_formulas() -> None:
    cost = SwapCost(prefill=PREFILL, copy=COPY)
    assert cost.swap_seconds(1000) == pytest.approx(1e-3 + 1000 * 4096 / 1e9 + 1000 * 4096 / 2e9)
    assert cost.swap_seconds(1000, 600) == pytest.approx(1e-3 + 1000 * 4096 / 1e9 + 400 * 4096 / 2e9)
    assert cost.recompute_seconds(1000) == pytest.approx(1e-3 + 1e-4 * 1000 + 1e-7 * sum(range(1, 1001)))
    assert cost.recompute_seconds(1000, 600) == pytest.approx(1e-3 + 1e-4 * 400 + 1e-7 * sum(range(601, 1001)))
    assert cost.recompute_seconds(600, 600) == 1e-3


def test_the_break_even_length_is_where_the_lines_cross() -> None:
    """Without pairs both are straight lines: n = latency / (prefill - copies), per token."""
    prefill = PrefillCost(latency=0.0, seconds_per_token=1e-5, seconds_per_pair=0.0)
    cost = SwapCost(prefill=prefill, copy=COPY)
    crossing = COPY.latency / (1e-5 - 4096 / 1e9 - 4096 / 2e9)
    assert cost.cheaper(math.floor(crossing)) == "recompute"
    assert cost.cheaper(math.ceil(crossing)) == "swap"
    assert cost.cheaper(math.ceil(crossing), math.ceil(crossing)) == "recompute"  # all of it is found again


def test_a_tier_that_takes_nothing_is_never_cheaper() -> None:
    nothing = CopyCost(bytes_per_token=1, out_bandwidth=1.0, in_bandwidth=1.0, latency=math.inf)
    assert SwapCost(prefill=PREFILL, copy=nothing).cheaper(10**6) == "recompute"
    free = SwapCost(prefill=PrefillCost(latency=0.0, seconds_per_token=0.0, seconds_per_pair=0.0), copy=nothing)
    assert free.cheaper(10**6) == "recompute"


@given(
    fixed=st.floats(0, 1), latency=st.floats(0, 1), per_token=st.floats(1e-7, 1e-2), per_pair=st.floats(0, 1e-4),
    long=st.integers(33, 512), deep=st.integers(33, 4096),
)  # fmt: skip
def test_the_fit_finds_what_made_the_times(
    fixed: float, latency: float, per_token: float, per_pair: float, long: int, deep: int
) -> None:
    def timed(num_tokens: int, context: int) -> PassTime:
        pairs = sum(range(context - num_tokens + 1, context + 1))
        seconds = fixed if num_tokens == 1 else fixed + latency + per_token * num_tokens + per_pair * pairs
        return PassTime(num_tokens=num_tokens, context=context, seconds=seconds)

    found = fit_prefill(timed(1, 32), timed(32, 32), timed(long, long), timed(32, deep))
    scale = fixed + latency + 512 * per_token + 512 * 4096 * per_pair  # what cancels is rounded
    assert found.seconds_per_pair == pytest.approx(per_pair, rel=1e-6, abs=1e-12 * scale)
    assert found.seconds_per_token == pytest.approx(per_token, rel=1e-6, abs=1e-10 * scale)
    assert found.latency == pytest.approx(latency, rel=1e-6, abs=1e-8 * scale)


def test_noise_never_makes_a_cost_negative() -> None:
    def timed(num_tokens: int, context: int, seconds: float) -> PassTime:
        return PassTime(num_tokens=num_tokens, context=context, seconds=seconds)

    shrinking = fit_prefill(timed(1, 32, 4.0), timed(32, 32, 3.0), timed(64, 64, 2.0), timed(32, 500, 1.0))
    assert shrinking == PrefillCost(latency=0.0, seconds_per_token=0.0, seconds_per_pair=0.0)
    one_length = fit_prefill(timed(1, 8, 2.0), timed(8, 8, 2.0), timed(8, 8, 2.0), timed(8, 8, 2.0))
    assert one_length == PrefillCost(latency=0.0, seconds_per_token=0.25, seconds_per_pair=0.0)
