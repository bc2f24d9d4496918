"""ROSE's memory policy: budgets by hand, windows by brute force, and streams of random serving use."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from engines.serving.policies import MemoryView
from research.rose.memory import PeakUse, ServingFirst, SharingOptions, StaticSplit


def view(num_serving: int, budget: int = 0, *, now: float = 0.0, num_pages: int = 1000) -> MemoryView:
    return MemoryView(now=now, num_pages=num_pages, num_serving=num_serving, num_rollout=0, budget=budget)


def test_a_phase_by_hand() -> None:
    """1000 pages, of which H is 200. Serving used 300 at most, so the rollout begins with 500: serving has the other
    500, of which it may use 400 before the cut (a half of H is left), and 350 after it."""
    policy = ServingFirst()
    policy.observe(view(300, now=0.0))
    assert policy.headroom(view(0)) == 200
    assert policy.begin(view(100, now=60.0)) == 500
    assert policy.cut(view(400, 500)) is None
    assert policy.cut(view(401, 500)) == 250
    # 750 pages are serving's now: the next burst is beyond 650
    assert policy.cut(view(401, 250)) is None and policy.cut(view(650, 250)) is None
    assert policy.cut(view(651, 250)) == 125
    assert policy.begin(view(100, now=60.0)) == 500, "the window still has the 300"
    assert policy.begin(view(100, now=61.0)) == 500, "they were in use until the next look, at 60 s"
    assert policy.begin(view(100, now=121.0)) == 700


def test_small_budgets_are_cut_until_the_pressure_ends() -> None:
    """A budget of 100, a half of H: 900 pages are serving's, and more than 800 used are too many. One division leaves
    50, with which 950 fit; serving may use 930 at the next look, and 1030 at the one after it. So it is divided until
    use is within the low mark: 838 with 12 pages, 825 with 25. Without any it is 850."""
    assert ServingFirst().cut(view(851, 100)) == 0
    assert ServingFirst().cut(view(830, 100)) == 12
    assert ServingFirst().cut(view(1000, 0)) is None


def test_a_full_server_lends_nothing() -> None:
    policy = ServingFirst()
    assert policy.begin(view(900)) == 0
    assert policy.cut(view(1000, 0)) is None


@pytest.mark.parametrize("seed", range(30))
def test_serving_and_rollout_fit_the_pool(seed: int) -> None:
    """Serving's use grows by at most what the high mark leaves of H between two looks, and falls by anything. It and
    the rollout's budget fit at each look, before the cut; the budget never grows in a phase; and between two cuts
    serving's use rises by more than the distance of the marks."""
    random = Random(seed)
    high = random.choice([0.25, 0.5, 0.75])
    options = SharingOptions(
        headroom=random.choice([0.1, 0.2, 0.37]),
        window_s=random.choice([1.0, 3.0]),
        high=high,
        low=high * random.choice([0.2, 0.5, 1.0]),
        factor=random.choice([2, 3]),
    )
    policy, num_pages = ServingFirst(options), random.choice([40, 1000])
    growth = math.floor((1 - high) * policy.headroom(view(0, num_pages=num_pages)))
    apart = (high - options.low) * policy.headroom(view(0, num_pages=num_pages))
    serving, budget, num_cuts, goal = 0, 0, 0, 0.0
    lowest = math.inf  # use since the last cut
    for look in range(3000):
        if look % 50 == 0:
            goal = random.choice([0, 0.3, 0.8, 1.0]) * num_pages
        step = random.randint(-growth, growth) if random.random() < 0.3 else growth if serving < goal else -growth
        serving = max(0, min(num_pages, serving + step))
        now = look * 0.1
        seen = view(serving, budget, now=now, num_pages=num_pages)
        policy.observe(seen)
        assert serving + budget <= num_pages
        lowest = min(lowest, serving)
        lower = policy.cut(seen)
        if lower is not None:
            assert lower < budget
            assert serving - lowest > apart - 1e-9 or num_cuts == 0
            budget, lowest, num_cuts = lower, serving, num_cuts + 1
            assert policy.cut(view(serving, budget, now=now, num_pages=num_pages)) is None, "one cut for each burst"
        if random.random() < 0.02:
            budget, lowest = policy.begin(view(serving, budget, now=now, num_pages=num_pages)), -math.inf
            assert serving + budget + policy.headroom(seen) <= num_pages or budget == 0
    assert num_cuts > 3


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_of_a_window(seed: int) -> None:
    """Against all that was observed: a use counts until the next observation."""
    random, now = Random(seed), 0.0
    window_s = random.choice([0.5, 3.0, 50.0])
    peak, seen = PeakUse(window_s), list[tuple[float, int]]()
    assert peak.peak(0.0) == 0
    for _ in range(500):
        now += random.choice([0.0, 0.25, random.expovariate(1.0)])
        if random.random() < 0.7:
            seen.append((now, random.randrange(20)))
            peak.observe(*seen[-1])
        ends = [*(start for start, _ in seen), math.inf][1:]
        expected = [pages for (_, pages), end in zip(seen, ends, strict=True) if end >= now - window_s]
        assert peak.peak(now) == max(expected, default=0)


def test_a_window_keeps_little() -> None:
    """A use that was exceeded since is forgotten at once: of a thousand rising ones, one is kept."""
    peak = PeakUse(1e6)
    for pages in range(1000):
        peak.observe(float(pages), pages)
    assert len(peak._falling) == 1


def test_a_static_split() -> None:
    split = StaticSplit()
    assert split.begin(view(1000)) == 500 and split.headroom(view(1000)) == 0
    assert split.cut(view(1000, 500)) is None
    assert StaticSplit(0.29).begin(view(0, num_pages=100)) == 29


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headroom": 0.0}, r"SharingOptions\.headroom=0\.0: must be above 0, at most 1"),
        ({"low": 0.6}, r"SharingOptions\.low=0\.6: must be at most high=0\.5"),
        ({"factor": 1}, r"SharingOptions\.factor=1: must be an integer of at least 2"),
    ],
)
def test_what_they_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharingOptions(**options)
    with pytest.raises(ValueError, match=r"StaticSplit\.share=1\.5"):
        StaticSplit(1.5)
