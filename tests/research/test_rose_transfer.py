"""ROSE's weight transfer: closed forms, another way to play the same queues, and what more bandwidth may not do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from research.rose.transfer import DENSE_RUNGS, Codec, Coding, Deployment, Rung, _Pipeline, break_even, transfer
from research.simulator.links import Link

INFINITE = Link(bandwidth=1e300)
PLAIN = Coding(size=1.0, encode_rate=float("inf"), decode_rate=float("inf"))


def deployment(**changes: Any) -> Deployment:
    """One sender, one receiver, and stages that take no time."""
    one = dict.fromkeys(("trainer_ranks", "trainer_nodes", "serving_ranks", "serving_nodes"), 1)
    free = {"cross": INFINITE, "local": INFINITE, "relay": INFINITE, "load_rate": float("inf")}
    sizes = {"model_bytes": 1000, "bucket_bytes": 100, "pull_bytes": 100}
    return Deployment(**{**one, **free, **sizes, **changes})


def paper(gbit: float, *, tp_size: int = 1, model_bytes: int = 16_400_000_000, **changes: Any) -> Deployment:
    links = {"cross": Link(bandwidth=gbit * 1e9 / 8), "local": Link(bandwidth=25e9), "relay": Link(bandwidth=50e9)}
    return Deployment(**{**links, "load_rate": 50e9, "tp_size": tp_size, "model_bytes": model_bytes, **changes})


def played(ready: list[int], stages: list[tuple[list[int], list[int]]]) -> list[int]:
    """Ticks at which jobs are through all stages, by a clock of ticks and a queue at each server."""
    jobs = range(len(ready))
    at, since, ends = [0] * len(ready), [*ready], [-1] * len(ready)
    working: dict[tuple[int, int], tuple[int, int]] = {}  # stage and server -> job, ticks that it still needs
    for tick in itertools.count():
        while True:  # until nothing more happens in this tick
            for place, (job, rest) in list(working.items()):
                if rest == 0:
                    del working[place]
                    at[job], since[job] = at[job] + 1, tick
                    if at[job] == len(stages):
                        ends[job] = tick
            busy = {job for job, _ in working.values()}
            waiting = sorted((since[job], job) for job in jobs if job not in busy and at[job] < len(stages))
            begun = 0
            for since_tick, job in waiting:
                place = at[job], stages[at[job]][0][job]
                if since_tick <= tick and place not in working:
                    working[place] = job, stages[at[job]][1][job]
                    begun += 1
            if not begun:
                break
        if min(ends) >= 0:
            return ends
        working = {place: (job, rest - 1) for place, (job, rest) in working.items()}


@pytest.mark.parametrize("seed", range(200))
def test_queues_are_those_of_a_clock(seed: int) -> None:
    """Random jobs of whole ticks, at random servers; stages of equal length, in which two come at once, too."""
    rng = Random(seed)
    count = rng.randint(1, 6)
    ready = [rng.randint(0, 3) for _ in range(count)]
    stages = [
        ([rng.randint(0, 1) for _ in range(count)], [rng.randint(1, 4) for _ in range(count)])
        for _ in range(rng.randint(1, 4))
    ]
    line = _Pipeline([float(one) for one in ready])
    for number, (servers, seconds) in enumerate(stages):
        line.serve(str(number), servers, [float(one) for one in seconds])
    assert line.ready == played(ready, stages)
    for number, (servers, seconds) in enumerate(stages):
        works = [sum(s for one, s in zip(servers, seconds, strict=True) if one == server) for server in (0, 1)]
        assert line.busy[str(number)] == max(works)


def test_equal_buckets_in_equal_stages() -> None:
    """(n + stages - 1) times the seconds of a stage, where five of them take one second for each bucket."""
    second = Link(bandwidth=100.0)
    coding = Coding(size=1.0 - 1e-12, encode_rate=100.0, decode_rate=100.0)
    one = deployment(cross=second, local=second, relay=second)
    found = transfer("sparse", one, coding)
    assert found.seconds == pytest.approx(10 + 6 - 1)
    assert found.busy == pytest.approx(dict.fromkeys(("encode", "send", "ingress", "egress", "receive", "decode"), 10))
    slow = replace(one, cross=Link(bandwidth=25.0))
    assert transfer("sparse", slow, coding).seconds == pytest.approx(10 * 4 + 5)
    assert transfer("sparse", slow, coding).bottleneck == "send"


def test_one_bucket_is_the_sum_of_the_stages() -> None:
    one = deployment(
        bucket_bytes=1000,
        pull_bytes=1000,
        trainer_ranks=2,
        trainer_nodes=2,
        cross=Link(bandwidth=50.0, latency_s=3.0),
        local=Link(bandwidth=200.0, latency_s=1.0),
        relay=Link(bandwidth=250.0),
        load_rate=500.0,
    )
    for rung in ("batch", "async"):  # gathers the half of the other node
        assert transfer(rung, one).seconds == pytest.approx((2.5 + 1) + (20 + 3) + 4 + 4 + (5 + 1) + 2)


def test_batch_is_the_sum_of_the_phases() -> None:
    """Ten buckets; what follows within a phase adds one bucket's time."""
    one = deployment(cross=Link(bandwidth=50.0), local=Link(bandwidth=100.0), load_rate=1000.0)
    assert transfer("batch", one).seconds == pytest.approx(20 + 10 + 1)
    assert transfer("async", one).seconds == pytest.approx(20 + 1 + 0.1)


def test_a_batch_is_pulled_when_all_of_it_is_at_the_relay() -> None:
    """Buckets arrive every ten seconds, and two, or five halves, are a batch; the last one is loaded at the end."""
    one = deployment(cross=Link(bandwidth=10.0), pull_bytes=250, load_rate=100.0)
    assert transfer("async", one).seconds == transfer("shards", one).seconds == pytest.approx(100 + 2)
    halves = replace(one, serving_ranks=2, tp_size=2)
    assert transfer("async", halves).seconds == pytest.approx(100 + 2)
    assert transfer("shards", halves).seconds == pytest.approx(100 + 5 / 2)


def test_infinite_bandwidth_leaves_only_the_codec() -> None:
    """Ranks encode their shares at the same time, and receivers decode theirs."""
    one = deployment(trainer_ranks=4, trainer_nodes=2, serving_ranks=4, serving_nodes=1, tp_size=2, pull_bytes=1)
    coding = Coding(size=0.5, encode_rate=10.0, decode_rate=1000.0)
    assert transfer("sparse", one, coding).seconds == pytest.approx(1000 / 4 / 10 + 4 * 50 / 2 / 1000)
    assert transfer("shards", one).seconds == pytest.approx(0)


def test_what_crosses_and_what_is_pulled() -> None:
    """One copy crosses, by both nodes' NICs; each receiver pulls all of it, or its part; a node's ranks share a NIC."""
    for tp_size, part in ((1, 1.0), (4, 0.25)):
        one = paper(1, tp_size=tp_size)
        gb = one.model_bytes / 1e9
        batched, sharded = transfer("async", one).busy, transfer("shards", one).busy
        assert batched["send"] == pytest.approx(8 * gb) and sharded["send"] == pytest.approx(8 * gb / 2)
        for stage in ("egress", "receive"):
            assert (batched[stage], sharded[stage]) == pytest.approx((16 * gb / 50, 16 * gb * part / 50))
        sparse = transfer("sparse", one, Coding(size=0.03, encode_rate=1e9, decode_rate=2e9)).busy
        assert sparse["send"] == pytest.approx(0.03 * sharded["send"])
        assert sparse["encode"] == pytest.approx(gb / 16) and sparse["decode"] == pytest.approx(gb * part / 2)


def test_more_bandwidth_never_takes_longer_and_each_rung_is_faster_than_the_one_before() -> None:
    codings: dict[Rung, Coding] = {"sparse": Coding(size=0.006, encode_rate=10e9, decode_rate=20e9)}
    rungs: tuple[Rung, ...] = (*DENSE_RUNGS, "sparse")
    for tp_size, model_bytes in ((1, 16_400_000_000), (4, 65_500_000_000), (2, 123_456_789)):
        before: list[float] | None = None
        for gbit in (0.5, 1, 3, 4, 5, 20, 70, 200):
            one = paper(gbit, tp_size=tp_size, model_bytes=model_bytes)
            seconds = [transfer(rung, one, codings.get(rung)).seconds for rung in rungs]
            assert before is None or all(now <= then for now, then in zip(seconds, before, strict=True))
            assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0] / 2
            before = seconds


def test_sparse_is_dense_where_that_is_smaller() -> None:
    """The codec has then worked in vain, and receivers load as in `shards`."""
    one = paper(5)
    for size in (1.0, 3.0):
        found = transfer("sparse", one, Coding(size=size, encode_rate=float("inf"), decode_rate=1.0))
        assert found == transfer("shards", one)
    found = transfer("sparse", one, Coding(size=3.0, encode_rate=1e6, decode_rate=1.0))
    assert found.seconds > 1000 > transfer("shards", one).seconds


def test_a_codec_between_its_points() -> None:
    codec = Codec(
        (
            (0.1, Coding(size=0.2, encode_rate=1.0, decode_rate=float("inf"))),
            (0.3, Coding(size=0.4, encode_rate=0.25, decode_rate=float("inf"))),
        )
    )
    between = codec.at(0.2)
    assert (between.size, between.encode_rate) == pytest.approx((0.3, 1 / 2.5))
    assert between.decode_rate == float("inf")
    assert (codec.at(0.01).encode_rate, codec.at(0.9).encode_rate) == (1.0, 0.25)


def codec(bytes_per_change: float, rate: float) -> Codec:
    ends = ((at, Coding(size=at * bytes_per_change / 2, encode_rate=rate, decode_rate=rate)) for at in (1e-6, 1.0))
    return Codec(tuple(ends))


def test_break_even() -> None:
    """Without cost of the codec, by bytes: a third for six bytes a change. Else from its rates."""
    assert break_even(paper(1), codec(6, float("inf"))) == pytest.approx(1 / 3, rel=1e-3)
    assert break_even(paper(1), codec(8, float("inf"))) == pytest.approx(1 / 4, rel=1e-3)
    assert break_even(paper(1), codec(1, float("inf"))) is None
    assert break_even(paper(200), codec(6, 1e9)) == 0.0
    slow = Codec(tuple((at, Coding(size=0.0, encode_rate=100.0, decode_rate=1 / at)) for at in (1e-3, 1.0)))
    one = deployment(cross=Link(bandwidth=10.0))  # dense: 100 s; sparse: 1 s for the first bucket, then 1000 x density
    assert break_even(one, slow) == pytest.approx(0.099, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paper(1, trainer_ranks=15), "Deployment.trainer_ranks=15: must be a multiple of trainer_nodes=2"),
        (lambda: paper(1, tp_size=3), "Deployment.serving_ranks=16: must be a multiple of tp_size=3"),
        (lambda: paper(1, load_rate=0.0), "Deployment.load_rate=0.0: must be above 0, or inf"),
        (lambda: Codec(((0.5, PLAIN), (0.1, PLAIN))), r"Codec.points: have the densities \[0.5, 0.1\]"),
        (lambda: Coding(size=1, encode_rate=-1, decode_rate=1), "Coding.encode_rate=-1: must be above 0"),
        (lambda: transfer("sparse", paper(1)), "coding=None: give one for the rung sparse"),
        (lambda: transfer("shards", paper(1), PLAIN), "coding=Coding.*this is 'shards'"),
    ],
)
def test_what_it_refuses(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
