"""PAT's controller in simulated rollouts, and where its sequences go."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.coordination.views import EndedView, LayoutView, SequenceView
from engines.parallel.layout import contiguous_layout, joint_groups, nested_layout
from research.pat.algorithm1 import one_switch
from research.pat.controller import PatController, PatOptions
from research.pat.redistribute import balance, redistribute
from research.simulator.cluster import SimulatedRollout
from research.workloads.lengths import LogNormalLengths
from tests.research.pat_world import A40, CAP, KV_TOKENS, NUM_RANKS, PACE, deployment, roll_out

LENGTHS = LogNormalLengths(median=60, sigma=0.884, cap=CAP)
HISTORY = [(length, length >= CAP) for length in LENGTHS.draw(500, seed=9)]


@pytest.mark.parametrize("seed", range(20))
def test_balance(seed: int) -> None:
    rng = random.Random(seed)
    count, ids = rng.randint(1, 40), rng.sample(range(9), rng.randint(1, 5))
    lengths = {(0, uid, 0): rng.randint(1, 1000) for uid in range(count)}
    places = balance(lengths, ids)
    assert places.keys() == lengths.keys()
    groups = {id_: [lengths[one] for one in places if places[one] == id_] for id_ in ids}
    assert max(map(len, groups.values())) == -(-count // len(ids))
    # Longest first is at most 4/3 of the best; the mean and the longest are bounds of the best.
    best = max(max(lengths.values()), sum(lengths.values()) / len(ids))
    assert max(map(sum, groups.values())) <= 4 / 3 * best + max(lengths.values())
    assert balance(dict(reversed(lengths.items())), reversed(ids)) == places


@pytest.mark.parametrize("seed", range(40))
def test_redistribute(seed: int) -> None:
    """Equal numbers, and no more sequences leave the ranks that exchange KV than must."""
    rng = random.Random(seed)
    make = rng.choice([nested_layout, contiguous_layout])
    before, after = nested_layout(range(8), rng.choice([1, 2, 4])), make(range(8), rng.choice([1, 2, 4, 8]), epoch=1)
    views = [
        SequenceView(
            sequence_id=(0, uid, 0), index=uid, group_id=uid, num_prompt_tokens=4, num_generated=rng.randint(0, 99),
            max_tokens=100, last_replica_id=rng.choice([None, *(spec.id for spec in before.replicas)]), has_kv=False,
        )
        for uid in range(rng.randint(1, 60))
    ]  # fmt: skip
    rng.shuffle(views)
    ran = {one.sequence_id: one.last_replica_id for one in views if one.last_replica_id is not None}
    places = redistribute(views, before, after)
    groups = joint_groups(before, after)
    if not groups:
        assert places == {}
        return
    assert places.keys() == ran.keys()
    counts = Counter(places.values())
    assert max(counts.values(), default=0) <= -(-len(ran) // len(after.replicas)) + 1
    home = {spec.id: spec.ranks[0] for spec in before.replicas}
    new = {spec.id: spec.ranks[0] for spec in after.replicas}
    for ranks in groups:
        members = {id_ for id_, replica_id in ran.items() if home[replica_id] in ranks}
        most = -(-len(ran) * sum(spec.ranks[0] in ranks for spec in after.replicas) // len(after.replicas))
        stay = {id_ for id_ in members if new[places[id_]] in ranks}
        assert len(members - stay) == max(0, len(members) - most)
    assert redistribute(reversed(views), before, after) == places


def test_a_deployment_s_steps_are_those_of_its_pace() -> None:
    one = deployment()
    for size, predictor in one.steps.items():
        for batch, context in ((1, 3000), (7, 900), (50, 700), (200, 500)):
            if batch * context < KV_TOKENS[size]:
                expected = A40[size].step_seconds(batch, batch, batch * context)
                assert float(predictor.seconds(batch, batch * context)) == pytest.approx(expected, rel=0.05)
    assert one.switch_seconds(2, 8, 0.0) == pytest.approx(PACE.switch(*(nested_layout(range(8), n) for n in (2, 8)), 0))
    assert one.switch_seconds(2, 8, 1e6) > one.switch_seconds(2, 8, 1e3)


def rollout(lengths: list[int], size: int, policy: PatController | None = None) -> SimulatedRollout:
    return roll_out(lengths, nested_layout(range(NUM_RANKS), size), policy)


def run_pat(lengths: list[int], **options: Any) -> tuple[SimulatedRollout, PatController, list[int]]:
    policy = PatController(deployment(), PatOptions(**options), ended=HISTORY)
    first = policy.first_tp_size(np.full(len(lengths), 16.0), np.full(len(lengths), float(CAP)))
    done = rollout(lengths, first, policy)
    sizes = [first, *(one.chosen for one in policy.log if one.chosen != one.tp_size)]
    return done, policy, sizes


@pytest.mark.parametrize("seed", range(2))
def test_a_long_tail_runs_on_wider_and_wider_replicas(seed: int) -> None:
    lengths = LENGTHS.draw(600, seed=seed)
    best = min(rollout(lengths, size).makespan for size in (1, 2, 4, 8))
    done, policy, sizes = run_pat(lengths)
    assert sizes == sorted(set(sizes)) and len(sizes) > 1
    assert done.makespan < best, "no static layout is as fast"
    first = policy.log[0]
    assert first.seconds == pytest.approx(done.makespan, rel=0.35), "from expected lengths"
    assert {step.tp_size for step in done.steps} == set(sizes)


def test_equal_lengths_need_no_switch() -> None:
    policy = PatController(deployment(), ended=[(200, False)] * 100)
    done = rollout([200] * 256, policy.first_tp_size(np.full(256, 16.0), np.full(256, float(CAP))), policy)
    assert not [one for one in policy.log if one.chosen != one.tp_size] and policy.log
    assert policy.log[0].seconds == pytest.approx(done.makespan, rel=0.1)


def test_the_paper_s_estimator_overrates_what_a_switch_saves() -> None:
    lengths = LENGTHS.draw(300, seed=0)
    _, paper, sizes = run_pat(lengths, estimator="paper")
    _, own, _ = run_pat(lengths)
    assert sizes == sorted(set(sizes)), "it goes up only"
    assert paper.log[0].kept_seconds > 1.5 * own.log[0].kept_seconds


def test_dwell_margin_and_rungs_make_it_decide_less() -> None:
    lengths = LENGTHS.draw(300, seed=0)
    _, policy, sizes = run_pat(lengths, margin=1.0)
    assert len(sizes) == 1 and len(policy.log) > 10
    _, rarely, _ = run_pat(lengths, rung=0.5)
    assert len(rarely.log) < len(policy.log) / 2
    _, late, _ = run_pat(lengths, dwell_s=1e9)
    assert sum(one.chosen != one.tp_size for one in late.log) <= 1


def view_of(
    lengths: list[int],
    *,
    phase: int = 0,
    now: float = 0.0,
    size: int = 8,
    num_delivered: int = 0,
    max_tokens: int = CAP,
    **fields: Any,
) -> LayoutView:
    unfinished = {
        (0, uid, 0): SequenceView(
            sequence_id=(0, uid, 0), index=uid, group_id=uid, num_prompt_tokens=16, num_generated=length,
            max_tokens=max_tokens, last_replica_id=uid % (NUM_RANKS // size) if length else None, has_kv=False,
        )
        for uid, length in enumerate(lengths)
    }  # fmt: skip
    rest = {"num_waiting": 0, "ended": (), "replicas": {}, **fields}
    layout = nested_layout(range(NUM_RANKS), size)
    return LayoutView(phase=phase, now=now, layout=layout, unfinished=unfinished, num_delivered=num_delivered, **rest)


def test_replicas_of_unequal_size_are_refused() -> None:
    view = view_of([5] * 20, size=1)
    first, second, *others = view.layout.replicas
    joined = replace(first, ranks=(*first.ranks, *second.ranks))
    layout = replace(view.layout, replicas=(joined, *others))
    with pytest.raises(ValueError, match=r"PatController: the layout has replicas of TP sizes \[1, 2\]; begin"):
        PatController(deployment()).decide(replace(view, layout=layout))


@pytest.mark.parametrize("estimator", ["lookahead", "paper"])
def test_a_second_rollout_begins_anew(estimator: Any) -> None:
    """On another clock, and in the wide layout that the first one has left."""
    policy = PatController(deployment(), PatOptions(estimator=estimator, dwell_s=50.0), ended=HISTORY)
    many, few = [0] * 1500, [700] * 3
    assert policy.decide(view_of(many, now=500.0)).layout.replicas[0].tp_size < 8
    assert policy.decide(view_of(few, now=505.0, size=1, num_delivered=1497)) is None, "within the dwell time"
    assert policy.decide(view_of(few, now=600.0, size=1, num_delivered=1497)).layout.replicas[0].tp_size > 1
    assert policy.decide(view_of(many, phase=1, now=1.0)).layout.replicas[0].tp_size < 8


@pytest.mark.parametrize("estimator", ["lookahead", "paper"])
@pytest.mark.parametrize(("phase", "num_delivered"), [(1, 0), (1, 1), (0, 0)])
def test_more_sequences_than_before_are_news(estimator: Any, phase: int, num_delivered: int) -> None:
    """After a rollout that was aborted, after a rollout whose first one ended at once, or in the same rollout."""
    policy = PatController(deployment(), PatOptions(estimator=estimator), ended=HISTORY)
    assert policy.decide(view_of([700] * 8, size=8)) is None
    more = view_of([0] * 1500, size=8, phase=phase, num_delivered=num_delivered)
    assert policy.decide(more).layout.replicas[0].tp_size < 8


@pytest.mark.parametrize("estimator", ["lookahead", "paper"])
def test_trajectories_that_wait_for_their_first_observation_leave_the_decision_for_later(estimator: Any) -> None:
    policy = PatController(deployment(), PatOptions(estimator=estimator), ended=HISTORY)
    view = view_of([0] * 1500, size=8)
    parked = {id_: msgspec.structs.replace(one, is_parked=True) for id_, one in view.unfinished.items()}
    assert policy.decide(replace(view, unfinished=parked)) is None
    change = policy.decide(view)
    assert change is not None and change.layout.replicas[0].tp_size < 8


@pytest.mark.parametrize("estimator", ["lookahead", "paper"])
def test_a_layout_without_times_is_an_error(estimator: Any) -> None:
    one = deployment()
    steps = {size: predictor for size, predictor in one.steps.items() if size != 4}
    policy = PatController(replace(one, steps=steps), PatOptions(estimator=estimator))
    with pytest.raises(ValueError, match=r"layout has TP size 4, and the deployment has times of \[1, 2, 8\]"):
        policy.decide(view_of([5] * 8, size=4))


def test_the_way_back_is_to_the_first_layout_of_the_rollout() -> None:
    """Few sequences that are nearly done go from TP2 to TP4 where that is all; where the way back to the first layout
    takes for ever, they stay in TP2, and in TP4 they go back while there is still something to generate."""
    few = [700] * 3
    plain = PatController(deployment(), ended=HISTORY)
    assert plain.decide(view_of(few, size=2)).layout.replicas[0].tp_size > 2
    one = replace(deployment(), way_back_seconds=lambda end, start: 1e6)
    policy = PatController(one, ended=HISTORY)
    assert policy.decide(view_of(few, size=2)) is None
    assert policy.decide(view_of(few[:1], size=4, now=1.0)).layout.replicas[0].tp_size == 2
    assert policy.decide(view_of(few, size=4, phase=1, now=2.0)) is None, "another rollout, which began in TP4"


def test_a_plan_is_made_anew_where_fewer_end_than_it_expected() -> None:
    """Twelve sequences are expected to end with the next token, for which no switch pays. Ten go on: more than the
    number at which the next decision is due."""
    one = replace(deployment(), switch_seconds=lambda before, after, tokens: 0.5)
    policy = PatController(one, ended=[(15, False)] * 970 + [(1200, False)] * 30)
    assert policy.decide(view_of([14] * 12, size=1)) is None
    found = []
    for step in range(1, 40):
        view = view_of([14 + step] * 10, size=1, now=0.02 * step)
        found += [(step, change) for _ in range(NUM_RANKS) if (change := policy.decide(view)) is not None]
    step, change = found[0]
    assert 8 < step <= 16 and change.layout.replicas[0].tp_size == 4
    assert len(policy.log) < 1 + 40 / 16 + len(found)


def test_nothing_is_left_to_decide_in_the_widest_replicas() -> None:
    """Beside steps that run, a decision takes time of the rank that makes it."""
    policy = PatController(deployment(), ended=HISTORY)
    assert policy.decide(view_of([700] * 8, size=8)) is None and len(policy.log) == 1, "the first decision of a rollout"
    for num_left in range(7, 0, -1):
        assert policy.decide(view_of([900] * num_left, size=8, num_delivered=8 - num_left)) is None
    assert len(policy.log) == 1
    assert policy.decide(view_of([0] * 1500, size=8, phase=1)).layout.replicas[0].tp_size < 8, "the next rollout"


def test_the_paper_decides_when_one_has_ended_or_after_64_steps() -> None:
    policy = PatController(deployment(), PatOptions(estimator="paper"))
    for left, calls in ((9, 1), (8, 1), (7, 1), (7, 64 * 4)):  # 4 replicas
        for _ in range(calls):
            policy.decide(view_of([16] * left, size=2, max_tokens=17))
    assert [one.num_unfinished for one in policy.log] == [9, 8, 7, 7] and not any(one.chosen != 2 for one in policy.log)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tp_size", [None, 1, 2])
def test_algorithm_1(seed: int, tp_size: int | None) -> None:
    """Line by line, each step of each DP group priced by itself."""
    rng = random.Random(seed)
    one = replace(deployment(), switch_seconds=lambda before, after, tokens: 0.3 + tokens / 1e5, prefills={})
    count, left = rng.randint(3, 40), rng.randint(5, 90)
    contexts = [rng.randint(20, 400) for _ in range(count)]
    dp_groups = [rng.randrange(8 // (tp_size or 1)) for _ in range(count)]

    def est_rem_time(size: int, batch: int, num_tokens: float) -> float:
        return sum(float(one.steps[size].seconds(batch, num_tokens + batch * (step + 0.5))) for step in range(left))

    seconds = {}
    for size in (1, 2, 4, 8):
        merged = -(-count * size // 8)
        seconds[size] = est_rem_time(size, merged, sum(contexts) / count * merged)
        seconds[size] += 0.3 + sum(contexts) / 1e5 if tp_size else 0.0
    if tp_size:
        groups = [[n for n, its in zip(contexts, dp_groups, strict=True) if its == group] for group in {*dp_groups}]
        seconds[tp_size] = max(est_rem_time(tp_size, len(group), sum(group)) for group in groups)
    found = one_switch(one, np.array(contexts, float), np.full(count, float(left)), np.array(dp_groups), tp_size)
    best = min(seconds, key=seconds.__getitem__)
    assert found.stages == ((count, best),)
    assert found.seconds == pytest.approx(seconds[best], rel=1e-6)
    assert found.kept_seconds == (pytest.approx(seconds[tp_size], rel=1e-6) if tp_size else np.inf)


def test_those_that_stay_long_are_spread_evenly() -> None:
    """Three replicas have only sequences that are about to end; in the other five all are long."""
    before, after = nested_layout(range(8), 1), nested_layout(range(8), 4, epoch=1)
    views, remaining = [], {}
    for uid in range(40):
        home = uid % 8
        views.append(
            SequenceView(
                sequence_id=(0, uid, 0), index=uid, group_id=uid, num_prompt_tokens=4, num_generated=uid,
                max_tokens=100, last_replica_id=home, has_kv=False,
            )
        )  # fmt: skip
        remaining[0, uid, 0] = 1.0 if home in (0, 2, 4) else 900.0
    places = redistribute(views, before, after, remaining)
    assert set(Counter(places.values()).values()) == {20}
    assert sorted(Counter(places[id_] for id_, more in remaining.items() if more > 1).values()) == [12, 13]
    unknown = redistribute(views, before, after)
    assert sorted(Counter(unknown[id_] for id_, more in remaining.items() if more > 1).values()) == [5, 20]


def test_sequences_that_have_not_run_stay_with_the_schedule_policy() -> None:
    policy = PatController(deployment(), ended=HISTORY)
    change = policy.decide(view_of([5, 0, 7] * 500))
    assert change is not None and {uid % 3 for _, uid, _ in change.places} == {0, 2} and len(change.places) == 1000


def test_aborted_sequences_teach_nothing() -> None:
    policy = PatController(deployment(), ended=[(100, False), (200, True)])
    ended = [
        EndedView(sequence_id=(0, uid, 0), group_id=0, num_prompt_tokens=1, num_generated=uid, finish_reason=reason)
        for uid, reason in ((3, "abort"), (40, "stop"), (CAP, "length"))
    ]
    policy.decide(view_of([5], ended=tuple(ended)))
    assert [*policy._lifetimes._ended] == [(100, False), (200, True), (40, False), (CAP, True)]


def test_a_sequence_that_has_no_room_for_its_limit_counts_with_its_room() -> None:
    one = deployment(max_model_len=100)
    policy = PatController(one, PatOptions(estimator="paper"))
    policy.decide(view_of([60] * 9, size=2))
    assert policy.log[0].kept_seconds == pytest.approx(24 * float(one.steps[2].seconds(3, 3 * 88)), rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "crystal ball"}, "estimator='crystal ball'"),
        ({"margin": -1}, "margin=-1"),
        ({"margin": 1.5}, "margin=1.5: must be at least 0, at most 1"),
        ({"rung": -1}, "rung=-1"),
        ({"rung": 20}, "rung=20: must be at least 0, at most 1"),
        ({"dwell_s": float("inf")}, "dwell_s=inf"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatOptions(**options)
