"""Which serving replicas are lent: means by brute force, and a book that random jobs keep."""

from __future__ import annotations

from random import Random

import pytest

from research.rose.activation import Lending, MeanUse


def test_a_mean_by_hand() -> None:
    """0.2 for 10 s, then 0.8 for 5 s."""
    use = MeanUse(window_s=12.0)
    use.observe(100.0, 0.2)
    assert use.mean(100.0) == 0.2
    use.observe(110.0, 0.8)
    assert use.mean(110.0) == pytest.approx(0.2)
    assert use.mean(115.0) == pytest.approx((7 * 0.2 + 5 * 0.8) / 12)
    assert use.mean(1000.0) == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(20))
def test_the_mean_of_a_window(seed: int) -> None:
    """Against a sum over ticks of a quarter of a second."""
    random, tick = Random(seed), 0
    window = random.choice([1, 8, 100])
    use, of_ticks = MeanUse(window_s=window / 4), list[float]()
    for _ in range(400):
        share = random.choice([0.0, 1.0, random.random()])
        use.observe(tick / 4, share)
        ticks = random.choice([0, 1, 3, 20])
        of_ticks += [share] * ticks
        tick += ticks
        if ticks:
            recent = of_ticks[-window:]
            assert use.mean(tick / 4) == pytest.approx(sum(recent) / len(recent), abs=1e-9)
        else:
            assert use.mean(tick / 4) == pytest.approx(sum(of_ticks[-window:] or [share]) / (min(tick, window) or 1))
    use.mean(tick / 4 + 1000)
    assert len(use._spans) == 1


def test_the_idlest_are_lent_and_each_to_one_job() -> None:
    book, uses = Lending(), {0: 0.5, 1: 0.1, 2: 0.3, 3: 0.1}
    assert book.lend("a", 2, uses, 0.0) == [1, 3]
    assert book.lend("b", 5, uses, 0.0) == [2, 0], "up to 5"
    assert book.lend("c", 1, uses, 0.0) == [] and book.of("c") == []
    with pytest.raises(ValueError, match="job='a': has borrowed replicas already; release them first"):
        book.lend("a", 1, uses, 0.0)
    with pytest.raises(ValueError, match="count=0: must be at least 1"):
        book.lend("d", 0, uses, 0.0)
    assert book.release("a") == [1, 3] and book.release("a") == []
    assert book.lend("c", 1, uses, 0.0) == [1]


def test_a_stalled_replica_cools_down() -> None:
    book = Lending()
    book.lend("a", 2, {0: 0.0, 1: 0.0}, 0.0)
    book.stall(0, 10.0)
    assert book.ready("a", 10.0) == book.ready("a", 14.9) == [1]
    assert book.ready("a", 15.0) == book.of("a") == [0, 1]
    book.stall(1, 20.0)
    book.release("a")
    assert book.lend("b", 2, {0: 0.0, 1: 0.0}, 21.0) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_the_book(seed: int) -> None:
    """Random jobs: none has more than it asked for, no replica is lent twice, and no idler one was left out."""
    random, book, now = Random(seed), Lending(), 0.0
    stalled: dict[int, float] = {}
    lent: dict[str, list[int]] = {}
    for _ in range(300):
        now += random.random()
        job = random.choice("abcd")
        if random.random() < 0.3:
            replica = random.randrange(12)
            stalled[replica] = now
            book.stall(replica, now)
        elif job in lent:
            assert book.release(job) == sorted(lent.pop(job))
        else:
            uses = {replica: random.choice([0.0, 0.5, random.random()]) for replica in random.sample(range(12), 9)}
            count = random.randint(1, 5)
            got = book.lend(job, count, uses, now)
            taken = {replica for replicas in lent.values() for replica in replicas}
            left = uses.keys() - taken - {replica for replica, at in stalled.items() if now - at < 5} - {*got}
            assert not taken & {*got} and len(got) == min(count, len(left) + len(got))
            assert all((uses[one], one) < (uses[other], other) for one in got for other in left)
            if got:
                lent[job] = got
        assert sorted(book.borrowers) == sorted(replica for replicas in lent.values() for replica in replicas)


def test_what_they_refuse() -> None:
    with pytest.raises(ValueError, match=r"use=1\.5: a share of the KV memory"):
        MeanUse().observe(0.0, 1.5)
    with pytest.raises(ValueError, match="MeanUse: nothing was observed"):
        MeanUse().mean(0.0)
    with pytest.raises(ValueError, match=r"MeanUse\.window_s=0"):
        MeanUse(window_s=0)
    with pytest.raises(ValueError, match=r"Lending\.cool_down_s=-1"):
        Lending(cool_down_s=-1)
