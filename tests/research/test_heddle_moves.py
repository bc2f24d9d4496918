"""Ranks, the rank rule and the transmission scheduler, each against a plain recomputation."""

from __future__ import annotations

import random
import statistics
from fractions import Fraction

import pytest

from engines.coordination.views import EndedView, Prediction, SequenceView
from engines.sequence import SequenceId
from research.heddle.migration import capacities, group_of, pays
from research.heddle.priority import Estimate, by_remaining, by_total, first_come, round_robin, shortest_first
from research.heddle.ranks import Ranks
from research.heddle.transmission import Transmission, Transmissions


def view(uid: int, total: float | None, num_generated: int = 0) -> SequenceView:
    prediction = None
    if total is not None:
        prediction = Prediction(remaining=total, num_generated=0, num_turns=0, now=0.0, source="test")
    return SequenceView(
        sequence_id=(0, uid, 0),
        index=uid,
        group_id=uid,
        num_prompt_tokens=4,
        num_generated=num_generated,
        max_tokens=1000,
        last_replica_id=None,
        has_kv=False,
        prediction=prediction,
    )


def ended(sequence_id: SequenceId) -> EndedView:
    return EndedView(sequence_id=sequence_id, group_id=0, num_prompt_tokens=4, num_generated=9, finish_reason="stop")


def test_ranks_against_a_sorted_list() -> None:
    """Random predictions, some without one, and ends; ties by id."""
    rng = random.Random(0)
    ranks, known = Ranks(), dict[SequenceId, float]()
    totals = dict[SequenceId, float]()
    for _ in range(3000):
        uid = rng.randrange(60)
        id_ = (0, uid, 0)
        if rng.random() < 0.2:
            ranks.remove(ended(id_))
            known.pop(id_, None)
            totals.pop(id_, None)
        else:
            total = None if rng.random() < 0.1 and id_ not in known else float(rng.randrange(0, 200, 10))
            if total is not None:
                known[id_] = total
            ranks.put(view(uid, total))
            totals[id_] = total if total is not None else statistics.fmean(known.values()) if known else 0.0
        ordered = sorted(totals, key=lambda one: (-round(totals[one], 6), one))
        assert [round(ranks.total(one), 6) for one in ranks] == [round(totals[one], 6) for one in ordered]
        assert set(ranks) == set(ordered) and len(ranks) == len(ordered)
        assert [ranks.rank(one) for one in ranks] == list(range(len(ordered)))
        assert ranks.mean == pytest.approx(statistics.fmean(known.values()) if known else 0.0, abs=1e-9)


def test_priorities() -> None:
    ranks = Ranks()
    some = [view(0, 100.0, 30), view(1, 300.0, 290), view(2, None, 50), view(3, 40.0, 60)]
    for one in some:
        ranks.put(one)
    estimates = [ranks.estimate(one) for one in some]
    mean = 440 / 3
    assert estimates[2] == pytest.approx((mean - 50, mean))
    assert estimates[3] == (0.0, 60.0)  # it has outgrown its prediction
    assert [by_remaining(one, it) for one, it in zip(some, estimates, strict=True)] == pytest.approx(
        [70, 10, mean - 50, 0]
    )
    assert [by_total(one, it) for one, it in zip(some, estimates, strict=True)] == pytest.approx([100, 300, mean, 60])
    assert shortest_first(some[0], estimates[0]) == -70
    assert [first_come(one, Estimate(0, 0)) for one in some] == [0, -1, -2, -3]
    assert {round_robin(one, it) for one, it in zip(some, estimates, strict=True)} == {0}


def plain_capacities(sizes: list[int], num_active: int) -> list[int]:
    shares = [Fraction(size * num_active, sum(sizes)) for size in sizes]
    counts = [int(share) for share in shares]
    while sum(counts) < num_active:
        place = max(range(len(sizes)), key=lambda one: (shares[one] - counts[one], -one))
        counts[place] += 1
    return counts


@pytest.mark.parametrize("seed", range(50))
def test_the_rank_rule_against_a_plain_one(seed: int) -> None:
    """Capacities by largest remainders; a rank's group is where it falls when all are dealt out in order."""
    rng = random.Random(seed)
    sizes = [rng.randrange(6) for _ in range(rng.randrange(1, 6))] + [1]
    num_active = rng.randrange(1, sum(sizes) + 3)
    counts = capacities(sizes, num_active)
    assert counts == plain_capacities(sizes, num_active) and sum(counts) == num_active
    dealt = [group for group, count in enumerate(counts) for _ in range(count)]
    assert [group_of(rank, counts) for rank in range(num_active)] == dealt
    margin = rng.choice([0, 0.5, 1, 2])
    for rank, group in enumerate(dealt):
        for current in range(len(sizes)):
            first = sum(counts[:current])
            stays = first - margin <= rank < first + counts[current] + margin
            assert group_of(rank, counts, current, margin) == (current if stays else group)


def test_groups_without_trajectories_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes"):
        capacities([0, 0], 3)


def test_a_move_pays_by_what_it_saves() -> None:
    """100 tokens to come: 0.5 s on a replica that is 5 ms faster, or 0.1 s for those that stay."""
    assert pays(100, (0.02, 0.015), 0.0199, 0.5) and not pays(100, (0.02, 0.015), 0.0199, 0.51)
    assert pays(100, (0.02, 0.03), 0.019, 0.1) and not pays(100, (0.02, 0.03), 0.019, 0.11)
    assert pays(0, (0.02, 0.03), 0.02, 0.0), "what is hidden costs nothing"


def resimulated(asked: list[tuple[float, Transmission]]) -> dict[SequenceId, float]:
    """When each begins: at every time at which something is asked for or ends, all in descending length."""
    times, begins = sorted({time for time, _ in asked}), dict[SequenceId, float]()
    running: list[tuple[float, Transmission]] = []
    while times:
        now = times.pop(0)
        running = [one for one in running if one[0] > now]
        waiting = [one for time, one in asked if time <= now and one.sequence_id not in begins]
        for one in sorted(waiting, key=lambda one: (one.negative_length, one.sequence_id)):
            ends = {end for _, other in running for end in (other.source, other.target)}
            if one.source not in ends and one.target not in ends:
                begins[one.sequence_id] = now
                running.append((now + one.seconds, one))
                times = sorted({*times, now + one.seconds})
    return begins


@pytest.mark.parametrize("seed", range(20))
def test_transmissions_against_a_plain_simulation(seed: int) -> None:
    rng = random.Random(seed)
    asked = []
    for uid in range(40):
        source, target = rng.sample(range(5), 2)
        one = Transmission(-float(rng.randrange(1, 9)), (0, uid, 0), source, target, rng.randrange(1, 8) / 4)
        asked.append((rng.randrange(20) / 4, one))
    moves, begins, ends = Transmissions(), dict[SequenceId, float](), dict[SequenceId, tuple[float, Transmission]]()
    times = {time for time, _ in asked}
    while times:
        now = min(times)
        times.discard(now)
        for time, one in asked:
            if time == now:
                moves.ask(one)
        for one in moves.begin(now):
            begins[one.sequence_id], ends[one.sequence_id] = now, (now + one.seconds, one)
            times.add(now + one.seconds)
            assert moves.left_s(one.sequence_id, now) == one.seconds
        live = [end for until, one in ends.values() if until > now for end in (one.source, one.target)]
        assert len(live) == len(set(live)), "a replica is in two transmissions"
    assert begins == resimulated(asked) and len(begins) == 40


def test_a_transmission_is_cancelled_before_it_begins_only() -> None:
    moves = Transmissions()
    first, second = (Transmission(-float(9 - uid), (0, uid, 0), 0, uid + 1, 1.0) for uid in range(2))
    moves.ask(second)
    moves.ask(first)
    assert moves.begin(0.0) == [first] and moves.begin(0.5) == []
    assert moves.cancel(first.sequence_id) is None and moves.left_s(first.sequence_id, 0.75) == 0.25
    assert moves.cancel(second.sequence_id) == second
    assert moves.begin(1.0) == [] and moves.left_s(second.sequence_id, 1.0) == 0.0
