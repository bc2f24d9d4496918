"""Heddle's policy and its baselines in the simulator, with the live core, scheduler and replicas."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from engines.config import EngineConfig
from engines.coordination.core import RolloutCore
from engines.coordination.views import (
    EndedView,
    LayoutChange,
    LayoutView,
    Prefetch,
    ReplicaView,
    ScheduleView,
    SequenceView,
)
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.sequence import SamplingParams, SequenceId
from research.heddle.baselines import CacheAware, Hybrid, LeastLoad, Soonest
from research.heddle.migration import Groups
from research.heddle.policy import Costs, HeddleOptions, HeddlePolicy
from research.heddle.priority import first_come, shortest_first
from research.heddle.transmission import Transmission
from research.simulator import cluster as cluster_module
from research.simulator.cluster import Cluster, ClusterConfig, OutsideReplica, SimulatedRollout
from research.simulator.replay import RecordingCore, play, recording
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
    policy: Any,
    turns: dict[SequenceId, list[Turn]],
    errors: Errors | None = None,
    *,
    num_kv_tokens: int = 8_000,
    num_ranks: int = 3,
    checked: bool = False,
    cluster: dict[str, Any] | None = None,
    layout_policy: Any = None,
    **engine: Any,
) -> tuple[Cluster, SimulatedRollout]:
    options = {"max_num_seqs": 64, "block_size": 16, "max_num_batched_tokens": 4096, **engine}
    config = ClusterConfig(
        engine=EngineConfig(**options),
        pace=FlatPace(),
        num_kv_tokens={1: num_kv_tokens, 2: 2 * num_kv_tokens},
        max_model_len=2048,
        **{"layout": nested_layout(range(num_ranks), 1), **(cluster or {})},
    )
    lengths = {id_: sum(turn.num_generated for turn in some) for id_, some in turns.items()}
    predictor = None if errors is None else lambda later: StatedPredictions(turns, later, errors)
    simulated = Cluster(
        config, schedule_policy=policy, lengths=lengths, turns=turns, predictor=predictor, layout_policy=layout_policy
    )
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


def test_trajectories_move_in_gaps_only_and_as_counted() -> None:
    """Within a turn the replica is the same; each change of it is a migration, and half of them at least pays here."""
    turns = drawn("coding", 60)
    policy = HeddlePolicy(thirds, COSTS, HeddleOptions(hysteresis=0.0))
    simulated, done = rollout(policy, turns, Errors(seconds=0.01))
    places = stays(done)
    assert all(len(places[id_]) == len(turns[id_]) for id_ in turns)
    changes = sum(a != b for some in places.values() for a, b in itertools.pairwise(some))
    read_ahead = [one for one in done.decisions if one.action == "prefetch"]
    assert policy.counters.num_gaps == sum(len(some) - 1 for some in turns.values())
    assert policy.counters.num_migrations >= changes > 20 and read_ahead
    assert simulated.pool.num_tokens == 0


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_what_gaps_wait_for(seconds: float) -> None:
    """Tools take 0.1 s, predictions `seconds`: those that wait for them lose the rest, and nothing else."""
    turns = {
        (0, uid, 0): [Turn(num_generated=5, tool_s=0.1, num_observed=3)] * 3 + [Turn(num_generated=2)]
        for uid in range(6)
    }
    for waits_s, exposed_s in ((0.0, 0.0), (10.0, max(0.0, seconds - 0.1)), (0.15, min(0.05, seconds))):
        policy = HeddlePolicy(thirds, COSTS, HeddleOptions(waits_s=waits_s))
        _, done = rollout(policy, turns, Errors(kind="oracle", seconds=seconds))
        counters = policy.counters
        if waits_s != 0.15 or not seconds:  # it waits until something happens after that
            assert counters.prediction_s == pytest.approx(18 * exposed_s, abs=1e-6)
        else:
            assert 18 * exposed_s <= counters.prediction_s < 18 * 0.2
        firsts = [span.start for span in done.turns if span.kind == "replica"][:6]
        assert firsts == pytest.approx([seconds] * 6), "first turns wait for all predictions"


def test_the_longest_remaining_preempts() -> None:
    """One slot. The long trajectory comes back while a short one runs, and takes its place; with `first_come` and an
    infinite margin it waits; equal priorities never preempt."""
    long = [Turn(num_generated=20, tool_s=0.05), Turn(num_generated=60)]
    turns = {(0, uid, 0): some for uid, some in enumerate([long, [Turn(num_generated=40)], [Turn(num_generated=40)]])}

    def run(options: HeddleOptions, **engine: Any) -> tuple[int, dict[int, float]]:
        policy = HeddlePolicy(thirds, COSTS, replace(options, places=False))
        _, done = rollout(policy, turns, Errors(kind="oracle"), num_ranks=1, max_num_seqs=1, **engine)
        return done.num_preempted, {id_[1]: end for id_, end in done.finish_times.items()}

    preempted, ends = run(HeddleOptions())
    assert preempted == 1 and ends[0] < min(ends[1], ends[2])
    preempted, ends = run(HeddleOptions(priority=first_come), priority_margin=math.inf)
    assert preempted == 0 and ends[1] < ends[0] < ends[2]
    preempted, ends = run(HeddleOptions(priority=shortest_first))
    assert preempted == 0 and ends[0] == max(ends.values())


def test_replay_gives_the_same_commands() -> None:
    """A fresh core with a fresh policy, given the same events at the same times."""
    policy = partial(HeddlePolicy, thirds, COSTS, HeddleOptions(hysteresis=0.0))
    with recording(cluster_module):
        simulated, _ = rollout(policy(), drawn("search", 40), Errors(seconds=0.01))
    assert isinstance(simulated.core, RecordingCore)

    def make_core() -> RolloutCore:
        return RolloutCore(
            layout=simulated.config.layout,
            world_size=3,
            schedule_policy=policy(),
            layout_policy=None,
            check_layout=lambda *_: None,
            keeps_kv=lambda *_: True,
            timeout_s=simulated.config.timeout_s,
        )

    assert play(simulated.core.log, make_core) > 500


def test_the_least_load_and_the_last_replica() -> None:
    """Each turn goes to a replica that has least at that time; within the threshold, to that of the last turn."""
    turns = drawn("coding", 60)
    _, done = rollout(LeastLoad(), turns)
    for one in done.decisions:
        if one.action == "dispatch":
            loads = {replica.spec.id: replica.num_assigned for replica in one.replicas}
            assert one.replica_id is not None and loads[one.replica_id] == min(loads.values())
    _, done = rollout(LeastLoad(threshold=1e9), turns)
    assert all(len(set(places)) == 1 for places in stays(done).values())
    _, done = rollout(CacheAware(), turns)
    assert {id_: set(places) for id_, places in stays(done).items()} == {id_: {id_[1] % 3} for id_ in turns}


def test_turns_go_where_their_tokens_come_soonest() -> None:
    """One replica of two ranks beside two of one: by brute force. The wide one takes eleven before another one
    begins."""
    turns = drawn("coding", 40)
    layout = Layout(
        epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), *(ReplicaSpec(id=n, ranks=(n,)) for n in (2, 3)))
    )

    def token_s(spec: ReplicaSpec, size: int) -> float:
        return (0.01 + 0.001 * size) / spec.tp_size

    _, done = rollout(Soonest(token_s), turns, num_ranks=4, cluster={"layout": layout})
    dispatched = [one.replica_id for one in done.decisions if one.action == "dispatch"]
    assert dispatched[:12] == [0] * 11 + [2]
    by_replica = Counter(dispatched)
    for one in done.decisions:
        if one.action == "dispatch":
            seconds = {replica.spec.id: token_s(replica.spec, replica.num_assigned + 1) for replica in one.replicas}
            assert one.replica_id is not None and seconds[one.replica_id] == min(seconds.values())
    assert all(by_replica.values()) and by_replica[0] > by_replica[2] + by_replica[3]
    _, done = rollout(Soonest(token_s), turns)
    _, plain = rollout(LeastLoad(), turns)
    assert done.finish_times == plain.finish_times, "on equal replicas it is least load"


def test_the_hybrid_follows_the_skew() -> None:
    """With a skew of 1 any difference counts, with a large one only an idle replica does."""
    turns = drawn("coding", 60)
    changes = []
    for skew in (1.0, 1e9):
        _, done = rollout(Hybrid(skew=skew), turns)
        changes.append(sum(len(set(places)) > 1 for places in stays(done).values()))
    assert changes[0] > changes[1]


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_routers_refuse_what_is_below_0(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"LeastLoad.threshold={wrong}: must be at least 0, or inf"):
        LeastLoad(threshold=wrong)
    with pytest.raises(ValueError, match=f"Hybrid.skew={wrong}: must be at least 0, or inf"):
        Hybrid(skew=wrong)


@pytest.mark.parametrize("kind", ["constant", "reversed", "nothing", "residuals"])
@pytest.mark.parametrize("name", ["search", "math"])
def test_poor_predictions_harm_nobody(name: str, kind: Any) -> None:
    """Every trajectory ends; without any prediction the dispatch is that of least load."""
    turns = drawn(name, 48, seed=1)
    policy = HeddlePolicy(thirds, COSTS)
    _, done = rollout(policy, turns, Errors(kind=kind, seconds=0.02), num_kv_tokens=1_500)
    if kind == "nothing":
        off = HeddlePolicy(thirds, COSTS, HeddleOptions(places=False))
        _, plain = rollout(off, turns, Errors(kind=kind, seconds=0.02), num_kv_tokens=1_500)
        assert done.finish_times == plain.finish_times


def test_without_a_predictor_it_is_least_load() -> None:
    turns = drawn("coding", 60)
    _, done = rollout(HeddlePolicy(thirds, COSTS, HeddleOptions(patience_s=0)), turns)
    _, plain = rollout(LeastLoad(), turns)
    assert done.finish_times == plain.finish_times


def test_a_planner_that_yields_leaves_all_to_least_load() -> None:
    turns = drawn("coding", 60)
    policy = HeddlePolicy(lambda *_: None, COSTS)
    _, done = rollout(policy, turns, Errors(kind="oracle"))
    _, plain = rollout(HeddlePolicy(thirds, COSTS, HeddleOptions(places=False)), turns, Errors(kind="oracle"))
    assert done.finish_times == plain.finish_times and policy.counters.num_yielded == 1


class Narrow:
    """Regroups once, from one replica of two ranks and one of one, to three of one."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if view.layout.epoch or view.num_delivered < 10:
            return None
        return LayoutChange(layout=nested_layout(range(3), 1, epoch=1))


def test_replicas_come_and_go() -> None:
    """A regroup, and a replica that joins and dies: what is placed on replicas that are gone is placed anew."""
    outside = (OutsideReplica(join_s=0.5, death_s=2.0), OutsideReplica(join_s=1.0))
    policy = HeddlePolicy(thirds_of_any, COSTS, HeddleOptions(hysteresis=0.0))
    wide = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=1, ranks=(2,))))
    _, done = rollout(
        policy, drawn("coding", 60), Errors(seconds=0.02), cluster={"outside": outside, "layout": wide},
        layout_policy=Narrow(), checked=True, num_kv_tokens=2_000,
    )  # fmt: skip
    assert {one.action for one in done.decisions} >= {"regroup", "drop", "prefetch"}
    assert len({one for places in stays(done).values() for one in places}) > 4


def test_nothing_is_placed_while_no_replica_accepts() -> None:
    """Predictions that come in a regroup of all replicas."""
    given: list[int] = []

    def place(lengths: Any, replicas: Any) -> Groups:
        given.append(len(replicas))
        return thirds_of_any(lengths, replicas)

    policy = HeddlePolicy(place, COSTS)
    wide = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=1, ranks=(2,))))
    rollout(policy, drawn("coding", 60), Errors(seconds=0.5), cluster={"layout": wide}, layout_policy=Narrow())
    assert set(given) == {2, 3}


def thirds_of_any(lengths: Any, replicas: Any) -> Groups:
    shares = [len(lengths) // len(replicas)] * len(replicas)
    shares[-1] += len(lengths) - sum(shares)
    return Groups(tuple(shares), tuple(one.spec.id for one in replicas))


def test_what_reads_ahead() -> None:
    """A move that has become due: not where a request has had the KV read meanwhile, nor where a regroup has left too
    little room."""
    id_, spec = (0, 0, 0), ReplicaSpec(id=1, ranks=(1,))
    replica = ReplicaView(
        spec=spec, accepts=True, max_num_seqs=4, num_assigned=0, num_tokens=0, block_size=16, num_blocks=2,
        num_reserved_blocks=0, num_running=0, num_waiting=0, num_free_blocks=2, seconds=0.0,
    )  # fmt: skip
    parked = SequenceView(
        sequence_id=id_, index=0, group_id=0, num_prompt_tokens=8, num_generated=24, max_tokens=90,
        last_replica_id=0, has_kv=True, is_parked=True,
    )  # fmt: skip

    def asked(parked: SequenceView, replica: ReplicaView) -> Prefetch | None:
        policy = HeddlePolicy(thirds, COSTS)
        policy._moves.ask(Transmission(-30.0, id_, 0, 1, 0.1))
        return policy.prefetch(
            ScheduleView(
                now=0.0, layout=Layout(epoch=0, replicas=(spec,)), waiting={}, entered=(), ended=(),
                replicas={1: replica}, parked={id_: parked},
            )
        )  # fmt: skip

    assert asked(parked, replica) == Prefetch(sequence_id=id_, replica_id=1)
    assert asked(msgspec.structs.replace(parked, expected_at=1), replica) is None
    assert asked(parked, msgspec.structs.replace(replica, num_blocks=1)) is None
    assert asked(parked, msgspec.structs.replace(replica, accepts=False)) is None


def test_one_rollout_follows_another() -> None:
    """Of the last trajectory's end a policy hears with the news of the next rollout, all of which is placed again."""
    policy, last = HeddlePolicy(thirds, COSTS, HeddleOptions(migrates=False)), list[SequenceId]()
    ask = policy.prefetch

    def prefetch(view: ScheduleView) -> Prefetch | None:
        ends = [
            EndedView(sequence_id=last.pop(), group_id=0, num_prompt_tokens=8, num_generated=1, finish_reason="stop")
            for _ in range(len(last))
        ]
        return ask(msgspec.structs.replace(view, ended=(*ends, *view.ended)))

    policy.prefetch = prefetch  # type: ignore[method-assign]
    for seed in range(3):
        turns = drawn("search", 40, seed)
        _, done = rollout(policy, turns, Errors(kind="oracle", seconds=0.1))
        by_length = sorted(turns, key=lambda id_: (-done.lengths[id_], id_))
        expected = {id_: {(place >= 4) + (place >= 16)} for place, id_ in enumerate(by_length)}
        assert {id_: set(places) for id_, places in stays(done).items()} == expected
        kept = [value for value in vars(policy).values() if isinstance(value, dict)]
        last = [*done.finish_times][-1:]
        assert len(kept) > 4 and {id_ for one in kept for id_ in one} <= {*last} and len(policy._ranks) <= 1


def eq3(lengths: Any, replicas: Any) -> Groups:
    """The best of all placements on three replicas by Eq. 2, with F of `COSTS`."""
    count, token_s = len(lengths), COSTS.token_s
    spec = replicas[0].spec

    def seconds(bounds: tuple[int, int]) -> float:
        groups = itertools.pairwise((0, *bounds, count))
        return max(lengths[start].total * token_s(spec, end - start) for start, end in groups)

    first, second = min(itertools.combinations(range(1, count), 2), key=seconds)
    return Groups((first, second - first, count - second), tuple(one.spec.id for one in replicas))


@pytest.mark.parametrize("name", ["coding", "search"])
def test_placement_helps_where_nothing_queues(name: str) -> None:
    """With an oracle and KV for all; in virtual time, in which nothing is noise."""
    turns = drawn(name, 64)
    errors = Errors(kind="oracle")
    _, placed = rollout(HeddlePolicy(eq3, COSTS), turns, errors)
    _, spread = rollout(HeddlePolicy(eq3, COSTS, HeddleOptions(places=False)), turns, errors)
    assert placed.makespan < 0.97 * spread.makespan
