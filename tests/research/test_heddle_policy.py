"""Heddle's policy and its baselines in the simulator, with the live core, scheduler and replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.parallel.layout import nested_layout
from engines.sequence import SamplingParams, SequenceId
from research.heddle.baselines import CacheAware, Hybrid, LeastLoad
from research.heddle.migration import Groups
from research.heddle.policy import Costs, HeddleOptions, HeddlePolicy
from research.simulator.cluster import Cluster, ClusterConfig, SimulatedRollout
from research.workloads.agents import AGENTS, Errors, StatedPredictions, scaled
from research.workloads.trajectories import Turn
from tests.research.test_simulator import FlatPace, check_after_every_event
from tests.states import make_state

PARAMS = SamplingParams(max_tokens=700)
COSTS = Costs(token_s=lambda _, size: 0.01 + 0.001 * size, transfer_s=lambda _, count: 1e-6 * count)


def thirds(lengths: Any, replicas: Any) -> Groups:
    """A tenth, three tenths, and the rest."""
    few, some = max(1, len(lengths) // 10), max(1, 3 * len(lengths) // 10)
    return Groups((few, some, len(lengths) - few - some), tuple(one.spec.id for one in replicas))


def drawn(name: str, count: int, seed: int = 0) -> dict[SequenceId, list[Turn]]:
    groups = scaled(AGENTS[name], 64).draw(-(-count // 16), 16, seed)  # type: ignore[index]
    return {(0, uid, 0): turns for uid, turns in enumerate([one for group in groups for one in group][:count])}


def rollout(
    policy: Any, turns: dict[SequenceId, list[Turn]], errors: Errors | None = None, *, num_kv_tokens: int = 8_000,
    num_ranks: int = 3, checked: bool = False, **engine: Any,
) -> tuple[Cluster, SimulatedRollout]:  # fmt: skip
    options = {"max_num_seqs": 64, "block_size": 16, "max_num_batched_tokens": 4096, **engine}
    config = ClusterConfig(
        layout=nested_layout(range(num_ranks), 1),
        engine=EngineConfig(**options),
        pace=FlatPace(),
        num_kv_tokens={1: num_kv_tokens},
        max_model_len=2048,
    )
    lengths = {id_: sum(turn.num_generated for turn in some) for id_, some in turns.items()}
    predictor = None if errors is None else lambda later: StatedPredictions(turns, later, errors)
    simulated = Cluster(config, schedule_policy=policy, lengths=lengths, turns=turns, predictor=predictor)
    if checked:
        check_after_every_event(simulated)
    states = [make_state(uid, range(8 * uid, 8 * uid + 8), PARAMS) for _, uid, _ in turns]
    done = simulated.roll_out([replace(state, in_turns=True) for state in states])
    assert done.lengths == lengths
    return simulated, done


def stays(done: SimulatedRollout) -> dict[SequenceId, list[int]]:
    """The replicas of each trajectory's turns."""
    places: dict[SequenceId, list[int]] = {}
    for span in done.turns:
        if span.kind == "replica":
            assert span.replica_id is not None
            places.setdefault(span.sequence_id, []).append(span.replica_id)
    return places


@pytest.mark.parametrize("policy", [LeastLoad, CacheAware, Hybrid, partial(HeddlePolicy, thirds, COSTS)])
@pytest.mark.parametrize("num_kv_tokens", [4_000, 800])
def test_every_trajectory_ends_once(policy: Callable[[], Any], num_kv_tokens: int) -> None:
    errors = Errors(seconds=0.1)
    _, done = rollout(policy(), drawn("math", 48), errors, num_kv_tokens=num_kv_tokens, checked=True)
    assert len(done.finish_times) == 48
    assert (done.num_preempted > 0) == (num_kv_tokens == 800)


def test_the_placement_is_obeyed() -> None:
    turns = drawn("coding", 60)
    policy = HeddlePolicy(thirds, COSTS, HeddleOptions(migrates=False))
    _, done = rollout(policy, turns, Errors(kind="oracle", seconds=0.1))
    by_length = sorted(turns, key=lambda id_: (-done.lengths[id_], id_))
    expected = {id_: (place >= 6) + (place >= 24) for place, id_ in enumerate(by_length)}
    assert {id_: set(places) for id_, places in stays(done).items()} == {id_: {one} for id_, one in expected.items()}
    assert policy.counters.num_migrations == 0
