"""Plans for the true lengths, played in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engines.coordination.views import LayoutChange, LayoutView, SequenceView
from engines.parallel.layout import Layout, nested_layout
from research.pat.controller import PatController
from research.pat.hindsight import PlayedPlan
from research.pat.lookahead import Plan, make_plan
from research.workloads.lengths import LogNormalLengths
from tests.research.pat_world import CAP, KV_TOKENS, NUM_RANKS, PROMPT, deployment, roll_out

LENGTHS = LogNormalLengths(median=60, sigma=0.884, cap=CAP).draw(750, seed=0)
PLAN = make_plan(deployment(), np.full(len(LENGTHS), float(PROMPT)), np.array(LENGTHS, float), None)
COUNTS = [count for count, _ in PLAN.stages]
SIZES = [size for _, size in PLAN.stages]


def test_the_plan_is_played_and_is_what_it_promised() -> None:
    assert len(SIZES) > 1, "the lengths must be worth a switch"
    policy = PlayedPlan(PLAN, deployment())
    done = roll_out(LENGTHS, policy.layout(), policy)
    sizes = {step.epoch: step.tp_size for step in sorted(done.steps, key=lambda step: step.epoch)}
    assert list(sizes.values()) == SIZES
    moments = [one.num_unfinished for one in done.decisions if one.action == "regroup"]
    assert all(moment <= count for moment, count in zip(moments, COUNTS[1:], strict=True))
    assert done.makespan == pytest.approx(PLAN.seconds, rel=0.05)
    assert done.makespan < min(roll_out(LENGTHS, nested_layout(range(NUM_RANKS), size)).makespan for size in KV_TOKENS)
    assert roll_out(LENGTHS, policy.layout(), policy).finish_times == done.finish_times, "it has no state"


@pytest.mark.parametrize(("prompt", "best"), [(512, 2), (2048, 1)])
def test_prompts_are_a_part_of_the_plan(prompt: int, best: int) -> None:
    """128 sequences of about 256 tokens on eight A40: TP4 decodes them the fastest, and narrower replicas are faster by
    what their prompts take. Hindsight and PAT are within 3 % of every static size."""
    lengths = [random.Random(uid).randint(240, 272) for uid in range(128)]
    contexts, one = np.full(128, float(prompt)), deployment()
    statics = {size: roll_out(lengths, nested_layout(range(8), size), prompt=prompt).makespan for size in (1, 2, 4)}
    assert min(statics, key=statics.__getitem__) == best
    assert make_plan(replace(one, prefills={}), contexts, np.array(lengths, float), None).stages == ((128, 4),)
    plan = make_plan(one, contexts, np.array(lengths, float), None)
    played = PlayedPlan(plan, one)
    done = roll_out(lengths, played.layout(), played, prompt=prompt)
    assert done.makespan == pytest.approx(plan.seconds, rel=0.05)
    pat = PatController(one, ended=[(length, False) for length in lengths])
    first = pat.first_tp_size(contexts, np.full(128, float(CAP)))
    found = roll_out(lengths, nested_layout(range(8), first), pat, prompt=prompt)
    assert max(done.makespan, found.makespan) < 1.03 * statics[best]


def test_a_group_s_prompt_is_computed_once_on_each_replica() -> None:
    """Sixteen sequences with one prompt of 4,096 tokens: alone they want narrow replicas, together wide ones."""
    pat = PatController(deployment(), ended=[(30, False)])
    contexts, limits = np.full(16, 4096.0), np.full(16, float(CAP))
    assert pat.first_tp_size(contexts, limits) < pat.first_tp_size(contexts, limits, group_size=16)


def test_rebalancing_keeps_the_size_at_the_same_moments() -> None:
    policy = PlayedPlan(PLAN, deployment(), tp_size=2)
    assert policy.layout() == nested_layout(range(NUM_RANKS), 2)
    done = roll_out(LENGTHS, policy.layout(), policy)
    assert {step.tp_size for step in done.steps} == {2}
    moments = [one.num_unfinished for one in done.decisions if one.action == "regroup"]
    assert len(moments) == len(COUNTS) - 1
    assert all(moment <= count for moment, count in zip(moments, COUNTS[1:], strict=True))


def decision(policy: PlayedPlan, layout: Layout, generated: list[int]) -> LayoutChange | None:
    unfinished = {
        (0, uid, 0): SequenceView(
            sequence_id=(0, uid, 0), index=uid, group_id=uid, num_prompt_tokens=PROMPT, num_generated=count,
            max_tokens=CAP, last_replica_id=0 if count else None, has_kv=False,
        )
        for uid, count in enumerate(generated)
    }  # fmt: skip
    view = LayoutView(
        phase=0, now=0.0, layout=layout, num_waiting=0, unfinished=unfinished, ended=(), num_delivered=0, replicas={}
    )
    return policy.decide(view)


@pytest.mark.parametrize("tp_size", [None, 2])
@pytest.mark.parametrize("seed", range(10))
def test_each_number_of_sequences_has_its_stage(tp_size: int | None, seed: int) -> None:
    """Whatever the present layout, and also when several stages pass at once."""
    rng = random.Random(seed)
    counts = [40, *sorted(rng.sample(range(1, 40), 3), reverse=True)]
    stages = tuple(zip(counts, (1, 2, 4, 8), strict=True))
    policy = PlayedPlan(Plan(stages=stages, seconds=0.0, kept_seconds=0.0), deployment(), tp_size=tp_size)
    layouts = [policy.layout(stage, epoch=5) for stage in range(4)]
    assert len({spec.id for layout in layouts for spec in layout.replicas}) == sum(len(one.replicas) for one in layouts)
    for unfinished in range(1, 41):
        stage = sum(unfinished <= count for count in counts) - 1
        generated = [rng.randint(0, 9) for _ in range(unfinished)]
        for present in range(4):
            found = decision(policy, layouts[present], generated)
            if present == stage:
                assert found is None
                continue
            assert found is not None and found.layout == policy.layout(stage, epoch=6)
            assert found.places.keys() == {(0, uid, 0) for uid, count in enumerate(generated) if count}
    assert decision(policy, layouts[0], []) is None
