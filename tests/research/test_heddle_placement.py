"""Heddle's placement and allocation against brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engines.coordination.policies import Static
from engines.parallel.layout import joint_groups
from research.heddle.allocation import (
    Allocation,
    all_allocations,
    anneal,
    check_sizes,
    chosen,
    exhaustive,
    layout_of,
    placed,
)
from research.heddle.interference import (
    GroupSimulation,
    SizeInterference,
    merged,
    printed_spread,
    server_of,
    simulated,
)
from research.heddle.placement import (
    Lengths,
    Placement,
    Server,
    aggregated,
    fast,
    printed_seconds,
    reference,
    searched,
)
from research.pat.deployment import Deployment
from research.pat.predictor import StepPredictor
from research.pat.profile import deployment_of
from research.simulator.pace import ProfilePace
from research.workloads.lengths import LogNormalLengths
from tests.research.test_simulator import cluster, states


def linear(slope: float, tp_size: int = 1, token_s: float = 1.0, longest: float = math.inf) -> Server:
    """F(s) = 1 + slope (s - 1)."""
    return Server(tp_size, token_s, SizeInterference(1 + slope * np.arange(400)), longest)


def descending(rng: random.Random, count: int, most: int = 30) -> list[float]:
    return sorted((float(rng.randint(1, most)) for _ in range(count)), reverse=True)


def split(lengths: Lengths, placement: Placement) -> list[Lengths]:
    """The lengths of each replica's group, in the order of the replicas."""
    return np.split(lengths, placement.bounds[:-1])


def makespan(groups: Sequence[Lengths], servers: Sequence[Server]) -> float:
    """Seconds by Eq. 2: group i on replica i."""
    pairs = zip(groups, servers, strict=True)
    return max((printed_seconds(server, group) for group, server in pairs if len(group)), default=0.0)


def best_by_hand(lengths: list[float], servers: list[Server], *, empty: bool = True) -> float:
    """The best of all assignments, neighbours or not."""
    best = math.inf
    for choice in itertools.product(range(len(servers)), repeat=len(lengths)):
        groups = [
            [one for one, its in zip(lengths, choice, strict=True) if its == place] for place in range(len(servers))
        ]
        if not empty and not all(groups):
            continue
        terms = [
            printed_seconds(server, np.array(group)) for server, group in zip(servers, groups, strict=True) if group
        ]
        best = min(best, max(terms))
    return best


@pytest.mark.parametrize("part", range(5))
def test_equal_replicas_get_the_best_of_all_partitions(part: int) -> None:
    """Lemma 5.1: 500 cases, in which F depends on the size alone."""
    for case in range(part, 500, 5):
        rng = random.Random(case)
        lengths, count = descending(rng, rng.randint(1, 7)), rng.randint(1, 3)
        servers = [linear(rng.choice([0.0, 0.1, 0.5, 2.0]))] * count
        expected = best_by_hand(lengths, servers, empty=len(lengths) < count)
        for solve in (reference, fast):
            found = solve(lengths, servers)
            assert found.makespan == pytest.approx(expected, rel=1e-12)
            assert makespan(split(np.array(lengths), found), servers) == pytest.approx(expected, rel=1e-12)
            assert sum(found.sizes) == len(lengths)


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_one_is_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    lengths = descending(rng, rng.randint(1, 90), rng.choice([3, 50, 10_000]))
    servers = [
        linear(rng.uniform(0, 0.3), size, rng.uniform(0.2, 2), rng.choice([math.inf, 8000.0]))
        for size in sorted((rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 9))), reverse=True)
    ]
    a, b = reference(lengths, servers), fast(lengths, servers)
    assert a.makespan == b.makespan or a.makespan == pytest.approx(b.makespan, rel=1e-12)
    if math.isfinite(b.makespan):
        assert makespan(split(lengths, b), servers) == pytest.approx(b.makespan, rel=1e-12)


def long_tailed(count: int, seed: int, sigma: float = 1.0) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).lognormal(8, sigma, count).clip(1, 40_000))[::-1]


@pytest.mark.parametrize("seed", range(4))
def test_aggregation_costs_at_most_a_hundredth(seed: int) -> None:
    lengths = long_tailed(6400, seed)
    servers = [Server(1, 0.01, SizeInterference(1 + 0.02 * np.arange(256)))] * 16
    assert (
        fast(lengths, servers).makespan
        <= aggregated(lengths, servers).makespan
        <= 1.01 * fast(lengths, servers).makespan
    )


def test_the_printed_mapping_is_not_always_the_best() -> None:
    """The longest on the widest (§6.2): where a wide replica suffers more from company, another order may be better
    by up to 1.17 in these cases."""
    gains = []
    for case in range(150):
        rng = random.Random(case)
        lengths = descending(rng, rng.randint(3, 7))
        servers = [linear(rng.uniform(0, 1), size, 1 / size) for size in (4, 2, 1)[: rng.randint(2, 3)]]
        printed = reference(lengths, servers).makespan
        best = min(reference(lengths, list(order)).makespan for order in itertools.permutations(servers))
        gains.append(printed / best)
    assert 10 < sum(gain > 1 + 1e-9 for gain in gains) < 75 and max(gains) > 1.05


def test_lengths_in_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="in descending order; sort them"):
        fast([1.0, 2.0], [linear(0.1)])
    with pytest.raises(ValueError, match="0 replicas; give at least one"):
        fast([1.0], [])


def deployment(num_kv_tokens: int) -> Deployment:
    pace = ProfilePace.of("h100-8b-tp1")
    return deployment_of(pace, num_ranks=1, num_kv_tokens={1: num_kv_tokens}, max_num_seqs=32, max_model_len=9000)


def test_interference_is_the_step_time_of_what_runs_at_once() -> None:
    """F(s) = t(min(s, b)) / t(1) max(1, s / b), with b by slots or KV."""
    one = deployment(20_000)
    server = server_of(one, 1, context=1000.0)
    times = one.steps[1].seconds(np.arange(1, 41), 1000 * np.arange(1, 41))
    assert server.token_s == pytest.approx(times[0])
    for size in (1, 7, 20, 40):
        expected = times[min(size, 20) - 1] / times[0] * max(1, size / 20)
        assert server.interference(np.array([size]))[0] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match=r"context=30000\.0"):
        server_of(one, 1, context=30_000.0)


def test_a_group_s_simulation_by_hand() -> None:
    """Steps of 1 s for each running sequence; 3 slots; KV for 10 tokens: the shortest waits until there is room."""
    points = [(batch, tokens, float(batch)) for batch in (1, 2, 3) for tokens in (1, 100)]
    known = Deployment(
        num_ranks=1, steps={1: StepPredictor(points)}, num_kv_tokens={1: 100}, max_num_seqs=3, max_model_len=100,
        switch_seconds=lambda *_: 0.0,
    )  # fmt: skip
    group = GroupSimulation.of(known, 1)
    assert group.seconds(np.array([5.0])) == pytest.approx(5.0, rel=0.01)
    assert group.seconds(np.array([4.0, 2.0])) == pytest.approx(2 * 2 + 2, rel=0.01)
    assert group.seconds(np.array([2.0, 2.0, 2.0, 1.0])) == pytest.approx(2 * 3 + 1, rel=0.01), "in turns"
    assert group.seconds(np.array([101.0])) == math.inf


def by_hand(groups: list[GroupSimulation], count: int, context: float) -> tuple[float, float]:
    """The mean seconds of a step of `count` trajectories, each of which went where a token then took least, and its
    part for each token of all contexts."""
    sizes = [0] * len(groups)
    for _ in range(count):
        seconds: dict[int, float] = {}
        for place, one in enumerate(groups):
            if (n := sizes[place] + 1) < len(one.base_s):
                seconds[place] = one.base_s[n] + one.token_s[n] * n * context
        sizes[min(seconds, key=lambda place: seconds[place])] += 1
    pairs = [(one, n) for one, n in zip(groups, sizes, strict=True) if n]
    base = sum(n * one.base_s[n] for one, n in pairs) / count
    return base, sum(n * one.token_s[n] * n for one, n in pairs) / count**2


def test_merged_replicas_take_what_they_take_in_the_mean() -> None:
    points = {
        size: [(b, t, (0.01 * b**0.5 + 1e-6 * t) / size) for b in (1, 8, 64) for t in (64, 9000)] for size in (1, 2)
    }
    known = Deployment(
        num_ranks=4, steps={size: StepPredictor(some) for size, some in points.items()},
        num_kv_tokens={1: 4000, 2: 9000}, max_num_seqs=16, max_model_len=4000, switch_seconds=lambda *_: 0.0,
    )  # fmt: skip
    one, two = (GroupSimulation.of(known, size, 8) for size in (1, 2))
    for groups in ([one], [one, one], [two, one], [one, two, two], [two, one, two, one, one]):
        whole = merged(groups, 100.0)
        assert whole.num_kv_tokens == sum(group.num_kv_tokens for group in groups)
        assert len(whole.base_s) == 1 + 16 * len(groups)
        for count in (1, 2, 3, 7, 16 * len(groups)):
            base, slope = by_hand(groups, count, 100.0)
            assert whole.base_s[count] == pytest.approx(base) and whole.token_s[count] == pytest.approx(slope)
    lengths = long_tailed(12, 1, 0.8).clip(1, 300)
    alone, all_three = one.seconds(lengths), merged([one] * 3, 100.0).seconds(np.repeat(lengths, 3))
    assert all_three == pytest.approx(alone, rel=0.03), "three equal groups on three equal replicas"
    servers = [server_of(known, size, context=100.0) for size in (1, 1, 1)]
    printed_s = [
        printed_seconds(servers[0], lengths, np.zeros(12)),
        printed_spread(servers, np.repeat(lengths, 3), np.zeros(36)),
    ]
    assert printed_s[1] == pytest.approx(printed_s[0], rel=0.03)


def test_a_search_by_simulation_is_within_its_tolerance_of_all_splits() -> None:
    one = deployment(6000)
    cost = simulated({1: GroupSimulation.of(one, 1)})
    server = server_of(one, 1, context=1000.0)
    for seed in range(6):
        lengths = long_tailed(14, seed, 0.8).clip(1, 4000)

        def seconds(server: Server, part: slice, lengths=lengths) -> float:
            return cost(server, lengths[part], np.zeros(14)[part]) if len(lengths[part]) else 0.0

        found = searched(14, [server] * 3, seconds)
        splits = itertools.combinations(range(15), 2)
        best = min(max(seconds(server, slice(*ends)) for ends in ((0, a), (a, b), (b, 14))) for a, b in splits)
        assert best * (1 - 1e-9) <= found.makespan <= best * 1.05


def test_a_search_gives_the_longest_to_a_replica_that_holds_it() -> None:
    """Also where the first one does not; inf where none does."""
    servers = [linear(0.1, 2, longest=10.0), linear(0.1, longest=100.0)]

    def of(lengths: list[float]) -> Callable[[Server, slice], float]:
        return lambda server, part: printed_seconds(server, np.array(lengths)[part])

    found = searched(3, servers, of([50.0, 5.0, 4.0]))
    assert found.sizes == (0, 3) and found.makespan == pytest.approx(50 * 1.2)
    assert searched(2, servers, of([200.0, 5.0])).makespan == math.inf


@pytest.mark.parametrize(
    ("num_kv_tokens", "max_num_seqs", "count", "within"),
    [(10**7, 64, 40, 0.005), (10**7, 16, 64, 0.005), (4000, 64, 64, 0.03), (4000, 256, 200, 0.06)],
)
def test_a_group_s_simulation_against_the_live_scheduler(num_kv_tokens, max_num_seqs, count, within) -> None:
    """Room for all; too few slots; too little KV, where a part is computed again, which the estimate leaves out."""
    pace = ProfilePace.of("h100-8b-tp2")
    lengths = LogNormalLengths(median=150, sigma=1.0, cap=1500).draw(count, 1)
    lengths.sort(reverse=True)
    kv = {2: num_kv_tokens}
    engine = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 8192}
    done = cluster(2, Static(), lengths, tp_size=2, pace=pace, num_kv_tokens=kv, engine=engine).roll_out(
        states(count, max_tokens=2000)
    )
    known = deployment_of(pace, num_ranks=2, num_kv_tokens=kv, max_num_seqs=max_num_seqs, max_model_len=4096)
    estimate = GroupSimulation.of(known, 2, num_prompt_tokens=16).seconds(np.array(lengths, float))
    assert estimate == pytest.approx(done.makespan, rel=within)
    assert (done.num_preempted > 40) == (num_kv_tokens == 4000)


# --- Allocation


def test_there_are_as_many_allocations_as_sums() -> None:
    assert sum(1 for _ in all_allocations(64, (1, 2, 4, 8))) == 969
    assert sorted(all_allocations(4, (1, 2, 4))) == [(1, 1, 1, 1), (2, 1, 1), (2, 2), (4,)]
    assert list(all_allocations(3, (2, 4))) == []


def replicas() -> dict[int, Server]:
    """Wider ones are faster alone, and suffer more from company."""
    return {
        size: Server(size, 0.01 / size**0.6, SizeInterference(1 + 0.02 * size**0.4 * np.arange(256)), 10_000.0 * size)
        for size in (1, 2, 4, 8)
    }


def test_annealing_against_all_allocations() -> None:
    """32 GPUs: the median gap is within a hundredth of the best of 165."""
    gaps = []
    for seed in range(8):
        lengths = long_tailed(80, seed, 0.7 + 0.1 * seed)
        best, found = exhaustive(lengths, 32, replicas()), anneal(lengths, 32, replicas(), seed=seed)
        check_sizes(found.tp_sizes, 32, replicas())
        assert found.makespan >= best.makespan * (1 - 1e-12)
        gaps.append(found.makespan / best.makespan - 1)
    assert statistics.median(gaps) <= 0.01 and max(gaps) < 0.1
    assert anneal(lengths, 32, replicas(), seed=3) == anneal(lengths, 32, replicas(), seed=3)


def test_equal_sizes_are_chosen_unless_others_promise_more() -> None:
    """A wide replica is fast for one trajectory, and not for many: two long ones and 400 short ones need unequal sizes,
    and alike ones equal ones."""
    servers = {size: linear(0.3 * size**0.8, size, size**-0.9) for size in (1, 2, 4)}
    mixed, alike = np.array([1000.0] * 2 + [20.0] * 400), np.full(64, 50.0)

    def equal(size: int, lengths: Lengths) -> Allocation:
        return placed((size,) * (16 // size), lengths, servers)

    best = min(equal(size, mixed).makespan for size in servers)
    assert best == equal(2, mixed).makespan
    found = chosen(mixed, 16, servers)
    assert found == anneal(mixed, 16, servers) and found.makespan < 0.95 * best
    assert chosen(mixed, 16, servers, margin=0.3) == found
    assert chosen(mixed, 16, servers, margin=0.9) == equal(4, mixed), (
        "the widest within the margin of the best equal ones"
    )
    assert chosen(alike, 16, servers) == exhaustive(alike, 16, servers) == equal(4, alike)
    assert chosen(alike, 6, servers).tp_sizes == (1,) * 6, "four does not divide six"
    long_one = {size: replace(one, longest=500.0 * size) for size, one in servers.items()}
    assert 4 in chosen(np.array([1900.0, 5.0]), 6, long_one).tp_sizes, "no equal sizes hold the longest"
    with pytest.raises(ValueError, match="are 7 GPUs in all"):
        chosen(mixed, 8, servers, start=(4, 2, 1))


def test_a_start_that_can_hold_nothing_is_left() -> None:
    lengths = np.array([70_000.0, *[100.0] * 20])
    found = anneal(lengths, 16, replicas(), start=(1,) * 16)
    assert found.tp_sizes[0] == 8 and math.isfinite(found.makespan)


@pytest.mark.parametrize(
    ("start", "message"),
    [((4, 2, 1), "are 7 GPUs in all; give sizes of 8"), ((3, 4, 1), "3 does not divide the model's heads")],
)
def test_sizes_that_cannot_be_had_are_named(start: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        anneal(np.array([5.0, 3.0]), 8, replicas(), start=start)


def test_a_layout_keeps_replicas_on_hosts_and_nested() -> None:
    layout = layout_of((2, 4, 1, 1, 8), gpus_per_host=8)
    assert [spec.ranks for spec in layout.replicas] == [
        (0, 1, 2, 3, 4, 5, 6, 7), (8, 10, 12, 14), (9, 13), (11,), (15,),
    ]  # fmt: skip
    for before, after in itertools.permutations([(4, 4), (4, 2, 2), (2, 2, 2, 1, 1), (8,), (1,) * 8], 2):
        a, b = layout_of(before, gpus_per_host=8), layout_of(after, gpus_per_host=8, epoch=1)
        sizes = {len(group) for group in joint_groups(a, b)}
        assert sizes <= {*before, *after}, "ranks exchange bytes within a replica of one of the two"
    with pytest.raises(ValueError, match="16 is no power of two up to 8"):
        layout_of((16,), gpus_per_host=8)
    with pytest.raises(ValueError, match=r"tp_sizes=\[\]: has no replica; give at least one size"):
        layout_of([], gpus_per_host=8)


def test_a_layout_has_each_rank_once_whatever_a_host_has() -> None:
    """Hosts of 6 GPUs, and a last one that is not full."""
    for gpus_per_host, num_gpus in [(8, 3), (8, 12), (8, 64), (6, 12), (6, 15)]:
        for sizes in all_allocations(num_gpus, (1, 2, 4)):
            if sizes.count(4) <= num_gpus // gpus_per_host * (gpus_per_host // 4):
                layout = layout_of(sizes, gpus_per_host=gpus_per_host)
                layout.check_places(num_gpus)
                assert tuple(spec.tp_size for spec in layout.replicas) == sizes
                assert all(len({rank // gpus_per_host for rank in spec.ranks}) == 1 for spec in layout.replicas)
    with pytest.raises(ValueError, match="a replica of 4 would be on two hosts"):
        layout_of((4, 4, 4), gpus_per_host=6)
