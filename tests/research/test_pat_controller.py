"""PAT's controller in simulated rollouts, and where its sequences go."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from engines.config import EngineConfig
from engines.coordination.policies import OnDemand
from engines.parallel.layout import nested_layout
from engines.sequence import SamplingParams, SequenceKey, SequenceState
from research.pat.controller import PatController, PatOptions
from research.pat.lookahead import Deployment
from research.pat.profile import deployment_of
from research.pat.redistribute import balance
from research.simulator.cluster import Cluster, ClusterConfig, SimulatedRollout
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace
from research.workloads.lengths import LogNormalLengths

NUM_RANKS, CAP = 8, 1500
A40 = {size: profile(f"a40-8b-tp{size}") for size in (1, 2, 4, 8)}
PACE = ProfilePace(device=A40[1].device, shape=A40[1].shape)
KV_TOKENS = {size: one.kv_tokens_capacity() for size, one in A40.items()}
LENGTHS = LogNormalLengths(median=150, sigma=0.884, cap=CAP)


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


def deployment() -> Deployment:
    return deployment_of(PACE, num_ranks=NUM_RANKS, num_kv_tokens=KV_TOKENS, max_num_seqs=256)


def test_a_deployment_s_steps_are_those_of_its_pace() -> None:
    one = deployment()
    for size, predictor in one.steps.items():
        for batch, context in ((1, 3000), (7, 900), (50, 700), (200, 500)):
            if batch * context < KV_TOKENS[size]:
                expected = A40[size].step_seconds(batch, batch, batch * context)
                assert float(predictor.seconds(batch, batch * context)) == pytest.approx(expected, rel=0.05)
    assert one.switch_seconds(2, 8, 0.0) == pytest.approx(PACE.switch(*(nested_layout(range(8), n) for n in (2, 8)), 0))
    assert one.switch_seconds(2, 8, 1e6) > one.switch_seconds(2, 8, 1e3)


def rollout(lengths: list[int], size: int, policy: PatController | None) -> tuple[SimulatedRollout, Cluster]:
    config = ClusterConfig(
        layout=nested_layout(range(NUM_RANKS), size),
        engine=EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        pace=PACE,
        num_kv_tokens=KV_TOKENS,
        max_model_len=8192,
    )
    known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
    simulated = Cluster(config, schedule_policy=OnDemand(), lengths=known, layout_policy=policy)
    states = [
        SequenceState(
            key=SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0),
            group_id=uid,
            tokens=[uid] * 16,
            num_prompt_tokens=16,
            params=SamplingParams(max_tokens=CAP),
        )
        for uid in range(len(lengths))
    ]
    return simulated.roll_out(states), simulated


def run_pat(lengths: list[int], **options: Any) -> tuple[SimulatedRollout, PatController, list[int]]:
    policy = PatController(deployment(), PatOptions(**options), ended=LENGTHS.draw(500, seed=9))
    first = policy.first_tp_size(np.full(len(lengths), 16.0), np.full(len(lengths), float(CAP)))
    done, _ = rollout(lengths, first, policy)
    sizes = [first, *(one.chosen for one in policy.log if one.chosen != one.tp_size)]
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    return done, policy, sizes


@pytest.mark.parametrize("seed", range(2))
def test_a_long_tail_runs_on_wider_and_wider_replicas(seed: int) -> None:
    lengths = LENGTHS.draw(400, seed=seed)
    best = min(rollout(lengths, size, None)[0].makespan for size in (1, 2, 4, 8))
    done, policy, sizes = run_pat(lengths)
    assert sizes == sorted(set(sizes)) and len(sizes) > 1
    assert done.makespan < best, "no static layout is as fast"
    first = policy.log[0]
    assert first.seconds == pytest.approx(done.makespan, rel=0.35), "from expected lengths"
    assert {step.tp_size for step in done.steps} == set(sizes)


def test_equal_lengths_need_no_switch() -> None:
    policy = PatController(deployment(), ended=[200] * 100)
    done, _ = rollout([200] * 256, policy.first_tp_size(np.full(256, 16.0), np.full(256, float(CAP))), policy)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "crystal ball"}, "estimator='crystal ball'"),
        ({"margin": -1}, "margin=-1"),
        ({"rung": -1}, "rung=-1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PatOptions(**options)
