"""The simulator against closed forms."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count

import pytest

from engines.config import EngineConfig
from engines.coordination.policies import OnDemand, Static
from engines.coordination.views import Dispatch, LayoutChange, LayoutView, Prefetch, ScheduleView
from engines.kvcache.cost import CopyCost, PrefillCost, SwapCost
from engines.parallel.layout import Layout, ReplicaSpec, nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import Path
from engines.rollout.telemetry import StepRecord
from engines.sequence import KVPart, SamplingParams, SequenceId, SequenceKey, SequenceState, Work
from research.seer.baselines import Divided
from research.seer.chunks import ChunkOptions
from research.simulator.cluster import Cluster, ClusterConfig, OutsideReplica, Overheads
from research.simulator.datasheets import H100, LLAMA_8B
from research.simulator.events import TO_CORE
from research.simulator.hindsight import LongestFirst, floor_seconds
from research.simulator.pace import ProfilePace
from research.simulator.runner import KVPool
from research.workloads.lengths import LogNormalLengths
from research.workloads.trajectories import TrajectoryLengths, Turn


@dataclass(frozen=True)
class FlatPace:
    """A step takes 10 ms and 1 ms per sequence and 1 us per token of context; a token of KV 1 us; a regroup 2 s."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return 0.01 + 0.001 * output.num_running + 1e-6 * output.num_context_tokens

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 1e-6 * num_tokens

    def switch(self, before: Layout, after: Layout, num_kv_tokens: int) -> float:
        return 2.0

    def draft(self, *_: object) -> float:
        return 0.0


def states(count: int, num_prompt_tokens: int = 16, max_tokens: int = 1000) -> list[SequenceState]:
    return [
        SequenceState(
            key=SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=0),
            group_id=uid,
            tokens=[uid * 1000 + place for place in range(num_prompt_tokens)],
            num_prompt_tokens=num_prompt_tokens,
            params=SamplingParams(max_tokens=max_tokens),
        )
        for uid in range(count)
    ]


def cluster(
    num_ranks: int, policy, lengths: list[int], tp_size: int = 1, layout_policy=None, turns=None, **options
) -> Cluster:
    engine = {"max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 4096, **options.pop("engine", {})}
    config = ClusterConfig(
        layout=nested_layout(range(num_ranks), tp_size) if num_ranks else Layout(epoch=0, replicas=()),
        engine=EngineConfig(**engine),
        pace=options.pop("pace", FlatPace()),
        num_kv_tokens=options.pop("num_kv_tokens", {1: 100_000, 2: 250_000, 4: 500_000}),
        max_model_len=4096,
        **options,
    )
    known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
    return Cluster(config, schedule_policy=policy, lengths=known, turns=turns, layout_policy=layout_policy)


@pytest.mark.parametrize("policy", [Static, OnDemand])
def test_equal_lengths_on_one_replica(policy) -> None:
    """8 sequences of 16 + 100 tokens: the prefill draws the first token, 99 decodes the others."""
    done = cluster(1, policy(), [100] * 8).roll_out(states(8))
    contexts = [8 * (16 + step) for step in range(100)]
    expected = sum(0.01 + 0.008 + 1e-6 * context for context in contexts)
    assert done.makespan == pytest.approx(expected, rel=1e-12)
    assert set(done.finish_times.values()) == {done.makespan} and len(done.finish_times) == 8


def test_overheads_lie_between_steps_and_messages() -> None:
    plain = cluster(1, Static(), [50] * 4).roll_out(states(4))
    slow = cluster(1, Static(), [50] * 4, overheads=Overheads(message_s=0.5, gap_s=0.001)).roll_out(states(4))
    # The work and the news of its end are a message each, and there are 49 gaps between 50 steps.
    assert slow.makespan == pytest.approx(plain.makespan + 2 * 0.5 + 49 * 0.001, rel=1e-12)


def long_tail(count: int, seed: int) -> list[int]:
    return LogNormalLengths(median=150, sigma=1.0, cap=600).draw(count, seed)


class Moving:
    """On demand, in chunks of 20 tokens, so that sequences change replicas."""

    def __init__(self) -> None:
        self._turn = 0

    def next(self, view: ScheduleView) -> Dispatch | None:
        for sequence in view.waiting.values():
            for replica in view.replicas.values():
                if replica.spec.id != sequence.last_replica_id and replica.room_for(sequence, 20):
                    return Dispatch(sequence_id=sequence.sequence_id, replica_id=replica.spec.id, max_new_tokens=20)
        return None


CHECK_ALL_EVERY = 50


def check_after_every_event(simulated: Cluster) -> None:
    """After each event the KV pool, and the books or the rank whose event it was; often, and at the end, all."""
    queue, run_next = simulated.queue, simulated.queue.run_next
    numbers = count(1)

    def run_and_check() -> bool:
        whose = queue._heap[0][1] if queue._heap else None
        has_run = run_next()
        if whose is None or simulated.is_complete or next(numbers) % CHECK_ALL_EVERY == 0:
            simulated.check_integrity()
            return has_run
        simulated.pool.check_integrity()
        if whose[0] == TO_CORE:
            simulated.core.check_integrity()
        else:
            simulated._ranks[whose[1]].check_integrity()
        return has_run

    simulated.queue.run_next = run_and_check  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", [Static, OnDemand, Moving])
@pytest.mark.parametrize("num_kv_tokens", [9_000, 1_100])
def test_every_sequence_ends_once_at_its_length_and_nothing_is_lost(policy, num_kv_tokens: int) -> None:
    """Whatever is preempted or moved: tokens, blocks and stored KV add up after every event."""
    lengths = long_tail(40, seed=1)
    simulated = cluster(3, policy(), lengths, num_kv_tokens={1: num_kv_tokens})
    check_after_every_event(simulated)
    done = simulated.roll_out(states(40))
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    assert list(done.finish_times.values()) == sorted(done.finish_times.values())
    assert (done.num_preempted > 0) == (num_kv_tokens == 1_100 and policy is not Moving)
    assert simulated.pool.num_tokens == 0
    if policy is Moving:
        assert simulated.pool.num_made > 100


class Never:
    def next(self, view: ScheduleView) -> Dispatch | None:
        return None


def test_a_policy_that_never_dispatches_is_named_in_virtual_time() -> None:
    with pytest.raises(RuntimeError, match=r"at 61 s: the schedule policy was waited for to dispatch a sequence"):
        cluster(2, Never(), [5, 5]).roll_out(states(2))


class Widen:
    """Two replicas of one GPU, then one of two."""

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if view.num_unfinished > 2 or view.layout.epoch:
            return None
        return LayoutChange(layout=nested_layout(range(2), 2, epoch=1))


def test_a_regroup_takes_its_time() -> None:
    lengths = [300, 300, *([20] * 10)]
    plain = cluster(2, OnDemand(), lengths).roll_out(states(12))
    simulated = cluster(2, OnDemand(), lengths, layout_policy=Widen())
    wide = simulated.roll_out(states(12))
    assert wide.lengths == plain.lengths
    assert {step.tp_size for step in wide.steps} == {1, 2}
    last = max(step.start + step.seconds for step in wide.steps if step.tp_size == 1)
    first = min(step.start for step in wide.steps if step.tp_size == 2)
    assert 2.0 < first - last < 2.1
    assert simulated.core.layout.epoch == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_log(seed: int) -> None:
    runs = [cluster(3, OnDemand(), long_tail(30, seed), num_kv_tokens={1: 1_100}) for _ in range(2)]
    first, second = (run.roll_out(states(30)) for run in runs)
    assert first == second and first.num_preempted


def test_policies_differ_where_they_should_and_nowhere_else() -> None:
    """On one replica, and with equal lengths and room for all, the order hardly matters; with a long tail it does."""

    def makespans(num_ranks: int, lengths: list[int]) -> list[float]:
        known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
        policies = [Static(), OnDemand(), LongestFirst(known)]
        return [cluster(num_ranks, policy, lengths).roll_out(states(len(lengths))).makespan for policy in policies]

    same = makespans(4, [100] * 32)
    assert max(same) <= 1.005 * min(same)
    static, on_demand, longest_first = makespans(4, long_tail(120, seed=7))
    assert longest_first < 0.95 * min(static, on_demand)


def test_no_policy_beats_the_floor() -> None:
    pace = ProfilePace(device=H100, shape=LLAMA_8B)
    profile = pace.profiles[1]
    for seed in range(3):
        lengths = LogNormalLengths(median=200, sigma=1.0, cap=3000).draw(100, seed)
        known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
        floor = floor_seconds(profile, [(16, length) for length in lengths], num_replicas=4, max_num_seqs=8)
        for policy in (OnDemand(), LongestFirst(known)):
            done = cluster(4, policy, lengths, pace=pace).roll_out(states(100, max_tokens=3000))
            assert floor < done.makespan < 3 * floor


def test_a_cache_holds_whole_blocks_only() -> None:
    """105 tokens of KV are 6 blocks of 16: a sequence of 105 does not fit, one of 96 does."""
    with pytest.raises(RuntimeError, match=r"refused sequence .* the KV cache holds 96"):
        cluster(1, OnDemand(), [89], num_kv_tokens={1: 105}).roll_out(states(1, max_tokens=89))
    assert cluster(1, OnDemand(), [80], num_kv_tokens={1: 105}).roll_out(states(1, max_tokens=80)).lengths == {
        (0, 0, 0): 80
    }


@pytest.mark.parametrize("pool_tokens", [2**62, 300])
def test_preempted_sequences_are_swapped_where_that_is_cheaper(pool_tokens: int) -> None:
    """A full pool refuses, and those sequences are recomputed; all end at their lengths, and the pool is empty then."""
    lengths = long_tail(30, seed=2)
    swap = SwapCost(
        prefill=PrefillCost(latency=0.1, seconds_per_token=0.1, seconds_per_pair=0.0),
        copy=CopyCost(bytes_per_token=1, out_bandwidth=1e6, in_bandwidth=1e6, latency=0.0),
    )
    options = {"num_kv_tokens": {1: 1_100}, "swap_cost": {1: swap}, "pool_tokens": pool_tokens}
    simulated = cluster(2, OnDemand(), lengths, **options)
    done = simulated.roll_out(states(30))
    num_swapped = sum(step.num_swapped_out for step in done.steps)
    assert num_swapped > 0 and (num_swapped == done.num_preempted) == (pool_tokens > 300)
    assert sum(step.num_swapped_in for step in done.steps) == num_swapped
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    assert simulated.pool.num_tokens == 0


class PathPace(FlatPace):
    """A token of KV takes 1 us to the memory of the host and 10 ms to another host."""

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return {"host": 1e-6, "network": 1e-2}[path] * num_tokens


def test_kv_from_another_host_crosses_the_network() -> None:
    """A sequence of 16 + 100 tokens goes to the other replica after 20, 40, 60 and 80 of them. Each time the ranges of
    the other host cross, but not those of its own."""
    options = {"pace": PathPace(), "engine": {"prefix_caching": False}}
    near, far = (
        cluster(2, Moving(), [100], gpus_per_host=count, **options).roll_out(states(1)).makespan for count in (None, 1)
    )
    num_crossing = 35 + 20 + (35 + 20) + (20 + 20)
    assert far - near == pytest.approx(num_crossing * (1e-2 - 1e-6), rel=1e-9)


class Joining:
    """The first sequence runs on replica 0. The second one begins on replica 1, and joins it after 20 tokens."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        for id_, sequence in view.waiting.items():
            if id_[1] == 0 or sequence.num_generated:
                return Dispatch(sequence_id=id_, replica_id=0)
            return Dispatch(sequence_id=id_, replica_id=1, max_new_tokens=20)
        return None


def test_kv_that_is_read_while_others_step_costs_the_replica_nothing() -> None:
    """35 tokens of KV take 0.35 s to cross: for so long the sequence waits, and the other one steps as alone."""
    simulated = cluster(2, Joining(), [200, 100], pace=PathPace(), gpus_per_host=1, engine={"prefix_caching": False})
    done = simulated.roll_out(states(2))
    for step in done.steps:
        stored_s = 35e-6 * (step.replica_id == 1 and step.num_running > 0 and step is last_of(done.steps, 1))
        num_context = step.seconds - 0.01 - 0.001 * step.num_running - stored_s
        assert -1e-12 < num_context < 1e-6 * 500, "a step took longer than its pass"
    released = last_of(done.steps, 1).start + last_of(done.steps, 1).seconds
    joined = next(step.start for step in done.steps if step.replica_id == 0 and step.num_running == 2)
    assert released + 0.35 <= joined < released + 0.35 + 2 * 0.012


def last_of(steps: list[StepRecord], replica_id: int) -> StepRecord:
    return [step for step in steps if step.replica_id == replica_id][-1]


def test_a_host_keeps_no_more_kv_than_it_has_room_for() -> None:
    pool = KVPool(capacity_tokens=100)

    def store(num_tokens: int, host: int = 0) -> KVPart | None:
        location = pool.add(num_tokens, host)
        pool.check_integrity()
        if location is None:
            return None
        return KVPart(first_token=0, num_tokens=num_tokens, first_head=0, num_heads=1, location=location, num_bytes=0)

    first, second = store(60), store(40)
    assert first and second and store(1) is None and store(100, host=1) is not None and store(101, host=2) is None
    assert [pool.path(first, host) for host in (0, 1)] == ["host", "network"]
    for _ in range(2):  # the second time it is gone already
        pool.drop([first])
        pool.check_integrity()
        assert pool.path(first, 0) is None and pool.path(second, 0) == "host" and pool.num_tokens == 140
    assert store(61) is None and store(60) is not None and pool.num_tokens == 200


def test_a_replica_is_on_one_host() -> None:
    with pytest.raises(ValueError, match=r"layout: replica 1 has ranks on 2 hosts of gpus_per_host=3"):
        cluster(4, Static(), [10], tp_size=2, gpus_per_host=3)


@pytest.mark.parametrize("policy", [OnDemand, Moving])
def test_replicas_join_and_die(policy) -> None:
    """Beside two of the layout: all sequences end once, at their lengths; a dead replica steps no more."""
    lengths = long_tail(40, seed=3)
    outside = (
        OutsideReplica(join_s=0.5, death_s=2.0),
        OutsideReplica(death_s=1.0, detection_s=1.5),
        OutsideReplica(join_s=1.2),
    )
    simulated = cluster(2, policy(), lengths, outside=outside, num_kv_tokens={1: 2_000})
    check_after_every_event(simulated)
    done = simulated.roll_out(states(40))
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(lengths))
    assert list(done.finish_times.values()) == sorted(done.finish_times.values())
    assert sorted(one.replica_id for one in done.decisions if one.action == "drop" and one.sequence_ids) == [2, 3]
    starts = {number: [step.start for step in done.steps if step.replica_id == number] for number in range(5)}
    assert min(starts[2]) >= 0.5 and max(starts[2]) < 2.0 and max(starts[3]) < 1.0 and min(starts[4]) >= 1.2


@pytest.mark.parametrize("join_s", [0.6, 5.0])
def test_what_a_dead_replica_generated_is_generated_again(join_s: float) -> None:
    """The sequence begins anew when its replica's end is noticed, at 0.75 s, and another one is there."""
    outside = (OutsideReplica(death_s=0.5, detection_s=0.25), OutsideReplica(join_s=join_s))
    done = cluster(0, OnDemand(), [100], outside=outside).roll_out(states(1))
    alone = cluster(1, OnDemand(), [100]).roll_out(states(1)).makespan
    assert alone > 0.5
    assert done.makespan == pytest.approx(max(0.75, join_s) + alone, rel=1e-12)


def test_impossible_replicas_outside() -> None:
    with pytest.raises(ValueError, match=r"OutsideReplica\.death_s=1\.0: is before join_s=2\.0"):
        OutsideReplica(join_s=2.0, death_s=1.0)
    with pytest.raises(ValueError, match="layout: replica 2 of 1 GPUs has no room"):
        cluster(2, Static(), [5], tp_size=2, num_kv_tokens={2: 1000}, outside=(OutsideReplica(),))


def test_a_layout_that_is_refused_is_an_error_as_in_a_live_run() -> None:
    simulated = cluster(2, OnDemand(), [300, 300, *([20] * 10)], layout_policy=Widen(), num_kv_tokens={1: 100_000})
    with pytest.raises(ValueError, match="layout: replica 0 of 2 GPUs has no room for weights and a block of KV"):
        simulated.roll_out(states(12))


@dataclass(frozen=True)
class ConstantPace(FlatPace):
    """A step takes 10 ms, whatever is in it; KV moves at once."""

    def step(self, spec: ReplicaSpec, output: StepOutput) -> float:
        return 0.01

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.0


def trajectories(num_ranks: int, policy, turns: list[list[Turn]], **options) -> tuple[Cluster, list[SequenceState]]:
    known = {(0, uid, 0): some for uid, some in enumerate(turns)}
    lengths = [sum(turn.num_generated for turn in some) for some in turns]
    some = [replace(state, in_turns=True) for state in states(len(turns), max_tokens=600)]
    return cluster(num_ranks, policy, lengths, turns=known, **options), some


def test_a_trajectory_alone_takes_its_steps_and_its_tools() -> None:
    """The pass that computes an observation draws the next turn's first token: a turn has as many steps as tokens."""
    turns = [
        Turn(num_generated=10, tool_s=0.5, num_observed=40),
        Turn(num_generated=1, tool_s=2),
        Turn(num_generated=7),
    ]
    simulated, some = trajectories(1, OnDemand(), [turns], pace=ConstantPace())
    done = simulated.roll_out(some)
    assert done.makespan == pytest.approx(0.5 + 2 + 18 * 0.01, rel=1e-12)
    assert done.lengths == {(0, 0, 0): 18} and len(done.steps) == 18
    spans = [(span.kind, span.seconds) for span in done.turns if span.seconds]
    kinds, seconds = zip(*spans, strict=True)
    assert kinds == ("replica", "tool", "replica", "tool", "replica")
    assert seconds == pytest.approx((0.1, 0.5, 0.01, 2, 0.07), rel=1e-9)
    # Of the prompt and the first turn nothing is computed again but what makes no whole block, or its last token.
    assert [step.num_tokens for step in done.steps if step.num_tokens > 1] == [16, 1 + 40]


def test_the_time_in_a_replica_s_own_queue_is_known() -> None:
    """One slot, in the order of coming: each waits for the tokens of all before it."""
    lengths = [7, 3, 12, 5]
    turns = [[Turn(num_generated=length)] for length in lengths]
    simulated, some = trajectories(1, Static(), turns, pace=ConstantPace(), engine={"max_num_seqs": 1})
    done = simulated.roll_out(some)
    queued = {span.sequence_id[1]: span for span in done.turns if span.kind == "queue" and span.replica_id is not None}
    waits = {uid: 0.01 * sum(lengths[:uid]) for uid in range(1, 4)}
    assert {uid: span.seconds for uid, span in queued.items()} == pytest.approx(waits, rel=1e-9)
    assert [span.start for span in queued.values()] == pytest.approx([0, 0, 0], abs=1e-9)


class SlowReads(ConstantPace):
    """On replica 1 the first turn's KV takes 0.3 s to read."""

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: Path) -> float:
        return 0.3 if spec.id == 1 and num_tokens > 20 else 0.0  # what the last turn stores is less


class Moved:
    """The first turn on replica 0, the second on replica 1; whether its KV is read beside the tool."""

    def __init__(self, ahead: bool) -> None:
        self._ahead = ahead

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        for id_, one in view.parked.items():
            if self._ahead and one.num_turns and one.expected_at is None:
                return Prefetch(sequence_id=id_, replica_id=1)
        return None

    def next(self, view: ScheduleView) -> Dispatch | None:
        for id_, one in view.waiting.items():
            return Dispatch(sequence_id=id_, replica_id=min(1, one.num_turns), queued=True)
        return None


@pytest.mark.parametrize(("tool_s", "exposed_s"), [(1.4, 0.0), (0.05, 0.25)])
def test_a_move_hides_behind_its_tool(tool_s: float, exposed_s: float) -> None:
    """Heddle, §5.3: what the tool does not cover of a move shows; without a read ahead, all of it."""
    turns = [[Turn(num_generated=20, tool_s=tool_s, num_observed=4), Turn(num_generated=5)]]
    for ahead, expected in ((True, exposed_s), (False, 0.3)):
        simulated, some = trajectories(2, Moved(ahead), turns, pace=SlowReads())
        done = simulated.roll_out(some)
        assert done.makespan == pytest.approx(0.25 + tool_s + expected, rel=1e-9)
        assert simulated.pool.num_tokens == 0


def test_what_is_observed_fills_the_context_and_the_cache() -> None:
    """Of 16 + 10 tokens of KV 25 were computed; they come back from the store where the cache has forgotten them."""
    turns = [Turn(num_generated=10, tool_s=0.5, num_observed=40), Turn(num_generated=2)]
    simulated, some = trajectories(1, OnDemand(), [turns], engine={"prefix_caching": False})
    done = simulated.roll_out(some)
    first = sum(0.011 + 1e-6 * (16 + step) for step in range(10))
    second = sum(0.011 + 1e-6 * (16 + 10 + 40 + step) for step in range(2))
    stored, last_stored, loaded = 25e-6, (1 + 40 + 1) * 1e-6, 25e-6
    assert done.makespan == pytest.approx(first + 0.5 + second + stored + last_stored + loaded, rel=1e-12)


def test_tools_run_beside_the_steps_of_others() -> None:
    """In one slot a sequence of 100 tokens runs whole while the other one's tool takes shorter, as long, or longer."""
    for tool_s in (0.5, 1.01, 1.5):
        turns = [[Turn(num_generated=5, tool_s=tool_s), Turn(num_generated=5)], [Turn(num_generated=100)]]
        simulated, some = trajectories(1, OnDemand(), turns, pace=ConstantPace(), engine={"max_num_seqs": 1})
        done = simulated.roll_out(some)
        ends = done.finish_times
        waits = [span.seconds for span in done.turns if span.kind == "queue" and span.seconds]
        assert waits == pytest.approx([0.05] + [0.05 + 1 - 0.05 - tool_s] * (tool_s < 1))
        assert ends[0, 1, 0] == pytest.approx(1.05, rel=1e-12)
        assert ends[0, 0, 0] == pytest.approx(max(0.05 + tool_s, 1.05) + 0.05, rel=1e-12)


def ends_by_hand(turns: list[list[Turn]], num_slots: int, *, by_index: bool) -> dict[int, float]:
    """An event loop over one replica with steps of 10 ms. A sequence that is dispatched enters with the next step. The
    KV of a turn is stored beside the next step, if there is one, and then its tool begins.

    With `by_index` those that wait are dispatched in the order of submission, whenever one arrives or a slot is free;
    otherwise they enter free slots in the order of arrival.
    """
    now, ends = 0.0, dict[int, float]()
    arrivals = [(0.0, number, 0) for number in range(len(turns))]
    waiting: list[tuple[int, int]] = []
    running: dict[tuple[int, int], int] = {}
    storing: list[tuple[int, int]] = []

    def dispatch() -> None:
        while waiting and len(running) + len(storing) * by_index < num_slots:
            first = min(waiting) if by_index else waiting[0]
            waiting.remove(first)
            running[first] = 0

    def arrive() -> None:
        for arrival in sorted(one for one in arrivals if one[0] <= now):
            arrivals.remove(arrival)
            waiting.append(arrival[1:])
            if by_index and now:
                dispatch()

    while len(ends) < len(turns):
        arrive()
        dispatch()
        if not running and not storing:
            now = min(arrivals)[0]
            continue
        in_pass, left = list(running), storing
        now += 0.01
        if by_index:
            arrive()
        storing = []
        for one in in_pass:
            running[one] += 1
            if running[one] == turns[one[0]][one[1]].num_generated:
                del running[one]
                storing.append(one)
        if len(storing) == len(in_pass) and (by_index or not waiting):
            left, storing = left + storing, []
        for number, turn in left:
            if turn + 1 == len(turns[number]):
                ends[number] = now
            else:
                arrivals.append((now + turns[number][turn].tool_s, number, turn + 1))
    return ends


def in_chunks() -> Divided:
    return Divided(ChunkOptions(chunk_tokens=50))


UNEQUAL = Layout(
    epoch=0,
    replicas=(
        ReplicaSpec(id=0, ranks=(0, 1, 2, 3)), ReplicaSpec(id=4, ranks=(4, 5)), ReplicaSpec(id=6, ranks=(6,)),
        ReplicaSpec(id=7, ranks=(7,)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("policy", [OnDemand, Static, in_chunks, LongestFirst])
@pytest.mark.parametrize("seed", range(4))
def test_unequal_replicas_hand_over_what_outgrows_them(policy, seed: int) -> None:
    """Each replica runs any sequence until its own KV is full, and the next larger one goes on from there."""
    lengths = long_tail(40, seed)
    known = {(0, uid, 0): length for uid, length in enumerate(lengths)}
    made = LongestFirst(known) if policy is LongestFirst else policy()
    held = {1: 208, 2: 400, 4: 1_024}
    simulated = cluster(8, made, lengths, num_kv_tokens=held)
    simulated = Cluster(replace(simulated.config, layout=UNEQUAL), schedule_policy=made, lengths=known)
    check_after_every_event(simulated)
    done = simulated.roll_out(states(40, max_tokens=600))
    assert done.lengths == known
    ends: dict[SequenceId, list[int]] = {}
    for one in done.decisions:
        for id_ in one.sequence_ids if one.action == "dispatch" else ():
            spec = next(spec for spec in UNEQUAL.replicas if spec.id == one.replica_id)
            ends.setdefault(id_, []).append(held[spec.tp_size])
    if policy in (OnDemand, Static, LongestFirst):  # nobody else takes a sequence back
        assert all(stays == sorted(set(stays)) for stays in ends.values())
        assert all(stays[-1] >= 16 + lengths[id_[1]] - 1 for id_, stays in ends.items())
        assert all(before < 16 + lengths[id_[1]] for id_, stays in ends.items() for before in stays[:-1])
        assert any(len(stays) > 1 for stays in ends.values()), "nothing was handed over"


def test_a_small_replica_runs_a_sequence_until_its_kv_is_full() -> None:
    """The bound of what comes back is that of its dispatch, not that of the KV cache."""
    config = replace(cluster(8, OnDemand(), []).config, layout=UNEQUAL, num_kv_tokens={1: 208, 2: 400, 4: 1024})
    simulated = Cluster(config, schedule_policy=OnDemand(), lengths={(0, 0, 0): 700})
    replica, _ = simulated.replica(UNEQUAL.replicas[2], (), ())
    (state,) = states(1, max_tokens=800)
    replica.submit(Work(state=state))
    replica.step()
    (work,) = replica.pause()
    assert work.max_new_tokens is None and len(work.state.tokens) == 17
    replica.submit(Work(state=work.state, max_new_tokens=100))
    replica.step()
    (work,) = replica.pause()
    assert work.max_new_tokens == 99
    replica.submit(Work(state=work.state, max_new_tokens=500))
    outputs = [replica.step() for _ in range(209 - 18)]
    assert not any(output.released for output in outputs[:-1]) and not replica.has_work
    (work,) = outputs[-1].released
    assert len(work.state.tokens) == 209 and work.max_new_tokens is None
    with pytest.raises(ValueError, match="has 209 tokens, and the KV cache of this replica holds 208"):
        replica.submit(work)


def test_a_sequence_that_the_largest_replica_cannot_hold_is_refused() -> None:
    config = replace(cluster(8, OnDemand(), [2000]).config, layout=UNEQUAL, num_kv_tokens={1: 208, 2: 400, 4: 1024})
    with pytest.raises(RuntimeError, match=r"can reach 1025 tokens, the KV cache holds 1024 in the largest replica"):
        Cluster(config, schedule_policy=OnDemand(), lengths={(0, 0, 0): 2000}).roll_out(states(1, max_tokens=1009))


@pytest.mark.parametrize("policy", [OnDemand, Static])
@pytest.mark.parametrize("seed", range(8))
def test_trajectories_against_an_event_loop(policy, seed: int) -> None:
    rng = random.Random(seed)
    turns = [
        [
            Turn(num_generated=rng.randint(1, 30), tool_s=rng.uniform(0.001, 0.4), num_observed=rng.choice([0, 3, 40]))
            for _ in range(rng.randint(1, 5))
        ]
        for _ in range(rng.randint(6, 12))
    ]
    num_slots = rng.randint(1, 4)
    engine = {"max_num_seqs": num_slots, "prefix_caching": False}
    simulated, some = trajectories(1, policy(), turns, pace=ConstantPace(), engine=engine)
    ends = simulated.roll_out(some).finish_times
    expected = ends_by_hand(turns, num_slots, by_index=policy is OnDemand)
    assert {id_[1]: end for id_, end in ends.items()} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("policy", [Static, OnDemand, Moving])
@pytest.mark.parametrize("num_kv_tokens", [9_000, 700])
def test_every_trajectory_ends_once_with_all_its_turns(policy, num_kv_tokens: int) -> None:
    """Beside plain sequences, with preemptions or moves, and a replica that dies."""
    alike = LogNormalLengths(median=20, sigma=1.0, cap=200)
    few = LogNormalLengths(median=3, sigma=0.6, cap=8)
    drawn = TrajectoryLengths(num_turns=few, generated=alike, observed=alike, tool_median_s=0.2, tool_sigma=1, cap=600)
    turns = [one for (one,) in drawn.draw(24, 1, seed=5)]
    outside = (OutsideReplica(death_s=1.5),) if policy is OnDemand else ()
    simulated, some = trajectories(3, policy(), turns, num_kv_tokens={1: num_kv_tokens}, outside=outside)
    for state in some[::4]:
        state.in_turns = False
        simulated.turns.pop(state.sequence_id)
    check_after_every_event(simulated)
    ended: list[SequenceState] = []
    done = simulated.roll_out(some, on_finished=lambda one: ended.append(replace(one.state)))
    assert {id_[1]: length for id_, length in done.lengths.items()} == dict(enumerate(map(num_tokens, turns)))
    for state in ended:
        observed = [end - start for start, end in state.observed]
        expected = [0, *(turn.num_observed for turn in turns[state.key.prompt_uid][:-1])] if state.in_turns else []
        assert observed == expected
    assert list(done.finish_times.values()) == sorted(done.finish_times.values())
    for id_ in simulated.turns:
        own = [span for span in done.turns if span.sequence_id == id_]
        queued = [span for span in own if span.kind == "queue" and span.replica_id is not None]
        own = [span for span in own if span not in queued and span.kind != "move"]
        ends = [span.start + span.seconds for span in own]
        assert [0.0, *ends] == pytest.approx([*(span.start for span in own), done.finish_times[id_]])
        assert all((span.kind == "replica") == (span.replica_id is not None) for span in own)
        for inner in queued:  # in the own queue of a replica that it was on then
            there = [span for span in own if span.start <= inner.start + 1e-9 and span.replica_id == inner.replica_id]
            assert any(inner.start + inner.seconds <= span.start + span.seconds + 1e-9 for span in there)
    in_queues = [span for span in done.turns if span.kind == "queue" and span.replica_id is not None]
    assert in_queues
    assert outside or simulated.pool.num_tokens == 0
    assert (done.num_preempted > 0) == (num_kv_tokens == 700 and policy is not Moving)
    assert len([one for one in done.decisions if one.action == "drop"]) == len(outside)


def num_tokens(turns: list[Turn]) -> int:
    return sum(turn.num_generated for turn in turns)
