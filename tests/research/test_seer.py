"""Seer's policies: against Algorithm 1 written naively, with the core's fuzzed events, and in simulated rollouts."""

from __future__ import annotations

import math
import random
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import msgspec
import pytest

from engines.config import EngineConfig
from engines.control import messages as m
from engines.coordination import requests as r
from engines.coordination.policies import SchedulePolicy
from engines.coordination.views import Dispatch, EndedView, ReplicaView, ScheduleView, SequenceView
from engines.parallel.layout import ReplicaSpec, contiguous_layout
from engines.sequence import SamplingParams, SequenceId, SequenceKey, SequenceState
from research.seer.baselines import Divided, RandomStatic
from research.seer.chunks import ChunkOptions
from research.seer.context_aware import ContextAware, ContextOptions
from research.seer.length_estimate import LengthEstimate
from research.seer.waiting_queue import WaitingQueue
from research.simulator.cluster import Cluster, ClusterConfig, Overheads, SimulatedRollout
from research.workloads.lengths import GroupedLengths, LogNormalLengths
from tests.engines.test_rollout_core import given, make_state, open_desk, replay
from tests.research.test_simulator import FlatPace, check_after_every_event

CAP, NUM_REPLAYED = 200, 150


@dataclass
class NaiveAlgorithm:
    """Algorithm 1 with all that is decided beside it, by scans over all that was ever seen."""

    options: ContextOptions
    lengths: dict[SequenceId, int] | None = None
    groups: dict[Any, list[SequenceId]] = field(default_factory=dict)
    seen: dict[Any, list[int]] = field(default_factory=dict)
    last: dict[SequenceId, int] = field(default_factory=dict)
    ended: dict[SequenceId, EndedView] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.options.seed)
        self.coin = self.random.random() < self.options.starving_share
        self.num_starving = self.num_lifted = self.num_queued = self.num_passed = self.num_chunks = 0

    def estimate(self, sequence: SequenceView) -> int:
        if self.lengths is not None:
            return self.lengths[sequence.sequence_id]
        group = sequence.sequence_id[0], sequence.group_id
        members = [self.ended[id_] for id_ in self.groups[group] if id_ in self.ended]
        done = [one.num_generated for one in members if one.finish_reason != "abort"]
        if not done:
            return sequence.max_tokens
        longest = max(done + self.seen[group]) if self.options.lifts else max(done)
        self.num_lifted += longest > max(done)
        return longest

    def next(self, view: ScheduleView) -> Dispatch | None:
        for one in view.entered:
            group = one.sequence_id[0], one.group_id
            members = self.groups.setdefault(group, [])
            self.seen.setdefault(group, []).append(one.num_generated)
            if one.sequence_id not in members:
                members.append(one.sequence_id)
            self.last[one.sequence_id] = one.num_generated
        for gone in view.ended:
            if gone.sequence_id in self.last:
                self.ended[gone.sequence_id] = gone
                self.last[gone.sequence_id] = gone.num_generated
        waiting = list(view.waiting.values())
        order = sorted(waiting, key=self.key)
        if self.coin and waiting:
            executed = {group: sum(self.last[id_] for id_ in members) for group, members in self.groups.items()}
            least = min(
                {(one.sequence_id[0], one.group_id) for one in waiting},
                key=lambda group: (executed[group], list(self.groups).index(group)),
            )
            members = [one for one in waiting if (one.sequence_id[0], one.group_id) == least]
            starving = min(members, key=lambda one: (-one.num_generated, one.index))
            order = [starving, *(one for one in order if one is not starving)]
        dispatch = self.place(view, order[: self.options.look_ahead])
        if dispatch is not None:
            self.num_chunks += 1
            self.num_starving += self.coin
            self.num_queued += dispatch.queued
            self.num_passed += dispatch.sequence_id != order[0].sequence_id
            self.coin = self.random.random() < self.options.starving_share
        return dispatch

    def key(self, one: SequenceView) -> tuple[int, ...]:
        members = self.groups[one.sequence_id[0], one.group_id]
        if one.sequence_id == members[0] and self.lengths is None:
            return (0, one.num_generated, one.index)
        place = list(self.groups).index((one.sequence_id[0], one.group_id))
        longest = self.estimate(one) - (one.num_generated if self.options.order == "remaining" else 0)
        return (1, -longest, place, -one.num_generated, one.index)

    def place(self, view: ScheduleView, order: list[SequenceView]) -> Dispatch | None:
        tries = [(one, False) for one in order]
        tries += [(one, True) for one in order[:1] if self.options.follow_ups]
        for one, queued in tries:
            less = self.options.spread * math.fmod(self.num_chunks * (math.sqrt(5) - 1) / 2, 1)
            behind_prompt = one.num_generated + one.num_observed
            chunk = min(round(self.options.chunk_tokens * (1 - less)), one.max_tokens - behind_prompt)
            num_tokens = one.num_prompt_tokens + behind_prompt + chunk
            holds = [r for r in view.replicas.values() if num_tokens - chunk <= r.num_blocks * r.block_size]
            all_ = [r for r in holds if r.num_assigned < r.max_num_seqs + self.options.follow_ups]
            if queued:
                roomy = [r for r in all_ if r.accepts and r.num_behind() < self.options.follow_ups]
            else:
                roomy = [r for r in all_ if r.has_room(num_tokens)]
            if roomy:
                best = min(roomy, key=lambda r: (r.num_reserved_blocks / r.num_blocks, r.num_assigned, r.spec.id))
                return Dispatch(
                    sequence_id=one.sequence_id, replica_id=best.spec.id, max_new_tokens=chunk, queued=queued
                )
        return None


@dataclass
class Checked:
    """A policy beside the naive one, which must decide the same each time."""

    policy: ContextAware
    naive: NaiveAlgorithm
    num_dispatched: int = 0

    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = self.policy.next(view)
        assert self.naive.next(view) == dispatch
        left = [one for one in view.waiting.values() if dispatch is None or one.sequence_id != dispatch.sequence_id]
        assert [self.policy.estimate_of(one) for one in left] == [self.naive.estimate(one) for one in left]
        self.num_dispatched += dispatch is not None
        return dispatch


def checked(options: ContextOptions, lengths: dict[SequenceId, int] | None = None) -> Checked:
    return Checked(ContextAware(options, lengths=lengths), NaiveAlgorithm(options, lengths))


def draw(num_groups: int, group_size: int, seed: int, correlation: float = 0.8) -> dict[SequenceId, int]:
    alone = LogNormalLengths(median=30, sigma=1.0, cap=CAP)
    drawn = GroupedLengths(lengths=alone, correlation=correlation).draw(num_groups, group_size, seed)
    return {(0, uid, index): length for uid, group in enumerate(drawn) for index, length in enumerate(group)}


def roll_out(
    policy: SchedulePolicy,
    lengths: dict[SequenceId, int],
    *,
    num_kv_tokens: int = 800,
    max_num_seqs: int = 8,
    message_s: float = 0.001,
    checks: bool = True,
) -> SimulatedRollout:
    config = ClusterConfig(
        layout=contiguous_layout(range(3), 1),
        engine=EngineConfig(max_num_seqs=max_num_seqs, block_size=4, max_num_batched_tokens=4096),
        pace=FlatPace(),
        num_kv_tokens={1: num_kv_tokens},
        max_model_len=CAP + 8,
        overheads=Overheads(message_s=message_s),
    )
    simulated = Cluster(config, schedule_policy=policy, lengths=lengths)
    if checks:
        check_after_every_event(simulated)
    states = [
        SequenceState(
            key=SequenceKey(run_seed=0, policy_step=0, prompt_uid=uid, sample_index=index),
            group_id=uid,
            tokens=[uid * 8 + place for place in range(8)],
            num_prompt_tokens=8,
            params=SamplingParams(max_tokens=CAP),
        )
        for _, uid, index in lengths
    ]
    done = simulated.roll_out(states)
    assert done.lengths == {id_: lengths[id_] for id_ in done.lengths} and done.lengths.keys() == lengths.keys()
    return done


@pytest.mark.parametrize("seed", range(12))
def test_decisions_are_those_of_the_algorithm_written_naively(seed: int) -> None:
    rng = random.Random(seed)
    options = ContextOptions(
        chunk_tokens=rng.choice([4, 16, 50]),
        follow_ups=rng.choice([0, 2]),
        look_ahead=rng.choice([1, 8]),
        starving_share=rng.choice([0.05, 0.5]),
        lifts=rng.random() < 0.7,
        order="length" if seed % 2 else "remaining",
        spread=rng.choice([0.0, 0.5]),
        seed=seed,
    )
    lengths = draw(12, 5, seed)
    policy = checked(options, lengths if seed % 4 == 3 else None)
    roll_out(policy, lengths, num_kv_tokens=rng.choice([300, 2000]), checks=False)
    naive = policy.naive
    assert policy.num_dispatched >= sum(-(-length // options.chunk_tokens) for length in lengths.values())
    assert naive.num_starving and (naive.num_queued > 0) == (options.follow_ups > 0)
    assert naive.lengths is not None or naive.num_lifted or not options.lifts
    assert naive.num_passed == 0 or options.look_ahead > 1
    assert len(policy.policy._groups) < 12, "groups outlive their members"


def test_decisions_survive_losses_moves_and_aborts() -> None:
    counts: dict[str, int] = {}
    for seed in range(NUM_REPLAYED):
        options = ContextOptions(chunk_tokens=4, follow_ups=0, starving_share=0.3, seed=seed)
        world = replay(seed, policy=checked(options))
        for what, number in world.counts.items():
            counts[what] = counts.get(what, 0) + number
    assert min(counts[what] for what in ("regroups", "moves", "lost", "repeated", "kv")) > 5


@pytest.mark.parametrize("oracle", [False, True])
def test_a_large_group_takes_no_more_work_for_each_member(oracle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {(0, 0, index): 30 for index in range(400)}
    policy = ContextAware(ContextOptions(chunk_tokens=50, spread=0.0), lengths=lengths if oracle else None)
    asked, key = [], policy._key
    monkeypatch.setattr(policy, "_key", lambda *arguments: (asked.append(arguments), key(*arguments))[1])
    roll_out(policy, lengths, num_kv_tokens=600, checks=False)
    assert len(asked) <= 2 * len(lengths), "once as they come, and once more as the first one has ended"


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("follow_ups", [0, 2])
@pytest.mark.parametrize("num_kv_tokens", [300, 3000])
@pytest.mark.parametrize("kind", [ContextAware, Divided])
def test_every_chunk_runs_once_and_none_is_preempted(
    kind: Any, num_kv_tokens: int, follow_ups: int, spread: float
) -> None:
    of_kind = {ContextAware: ContextOptions, Divided: ChunkOptions}[kind]
    options = of_kind(chunk_tokens=16, follow_ups=follow_ups, spread=spread)
    lengths = draw(10, 4, seed=1)
    done = roll_out(kind(options), lengths, num_kv_tokens=num_kv_tokens)
    dispatches = [one for one in done.decisions if one.action == "dispatch"]
    fewest, most = (sum(-(-length // chunk) for length in lengths.values()) for chunk in (16, 16 * (1 - spread)))
    assert fewest <= len(dispatches) <= most and (len(dispatches) > fewest or not spread)
    assert done.num_preempted == 0
    full = max(one.num_reserved_blocks / one.num_blocks for decision in dispatches for one in decision.replicas)
    assert full > 0.9 or num_kv_tokens > 300
    assert full <= 1 or follow_ups


def test_with_follow_ups_a_chunk_s_end_costs_at_most_one_step_of_a_slot() -> None:
    """Though a round trip to the coordinator takes three steps of about 18 ms."""
    lengths = draw(40, 4, seed=2)
    idle = {}
    for follow_ups in (0, 4):
        options = ContextOptions(chunk_tokens=16, follow_ups=follow_ups)
        done = roll_out(ContextAware(options), lengths, num_kv_tokens=3000, message_s=0.025, checks=False)
        times = [(one.now, one.num_waiting) for one in done.decisions if one.action == "dispatch"]
        last = min(now for now, num_waiting in times if num_waiting == 1)
        num_ends = sum(0 < now < last for now, _ in times)
        idle[follow_ups] = sum(8 - step.num_running for step in done.steps if step.start < last) / num_ends
    assert idle[4] < 1 and idle[0] > 3, idle


class InOrder:
    """A divided rollout that tries one sequence at a time, beside a plain list."""

    def __init__(self, takes_turns: bool) -> None:
        self._policy = Divided(ChunkOptions(chunk_tokens=16, look_ahead=1), takes_turns=takes_turns)
        self._takes_turns = takes_turns
        self._entered: list[SequenceId] = []
        self.num_back = 0

    def next(self, view: ScheduleView) -> Dispatch | None:
        self._entered += [one.sequence_id for one in view.entered]
        self.num_back += sum(one.num_generated > 0 for one in view.entered)
        self._entered = [id_ for id_ in self._entered if id_ in view.waiting]
        dispatch = self._policy.next(view)
        if dispatch is not None:
            index = {id_: one.index for id_, one in view.waiting.items()}
            assert dispatch.sequence_id == (
                self._entered[0] if self._takes_turns else min(index, key=index.__getitem__)
            )
        return dispatch


def test_those_that_run_are_not_behind() -> None:
    """40 sequences with 25 blocks each, and 60 at their ends: about 42 of the replica's 1,000 for each."""
    view = ReplicaView(
        spec=ReplicaSpec(id=0, ranks=(0,)),
        accepts=True,
        max_num_seqs=64,
        num_assigned=40,
        num_tokens=4000,
        block_size=4,
        num_blocks=1000,
        num_reserved_blocks=2400,
        num_running=0,
        num_waiting=0,
        num_free_blocks=0,
        seconds=0.0,
    )
    assert view.num_behind() == pytest.approx(40 - 1000 / 42.5)
    assert msgspec.structs.replace(view, num_running=36).num_behind() == 4
    assert msgspec.structs.replace(view, num_running=42).num_behind() == 0, "some have left since"
    assert msgspec.structs.replace(view, num_running=10, max_num_seqs=12).num_behind() == 28


@pytest.mark.parametrize(("chunk", "spread"), [(100, 0.0), (100, 0.5), (100, 1.0), (1, 1.0), (7, 0.5)])
def test_chunks_are_evenly_spread(chunk: int, spread: float) -> None:
    options = ChunkOptions(chunk_tokens=chunk, spread=spread)
    for start in (0, 1000, 10**7):
        lengths = sorted(options.length(start + place) for place in range(50))
        evenly = [chunk * (1 - spread * (place + 0.5) / 50) for place in reversed(range(50))]
        assert lengths[0] >= 1 and lengths[-1] <= chunk
        assert max(abs(one - other) for one, other in zip(lengths, evenly, strict=True)) <= 1 + chunk * spread / 25


@pytest.mark.parametrize("takes_turns", [False, True])
def test_sequences_keep_their_places_or_take_turns(takes_turns: bool) -> None:
    policy = InOrder(takes_turns)
    roll_out(policy, draw(20, 4, seed=4), checks=False)
    assert policy.num_back > 50


@pytest.mark.parametrize("oracle", [False, True])
def test_chunks_of_different_lengths_fill_the_cache(oracle: bool) -> None:
    """Sequences that began together and leave together need room at that time that is unused before it."""
    lengths = draw(60, 8, seed=5)
    use = {}
    for spread in (0.0, 0.5):
        options = ContextOptions(chunk_tokens=50, spread=spread)
        policy = ContextAware(options, lengths=lengths if oracle else None)
        done = roll_out(policy, lengths, num_kv_tokens=1000, max_num_seqs=64, checks=False)
        body = [step for step in done.steps if step.start < 0.7 * done.makespan]
        use[spread] = sum(step.kv_use * step.seconds for step in body) / sum(step.seconds for step in body)
    assert use[0.5] > use[0.0] + 0.03, use


@pytest.mark.parametrize("seed", range(10))
def test_a_queue_is_in_order_and_does_not_grow(seed: int) -> None:
    rng = random.Random(seed)
    queue, present = WaitingQueue[int](), dict[int, tuple[tuple[int, ...], int]]()
    for number in range(2000):
        item = rng.randrange(30)
        if rng.random() < 0.7:
            present[item] = (rng.randrange(5),), number
            queue.put(item, present[item][0])
        elif item in present:
            del present[item]
            if rng.random() < 0.5:
                queue.discard(item)
        if rng.random() < 0.2:
            with closing(queue.ordered(present)) as ordered:
                count = rng.randrange(40)
                assert list(islice(ordered, count)) == sorted(present, key=present.__getitem__)[:count]
        assert len(queue._heap) <= 200


@pytest.mark.parametrize("seed", range(50))
def test_estimates(seed: int) -> None:
    rng = random.Random(seed)
    plain, lifted = LengthEstimate(lifts=False), LengthEstimate()
    completed: list[int] = []
    seen = [0]
    for _ in range(20):
        before = plain.of(-1), lifted.of(-1)
        assert plain.of(99) == max(completed, default=99)
        assert lifted.of(99) == (max(completed + seen) if completed else 99)
        length = rng.randint(1, 99)
        if rng.random() < 0.3:
            completed.append(length)
            changes = plain.complete(length), lifted.complete(length)
        else:
            seen.append(length)
            changes = plain.see(length), lifted.see(length)
        assert changes == tuple(one.of(-1) != old for one, old in zip((plain, lifted), before, strict=True))


def test_groups_stay_together_and_every_replica_gets_as_many() -> None:
    lengths = draw(12, 4, seed=3)
    places = []
    for seed in (0, 0, 1):
        done = roll_out(RandomStatic(seed), lengths, num_kv_tokens=1000)
        found = {
            (id_, one.replica_id) for one in done.decisions if one.action == "dispatch" for id_ in one.sequence_ids
        }
        assert len(found) == len(lengths)
        of_group = {(id_[1], replica_id) for id_, replica_id in found}
        assert len(of_group) == 12
        assert sorted(replica_id for _, replica_id in of_group) == sorted([0, 1, 2] * 4)
        places.append(of_group)
    assert places[0] == places[1] != places[2]


def test_single_sequences_are_spread_evenly_in_an_order_by_the_seed() -> None:
    lengths, places = draw(12, 4, seed=3), []
    for seed in (0, 0, 1):
        done = roll_out(RandomStatic(seed, by="sequence"), lengths, num_kv_tokens=1000)
        dispatched = [one for one in done.decisions if one.action == "dispatch"]
        places.append([(id_, one.replica_id) for one in dispatched for id_ in one.sequence_ids])
        assert len(places[-1]) == 48
        assert sorted(replica_id for _, replica_id in places[-1]) == sorted([0, 1, 2] * 16)
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize("by", ["group", "sequence"])
def test_places_are_drawn_anew_for_each_rollout_and_forgotten_after_it(by: Literal["group", "sequence"]) -> None:
    """Also for groups of the same ids: of those that had one replica, both replicas now get as many."""
    policy = RandomStatic(by=by)
    desk, _ = open_desk(8, policy=policy, slots=8)
    where = given(desk.sent)
    for phase in (1, 2):
        running = [(replica_id, uid) for replica_id, uids in where.items() for uid in uids]
        for replica_id, uid in running:
            for other, uids in given(desk.finish(replica_id, make_state(uid), phase=phase - 1)).items():
                where[other] += uids
                running += [(other, one) for one in uids]
        assert len(where[0]) == len(where[1]) == 4 // phase
        for command in [one for one in desk.ask(r.RequestEndPhase()) if isinstance(one, m.EndPhase)]:
            desk.hear(m.PhaseEnded, command.replica_id, phase=phase - 1, acks=command.seq)
        desk.ask(r.BeginPhase(phase=phase, policy_version=0, weights_source="somewhere"))
        where = given(desk.ask(r.SubmitSequences(states=tuple(map(make_state, where[0])))))
    assert len(where[0]) == len(where[1]) == 1 and len(policy._places) == 2


def test_an_oracle_needs_all_lengths() -> None:
    with pytest.raises(RuntimeError, match=r"raised ValueError: lengths: none of sequence \(0, 1, 0\); the oracle"):
        open_desk(2, policy=ContextAware(lengths={(0, 0, 0): 5}), slots=2)


@pytest.mark.parametrize("chunk", [3, 201])
def test_a_chunk_has_at_least_a_block_and_at_most_a_sequence(chunk: int) -> None:
    options = ChunkOptions(chunk_tokens=chunk)
    with pytest.raises(ValueError, match=f"chunk_tokens={chunk}: must be at least a block.*from 4 to 200"):
        options.check(block_size=4, max_tokens=CAP)
    for fine in (4, 200):
        ChunkOptions(chunk_tokens=fine).check(block_size=4, max_tokens=CAP)
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        ContextOptions(chunk_tokens=0)


def test_a_later_rollout_may_use_the_ids_of_an_earlier_one() -> None:
    """The core hands over the last ends of a rollout together with the first sequences of the next one."""
    desk, states = open_desk(3, policy=ContextAware(ContextOptions(chunk_tokens=8)), slots=2)
    assert sorted(uid for uids in given(desk.sent).values() for uid in uids) == [0, 1, 2]
    where = {uid: replica_id for replica_id, uids in given(desk.sent).items() for uid in uids}
    for uid, state in enumerate(states):
        desk.finish(where[uid], state)
    for command in [one for one in desk.ask(r.RequestEndPhase()) if isinstance(one, m.EndPhase)]:
        desk.hear(m.PhaseEnded, command.replica_id, acks=command.seq)
    desk.ask(r.BeginPhase(phase=1, policy_version=0, weights_source="somewhere"))
    again = desk.ask(r.SubmitSequences(states=tuple(make_state(uid) for uid in range(3))))
    assert sorted(uid for uids in given(again).values() for uid in uids) == [0, 1, 2]
