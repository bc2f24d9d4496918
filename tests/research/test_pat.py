"""PAT's decisions against brute force and closed forms."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from engines.kvcache.cost import PrefillCost
from research.pat.deployment import Deployment
from research.pat.lifetimes import Lifetime, Lifetimes, lifetimes_of, run_to_limit
from research.pat.lookahead import WorkLeft, make_plan
from research.pat.predictor import StepPredictor

NUM_PLANS = 20
"""Random cases for each kind of plan."""

# -- the predictor


def test_the_predictor_meets_its_points_and_goes_straight_between_them() -> None:
    points = [(1, 10, 1.0), (1, 20, 3.0), (4, 10, 2.0), (4, 40, 5.0), (8, 10, 10.0), (8, 20, 20.0)]
    predictor = StepPredictor(points)
    for batch, num_tokens, seconds in points:
        assert predictor.seconds(batch, num_tokens) == pytest.approx(seconds)
    assert predictor.seconds(1, 15) == pytest.approx(2.0)
    assert predictor.seconds(1, 30) == pytest.approx(5.0), "the last segment goes on"
    assert predictor.seconds(1, 5) == pytest.approx(1.0), "not below the first point"
    assert predictor.seconds(2, 10) == pytest.approx(4 / 3)
    assert predictor.seconds(2, 20) == pytest.approx(3.0)
    assert predictor.seconds(10, 10) == pytest.approx(14.0)
    assert predictor.seconds([0, 1, 4], [10, 10, 10]).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"points by batch size: {1: 1}; give two batch sizes or more"):
        StepPredictor([(1, 10, 1.0)])


def test_noise_makes_no_step_faster_with_more_tokens_or_sequences() -> None:
    """The last two points of the first curve fall, as measured ones do; and so do those of the largest batch."""
    points = [(1, 100, 0.010), (1, 1000, 0.012), (1, 2000, 0.0119), (8, 800, 0.02), (8, 8000, 0.03)]
    predictor = StepPredictor(points)
    assert float(predictor.seconds(1, 2000)) == pytest.approx(0.0119)
    for batch in (1, 3, 8, 20):
        beyond = predictor.seconds(batch, np.linspace(8000, 200_000, 20))
        assert (beyond > 0.0119).all() and (np.diff(beyond) > 0).all()
    falling = StepPredictor([(1, 100, 0.02), (1, 1000, 0.021), (8, 100, 0.015), (8, 1000, 0.014)])
    assert falling.seconds([8, 64, 999], 1000).tolist() == pytest.approx([0.014] * 3)
    assert falling.seconds(8, [1000, 10**6]).tolist() == pytest.approx([0.014] * 2)


@pytest.mark.parametrize("seed", range(5))
def test_far_beyond_the_points_noise_counts_little(seed: int) -> None:
    """Seconds of 0.02 + tokens / 1e6, measured with an error of 2 %."""
    rng = np.random.default_rng(seed)
    tokens = np.array([100, 1000, 4000, 16_000, 20_000])
    measured = (0.02 + tokens / 1e6) * (1 + 0.02 * rng.standard_normal(5))
    points = [(batch, int(t), float(s)) for batch in (1, 8) for t, s in zip(tokens, measured, strict=True)]
    assert float(StepPredictor(points).seconds(1, 80_000)) == pytest.approx(0.1, rel=0.15)


# -- lifetimes


def stopped(lengths: Iterable[int]) -> list[Lifetime]:
    return [(length, False) for length in lengths]


def test_those_that_reached_their_cap_promise_more() -> None:
    cut = Lifetimes([(1000, True)] * 200)
    assert cut.remaining(np.array([0.0, 700.0]), np.full(2, 4000.0)).tolist() == [4000.0, 3300.0]
    assert cut.means(np.array([0.0, 700.0]), np.full(2, 4000.0)).tolist() == [4000.0, 3300.0]
    half = Lifetimes([(1000, True), (1000, False)] * 100)
    assert sorted(half.remaining(np.zeros(4), np.full(4, 4000.0)).tolist()) == [1000.0, 1000.0, 4000.0, 4000.0]
    assert half.means(np.zeros(1), np.full(1, 4000.0)).tolist() == [2500.0]
    assert lifetimes_of([(7, "stop"), (8, "abort"), (9, "length")]) == [(7, False), (9, True)]


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_is_the_product_limit(seed: int) -> None:
    """Against the definition, with exact fractions. With 101 sequences no quantile falls on a value of the curve."""
    rng = random.Random(seed)
    known = [(rng.randint(1, 40), rng.random() < 0.4) for _ in range(rng.randint(0, 60))]
    generated = [rng.randint(0, 45) for _ in range(101)]
    limits = [count + rng.randint(1, 20) for count in generated]
    survival = [Fraction(1)]  # the share that is longer than 0, 1, 2, ... tokens
    for length in range(1, 70):
        deaths = sum(one == (length, False) for one in known)
        at_risk = sum(n >= length for n, _ in known) + sum(n >= length for n in generated)
        survival.append(survival[-1] * (1 - (Fraction(deaths, at_risk) if deaths else 0)))
    order = sorted(range(101), key=lambda place: (place * 0.6180339887498949) % 1.0)
    expected, means = [], []
    for place, (start, limit) in enumerate(zip(generated, limits, strict=True)):
        wanted = survival[start] * (1 - (order.index(place) + Fraction(1, 2)) / 101)
        end = next((n for n in range(70) if survival[n] <= wanted), limit)
        expected.append(min(max(end, start + 1), limit) - start)
        means.append(float(sum(survival[start:limit]) / survival[start]))
    lifetimes = Lifetimes(known)
    now, most = np.array(generated, float), np.array(limits, float)
    assert lifetimes.remaining(now, most).tolist() == expected
    assert lifetimes.means(now, most).tolist() == pytest.approx(means)


def test_everyone_runs_to_the_limit() -> None:
    assert run_to_limit(np.array([3.0, 9.0]), np.array([10.0, 10.0])).tolist() == [7.0, 1.0]


def test_without_any_end_everyone_runs_to_the_limit() -> None:
    assert Lifetimes().remaining(np.array([3.0, 9.0]), np.array([10.0, 12.0])).tolist() == [7.0, 3.0]


def test_new_sequences_get_the_known_lengths() -> None:
    known = [5, 9, 30, 70]
    found = Lifetimes(stopped(known)).remaining(np.zeros(4), np.full(4, 100.0))
    assert sorted(found.tolist()) == [5.0, 9.0, 30.0, 70.0]


def test_survivors_get_what_is_left_of_the_known_lengths() -> None:
    found = Lifetimes(stopped(range(1, 101))).remaining(np.full(50, 50.0), np.full(50, 1000.0))
    ends = np.sort(found) + 50
    # Those at risk beyond 50 are the 50 known ones and the 50 that run now, which have not ended yet.
    assert ends.min() > 50 and np.median(ends) > 70


@pytest.mark.parametrize("seed", range(5))
def test_a_rollout_that_is_half_over_is_not_taken_for_a_short_one(seed: int) -> None:
    """Only the shorter half has ended. Mean of all lengths, known and estimated, against the truth."""
    rng = np.random.default_rng(seed)
    truth = np.ceil(500 * np.exp(0.9 * rng.standard_normal(4000)))
    lifetimes = Lifetimes(stopped(np.ceil(500 * np.exp(0.9 * rng.standard_normal(4000))).astype(int)))
    now = float(np.median(truth))
    lifetimes.add(stopped(truth[truth <= now].astype(int)))
    running = truth[truth > now]
    found = now + lifetimes.remaining(np.full(len(running), now), np.full(len(running), 1e5))
    assert found.mean() == pytest.approx(running.mean(), rel=0.1)
    assert np.quantile(found, [0.5, 0.9]) == pytest.approx(np.quantile(running, [0.5, 0.9]), rel=0.1)


def test_remaining_tokens_are_within_their_bounds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        generated = np.array([float(rng.randint(0, 60)) for _ in range(rng.randint(1, 9))])
        limits = generated + [rng.randint(1, 40) for _ in generated]
        known = [(rng.randint(0, 80), rng.random() < 0.3) for _ in range(rng.randint(0, 9))]
        found = Lifetimes(known).remaining(generated, limits)
        assert (found >= 1).all() and (generated + found <= limits).all()


# -- the plan

SIZES = (1, 2, 4)
PREFILL = PrefillCost(latency=0.02, seconds_per_token=1e-4, seconds_per_pair=1e-5)


def deployment(
    *, num_kv_tokens: int = 10**9, max_num_seqs: int = 10**6, switch: float = 0.0, prefills: bool = False
) -> Deployment:
    """A step of TP t takes 3 / t seconds for the weights, and t / 4 for each sequence: wide replicas suit few."""
    steps = {
        size: StepPredictor(
            (batch, num_tokens, 3 / size + batch * size / 4 + num_tokens / 1e4)
            for batch in (1, 100)
            for num_tokens in (1, 10**6)
        )
        for size in SIZES
    }
    return Deployment(
        num_ranks=4,
        steps=steps,
        num_kv_tokens=dict.fromkeys(SIZES, num_kv_tokens),
        max_num_seqs=max_num_seqs,
        max_model_len=10**6,
        switch_seconds=lambda before, after, tokens: switch + tokens / 1e3,
        prefills=dict.fromkeys(SIZES, PREFILL) if prefills else {},
    )


def step_by_step(one: Deployment, contexts: list[int], remaining: list[int], size: int) -> float:
    """Seconds of decoding token by token, the fullest replica with its share of the tokens."""
    seconds, left = 0.0, sorted(zip(remaining, contexts, strict=True))
    for step in range(max(remaining)):
        lengths = [context + step + 0.5 for more, context in left if more > step]
        batch = -(-len(lengths) * size // one.num_ranks)
        seconds += float(one.steps[size].seconds(batch, sum(lengths) / len(lengths) * batch))
    return seconds


@pytest.mark.parametrize("count", [49, 98, 103])
def test_one_slot_of_a_replica_is_room_for_one(count: int) -> None:
    """A 49th of 49 sequences is less than one in floating point."""
    work = WorkLeft.of(deployment(max_num_seqs=1), np.ones(count), np.arange(1.0, count + 1))
    assert np.isfinite(work.seconds(4)).all()


@pytest.mark.parametrize("seed", range(10))
def test_the_seconds_of_a_layout_are_those_of_its_steps(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 30)
    contexts, remaining = ([rng.randint(1, 200) for _ in range(count)] for _ in range(2))
    one = deployment()
    work = WorkLeft.of(one, np.array(contexts, float), np.array(remaining, float))
    for size in SIZES:
        assert work.seconds(size).sum() == pytest.approx(step_by_step(one, contexts, remaining, size), rel=1e-9)
    assert work.num_unfinished[0] == count and work.num_tokens[0] == sum(contexts)


@pytest.mark.parametrize("seed", range(NUM_PLANS))
@pytest.mark.parametrize("start", [None, 1, 4])
@pytest.mark.parametrize("prefills", [False, True])
@pytest.mark.parametrize("goes_back", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 10**6])
def test_the_plan_against_all_plans(
    seed: int, start: int | None, prefills: bool, goes_back: bool, max_num_seqs: int
) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    contexts, remaining = (np.array([rng.randint(1, 60) for _ in range(count)], float) for _ in range(2))
    one = deployment(switch=rng.choice([0.0, 1.0, 30.0]), prefills=prefills, max_num_seqs=max_num_seqs)
    # At the start all wait with their prompts; later some do, two with the same one.
    prompts = [(float(n), 1) for n in contexts] if start is None else [(50.0, 2), (9.0, 1)][: rng.randint(0, count - 1)]
    if goes_back:
        one = replace(one, way_back_seconds=lambda end, start: 2 * end + start)
    first = None if start is None else rng.choice([None, 2])
    order = np.argsort(remaining, kind="stable")

    def price(before: int, after: int, rung: int) -> float:
        """Of a switch when this many sequences have ended: KV moves or is computed again."""
        grown = remaining[order[rung - 1]] if rung else 0.0
        lengths = [contexts[place] + grown for place in order[rung:]]
        moving = one.switch_seconds(before, after, sum(lengths))
        again = sum(PREFILL.seconds(int(length)) - PREFILL.latency for length in lengths) / (4 // after)
        return min(moving, one.switch_seconds(before, after, 0.0) + PREFILL.latency + again) if prefills else moving

    def back(end: int, begun: int) -> float:
        return 2.0 * end + begun if goes_back and end != begun else 0.0

    def whole_prefill(size: int) -> float:
        times = [(min(members, 4 // size), PREFILL.seconds(int(n)) - PREFILL.latency) for n, members in prompts]
        num_times = sum(n for n, _ in times)
        return sum(n * s for n, s in times) / num_times * -(-num_times * size // 4) if prefills and times else 0.0

    def prefill(size: int, rung: int) -> float:
        """Of those that have begun when so many have ended."""
        num_waiting = sum(members for _, members in prompts)
        unfinished = count - rung
        at_once = unfinished * min(1.0, max_num_seqs / -(-unfinished * size // 4))
        share = 1 - min(1.0, max(0.0, (unfinished - at_once) / max(1, num_waiting)))
        return share * whole_prefill(size) if rung >= 0 else 0.0

    work = WorkLeft.of(one, contexts, remaining)
    decodes = {size: work.seconds(size).tolist() for size in SIZES}
    costs = {
        size: [s + prefill(size, rung) - prefill(size, rung - 1) for rung, s in enumerate(decodes[size])]
        for size in SIZES
    }

    def switch(before: int, after: int, rung: int) -> float:
        """With what begins at once, as a wider batch has room for it."""
        if not rung or not prefills or not prompts:
            return price(before, after, rung)
        shares = [prefill(size, rung - 1) / whole_prefill(size) for size in (before, after)]
        return price(before, after, rung) + max(0.0, shares[1] - shares[0]) * whole_prefill(after)

    best = np.inf
    for sizes in itertools.product(SIZES, repeat=count):
        seconds, before = 0.0, start
        for rung, size in enumerate(sizes):
            if before is not None and before != size:
                seconds += switch(before, size, rung)
            seconds, before = seconds + costs[size][rung], size
        best = min(best, seconds + back(sizes[-1], first or start or sizes[0]))
    given = None if start is None else tuple(np.array(list(zip(*prompts, strict=True)) or [[], []], float))
    found = make_plan(one, contexts, remaining, start, first, given)
    assert found.seconds == pytest.approx(best)
    assert found.stages[0][0] == count and [n for n, _ in found.stages] == sorted((n for n, _ in found.stages))[::-1]
    kept = np.inf if start is None else sum(costs[start]) + back(start, first or start)
    assert found.kept_seconds == (np.inf if start is None else pytest.approx(kept))
    seconds, before = 0.0, start
    for place, (number, size) in enumerate(found.stages):
        end = found.stages[place + 1][0] if place + 1 < len(found.stages) else 0
        if before is not None and before != size:
            seconds += switch(before, size, count - number)
        seconds, before = seconds + sum(costs[size][count - number : count - end]), size
    seconds += back(found.stages[-1][1], first or start or found.stages[0][1])
    assert seconds == pytest.approx(found.seconds), "the stages are the plan"


def test_few_sequences_take_wide_replicas_and_many_take_narrow_ones() -> None:
    one = deployment(switch=0.5)
    remaining = np.array([10.0] * 60 + [400.0])
    plan = make_plan(one, np.ones(61), remaining, None)
    assert plan.stages == ((61, 1), (1, 4))
    assert make_plan(deployment(switch=1e9), np.ones(61), remaining, 1).stages == ((61, 1),)


def test_what_does_not_fit_at_once_runs_one_after_the_other() -> None:
    """Half of the slots, or half of the cache: twice the passes, each of half the batch."""
    contexts, remaining = np.full(40, 1000.0), np.full(40, 10.0)
    for limits in ({"max_num_seqs": 5}, {"num_kv_tokens": 5 * 1005}):
        one = deployment(**limits)
        (seconds,) = set(WorkLeft.of(one, contexts, remaining).seconds(1)) - {0.0}
        assert seconds == pytest.approx(2 * 10 * float(one.steps[1].seconds(5, 5 * 1005)))


def test_a_size_in_which_a_sequence_does_not_fit_is_avoided() -> None:
    one = deployment(num_kv_tokens=500)
    wide = Deployment(**{**vars(one), "num_kv_tokens": {1: 500, 2: 1500, 4: 10**6}})
    plan = make_plan(wide, np.array([1000.0] * 8), np.array([10.0] * 8), None)
    assert plan.stages[0][1] != 1 and plan.seconds < np.inf
    assert make_plan(one, np.array([1000.0]), np.array([10.0]), None).seconds == np.inf


@pytest.mark.parametrize("remaining", [[7.0] * 9, [3.0, 7.0, 7.0]])
def test_a_size_without_any_room_is_infeasible(remaining: list[float]) -> None:
    one = replace(deployment(), num_kv_tokens={1: 0, 2: 100, 4: 100})
    with np.errstate(all="raise"):
        plan = make_plan(one, np.full(len(remaining), 3.0), np.array(remaining), None)
    assert plan.stages[0][1] > 1 and np.isfinite(plan.seconds)
