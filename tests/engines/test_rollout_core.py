"""The core against a model of replicas that step, repeat, delay, move, regroup and die; and its rules one by one.

Every fuzz case is a function of its seed alone: `replay(seed)` runs one again.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from engines.control import messages as m
from engines.control.messages import ProtocolError, decode_command, decode_event, encode
from engines.coordination import requests as r
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand, SchedulePolicy, Static
from engines.coordination.views import (
    Dispatch,
    EndedView,
    LayoutChange,
    LayoutView,
    Prefetch,
    ScheduleView,
)
from engines.parallel.layout import Layout, ReplicaSpec, contiguous_layout, nested_layout
from engines.sequence import (
    Completion,
    Finished,
    KVHandle,
    KVPart,
    SamplingParams,
    SequenceId,
    SequenceKey,
    SequenceState,
    Work,
)

BLOCK = 4
MAX_LEN = 24
PART = KVPart(first_token=0, num_tokens=4, first_head=0, num_heads=2, location="shm:x", num_bytes=64)
TIMEOUT = 60.0
STOP_TOKEN = 0


def token_at(key: SequenceKey, position: int) -> int:
    """A stand-in for the sampler: a pure function of key and position; about one in eight is the stop token."""
    return hash((key.policy_step, key.prompt_uid, key.sample_index, position)) % 8


def make_state(
    uid: int, phase: int = 0, num_prompt: int = 3, max_tokens: int = 12, *, in_turns: bool = False
) -> SequenceState:
    key = SequenceKey(run_seed=0, policy_step=phase, prompt_uid=uid, sample_index=0)
    return SequenceState(
        key=key,
        group_id=uid,
        tokens=[9] * num_prompt,
        num_prompt_tokens=num_prompt,
        params=SamplingParams(max_tokens=max_tokens),
        in_turns=in_turns,
    )


def answer_to(state: SequenceState) -> r.ContinueTurn | r.EndTrajectory:
    """What a trajectory's environment answers: a pure function of the key and the turn."""
    turn = len(state.observed)
    observation = (9,) * (hash((state.key.prompt_uid, turn)) % 4)
    is_over = turn > 0 and hash((turn, state.key.prompt_uid)) % 5 == 0
    if is_over or len(state.tokens) + len(observation) >= state.num_prompt_tokens + state.params.most_tokens:
        reason = "stop" if is_over else "length"
        return r.EndTrajectory(sequence_id=state.sequence_id, turn=turn, reason=reason, text=str(turn))
    return r.ContinueTurn(sequence_id=state.sequence_id, turn=turn, observation=observation)


def expected_tokens(state: SequenceState) -> list[int]:
    """What a sequence has at its end, beside its prompt: played through without a core."""
    if not state.in_turns:
        tokens: list[int] = []
        while len(tokens) < state.params.max_tokens and (not tokens or tokens[-1] != STOP_TOKEN):
            tokens.append(token_at(state.key, state.num_prompt_tokens + len(tokens)))
        return tokens
    state = SequenceState.from_bytes(state.to_bytes())
    while isinstance(answer := answer_to(state), r.ContinueTurn):
        state.observe(answer.observation)
        while not is_finished(state):
            state.tokens.append(token_at(state.key, len(state.tokens)))
            if state.tokens[-1] == STOP_TOKEN:
                break
        if is_finished(state):
            break
    return state.tokens[state.num_prompt_tokens :]


def is_finished(state: SequenceState) -> bool:
    if state.num_response_tokens >= state.params.max_tokens and not (state.in_turns and state.tokens[-1] == STOP_TOKEN):
        return True
    return not state.in_turns and state.num_generated > 0 and state.tokens[-1] == STOP_TOKEN


def completion_of(state: SequenceState, reason: Any) -> Finished:
    return Finished(state=state, completion=Completion.of(state, reason))


class ModelReplica:
    """A process that holds sequences, or an idle rank: takes commands in order, numbers its events."""

    def __init__(self, spec: ReplicaSpec, epoch: int, phase: int, version: int, slots: int, num_blocks: int) -> None:
        self.spec, self.epoch, self.phase, self.version = spec, epoch, phase, version
        self.slots, self.num_blocks = slots, num_blocks
        self.num_kv_tokens = num_blocks * BLOCK
        self.works: dict[SequenceId, tuple[SequenceState, int]] = {}
        self.reported: dict[SequenceId, int] = {}
        self.expected: set[SequenceId] = set()
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.num_events = 0
        self.left = False
        self.last_seq = -1
        self.emit(
            m.ReplicaReady,
            max_num_seqs=slots,
            num_kv_tokens=num_blocks * BLOCK,
            block_size=BLOCK,
            policy_version=version,
        )

    def emit(self, kind: Any, **fields: Any) -> None:
        envelope = {"replica_id": self.spec.id, "rank": self.spec.ranks[0], "epoch": self.epoch, "phase": self.phase}
        self.outbox.append(encode(kind(**envelope, seq=self.num_events, **fields)))
        self.num_events += 1

    def kv(self, state: SequenceState, with_kv: bool) -> KVHandle | None:
        part = replace(PART, num_tokens=len(state.tokens) - 1, location=f"{self.spec.id}")
        handle = KVHandle(policy_version=self.version, dtype="f", parts=(part,))
        return handle if with_kv and state.num_generated else None

    @property
    def is_busy(self) -> bool:
        """Whether it has anything to take, to run or to say."""
        return bool(self.inbox or self.outbox or self.works)

    def take(self) -> m.Command | None:
        """Takes one command; returns a `Regroup` for the world to carry out."""
        command = decode_command(self.inbox.popleft())
        assert not self.left, "a command for a replica that was regrouped away"
        assert (command.replica_id, command.epoch) == (self.spec.id, self.epoch), "a command for an old replica"
        assert command.seq > self.last_seq
        self.phase, self.last_seq = command.phase, command.seq
        match command:
            case m.SubmitWork():
                for work in command.works:
                    state = work.state
                    assert state.sequence_id not in self.works
                    assert not is_finished(state) and work.turn is None
                    assert not state.in_turns or state.observed, "a trajectory that has not begun"
                    assert len(state.tokens) <= self.num_kv_tokens, "more tokens than it can hold"
                    bound = MAX_LEN if work.max_new_tokens is None else work.max_new_tokens
                    stop = min(len(state.tokens) + bound, self.num_kv_tokens + 1)
                    self.works[state.sequence_id] = (state, stop)
                    self.expected.discard(state.sequence_id)
                    self.reported[state.sequence_id] = len(state.tokens)
            case m.ExpectSequences():
                assert self.expected >= set(command.dropped)
                self.expected -= set(command.dropped)
                for work in command.works:
                    assert work.kv is not None and work.state.in_turns and work.state.sequence_id not in self.works
                    self.expected.add(work.state.sequence_id)
            case m.PauseSequences():
                ids = list(self.works) if command.sequence_ids is None else command.sequence_ids
                states = [self.works.pop(id_)[0] for id_ in ids if id_ in self.works]
                works = tuple(Work(state=state, kv=self.kv(state, command.with_kv)) for state in states)
                self.emit(m.SequencesPaused, acks=command.seq, works=works)
            case m.AbortSequences():
                states = [self.works.pop(id_)[0] for id_ in command.sequence_ids if id_ in self.works]
                finished = tuple(completion_of(state, "abort") for state in states)
                self.emit(m.SequencesAborted, acks=command.seq, finished=finished)
            case m.LoadWeights():
                self.version = command.version
                self.emit(m.WeightsLoaded, acks=command.seq, version=command.version, checksum=7 * command.version)
            case m.EndPhase():
                assert not self.works, "the phase ends with work left"
                assert not self.expected, "the phase ends, and a replica still expects sequences"
                self.emit(m.PhaseEnded, acks=command.seq)
            case m.Regroup():
                assert not self.works
                self.left = True
                return command
        return None

    def step(self, report: bool) -> int:
        """One token for each of the sequences that have a slot; returns how many it releases as its KV is full."""
        finished, released = [], []
        running = list(self.works.items())[: self.slots]
        for id_, (state, stop) in running:
            state.tokens.append(token_at(state.key, len(state.tokens)))
            state.logprobs.append(-1.0)
            state.versions.append(self.version)
            if is_finished(state):
                reason = "stop" if state.tokens[-1] == STOP_TOKEN else "length"
                finished.append(completion_of(state, reason))
                del self.works[id_]
            elif state.in_turns and state.tokens[-1] == STOP_TOKEN:
                turn = f"turn {len(state.observed)}"
                released.append(Work(state=state, kv=self.kv(state, True), turn=turn))
                del self.works[id_]
            elif len(state.tokens) >= stop:
                released.append(Work(state=state, kv=self.kv(state, True)))
                del self.works[id_]
        if report and running:
            progress = []
            for id_, (state, _) in self.works.items():
                if delta := len(state.tokens) - self.reported[id_]:
                    progress.append((id_, delta))
                    self.reported[id_] = len(state.tokens)
            self.emit(
                m.StepReported,
                num_running=len(running),
                num_waiting=max(0, len(self.works) - self.slots),
                num_free_blocks=0,
                seconds=0.1,
                progress=tuple(progress),
            )
        if finished:
            self.emit(m.SequencesFinished, finished=tuple(finished))
        if released:
            self.emit(m.SequencesReleased, works=tuple(released))
        return sum(len(one.state.tokens) > self.num_kv_tokens for one in released)


class RandomPolicy:
    """Any valid dispatch, with a random bound: what the core must survive."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ended: list[EndedView] = []

    def next(self, view: ScheduleView) -> Dispatch | None:
        self.ended += view.ended
        candidates = list(view.waiting.values())
        self.rng.shuffle(candidates)
        for sequence in candidates[:3]:
            bound = self.rng.choice([None, None, 1, 2, 5])
            roomy = [replica for replica in view.replicas.values() if replica.room_for(sequence, bound)]
            if roomy:
                chosen = self.rng.choice(roomy).spec.id
                id_, priority = sequence.sequence_id, self.rng.random()
                return Dispatch(sequence_id=id_, replica_id=chosen, max_new_tokens=bound, priority=priority)
        return None

    def prefetch(self, view: ScheduleView) -> Prefetch | None:
        self.ended += view.ended
        assert all(view.parked[one].is_parked for one in view.parked)
        if not view.parked or self.rng.random() < 0.5:
            return None
        chosen = view.parked[self.rng.choice(list(view.parked))]
        able = [id_ for id_, one in view.replicas.items() if one.accepts and one.can_hold(chosen)]
        if not able or chosen.expected_at == (replica_id := self.rng.choice(able)):
            return None
        return Prefetch(sequence_id=chosen.sequence_id, replica_id=replica_id)


class World:
    """The core, its replicas, and the wires between: keeps each wire's order, and checks all that the core says."""

    def __init__(self, seed: int, keeps_log: bool = False, policy: SchedulePolicy | None = None) -> None:
        self.keeps_log = keeps_log
        self.rng = rng = random.Random(seed)
        self.world_size = rng.choice([0, 1, 2, 4, 4])
        self.now = 0.0
        layout = self.random_layout(0)
        self.policy_kind = rng.choice(["on_demand", "random"])
        policy = policy or (OnDemand() if self.policy_kind == "on_demand" else RandomPolicy(rng))
        self.layout_policy = RandomLayouts(self) if rng.random() < 0.2 else None
        self.core = RolloutCore(
            layout=layout,
            world_size=self.world_size,
            schedule_policy=policy,
            layout_policy=self.layout_policy,
            timeout_s=TIMEOUT,
        )
        self.version = 0
        self.phase = 0
        self.replicas: dict[tuple[int, int], ModelReplica] = {}
        self.idle: dict[int, deque[bytes]] = {}
        self.joining: dict[tuple[int, int], set[int]] = {}
        self.lost: set[int] = set()
        self.delivered: dict[SequenceId, Finished] = {}
        self.submitted: dict[SequenceId, SequenceState] = {}
        self.aborted: set[SequenceId] = set()
        self.given: dict[tuple[int, int], dict[SequenceId, int]] = {}
        self.asked: dict[SequenceId, SequenceState] = {}
        """Trajectories whose environment has not answered: their states then."""
        self.heard: set[tuple[SequenceId, int]] = set()
        self.answers: list[r.ContinueTurn | r.EndTrajectory] = []
        self.phase_complete = False
        self.num_outside = 0
        self.counts: dict[str, int] = {}
        self.repeats: list[bytes] = []
        self.log: list[tuple[Any, float]] = []
        self.outputs: list[Any] = []
        for spec in layout.replicas:
            self.form(spec, 0)
        self.idle = {rank: deque() for rank in range(self.world_size) if layout.replica_of(rank) is None}
        self.idle_events: deque[bytes] = deque()

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def random_layout(self, epoch: int) -> Layout:
        ranks = list(range(self.world_size))
        if not ranks:
            return Layout(epoch=epoch, replicas=())
        size = self.rng.choice([size for size in (1, 2, 4) if self.world_size % size == 0])
        layout = self.rng.choice([nested_layout, contiguous_layout])(ranks, size, epoch=epoch)
        if len(layout.replicas) > 1 and self.rng.random() < 0.3:
            layout = Layout(epoch=epoch, replicas=layout.replicas[1:])
        return layout

    def form(self, spec: ReplicaSpec, epoch: int, version: int = 0) -> None:
        slots, blocks = self.rng.randint(1, 4), self.rng.randint(MAX_LEN // BLOCK, 3 * MAX_LEN // BLOCK)
        # In each layout the last rank has a replica; so somebody can always hold the longest sequence.
        if self.world_size and self.world_size - 1 not in spec.ranks and self.rng.random() < 0.7:
            blocks = self.rng.randint(1, 2)
        self.replicas[spec.id, epoch] = ModelReplica(spec, epoch, self.phase, version, slots, blocks)
        self.given[spec.id, epoch] = {}

    # --- the core's side

    def say(self, event: Any) -> None:
        self.now += self.rng.random() * 0.01
        if self.keeps_log:
            self.log.append((copy.deepcopy(event), self.now))
        output = self.core.on_event(event, self.now)
        if self.keeps_log:
            self.outputs.append(copy.deepcopy(output))
        for item in output:
            self.hear(item)
        if self.rng.random() < 0.2:
            self.core.check_integrity()

    def hear(self, item: Any) -> None:
        match item:
            case r.Deliver():
                id_ = item.finished.state.sequence_id
                assert id_ not in self.delivered, f"{id_} is delivered twice"
                self.delivered[id_] = item.finished
                for given in self.given.values():
                    given.pop(id_, None)
            case r.TurnEnded():
                self.count("turns")
                assert item.text == f"turn {len(item.state.observed)}"
                self.ask(item.state)
            case r.PhaseComplete():
                assert item.phase == self.phase and not self.phase_complete
                self.phase_complete = True
            case r.RegroupComplete():
                self.count("regroups")
                assert not self.core.regrouping
            case r.ReplicaDropped():
                assert item.replica_id in self.lost, f"dropped without a cause: {item.reason}"
            case r.Failed():
                raise AssertionError(item.reason)
            case r.DiscardKV():
                self.count("discarded")
            case m.ExpectSequences():
                self.count("expected" if item.works else "not expected any more")
                self.deliver_command(item)
            case _:
                self.deliver_command(item)

    def deliver_command(self, command: m.Command) -> None:
        data = encode(command)
        if command.replica_id is None:
            assert isinstance(command, m.Regroup | m.EndPhase)
            self.idle[command.rank].append(data)
            return
        assert command.replica_id not in self.lost or (command.replica_id, command.epoch) in self.alive()
        replica = self.replicas[command.replica_id, command.epoch]
        assert command.rank == replica.spec.ranks[0]
        if isinstance(command, m.SubmitWork):
            self.check_room(replica, command)
        replica.inbox.append(data)

    def alive(self) -> set[tuple[int, int]]:
        return {key for key in self.replicas if key[0] not in self.lost}

    def check_room(self, replica: ModelReplica, command: m.SubmitWork) -> None:
        """By the core's own knowledge: what was given and has not come back, at the lengths it was given with."""
        given = self.given[replica.spec.id, replica.epoch]
        for work in command.works:
            id_ = work.state.sequence_id
            assert id_ not in self.delivered and not any(id_ in other for other in self.given.values())
            if work.kv is not None:
                self.count("kv")
                assert work.kv.num_tokens < len(work.state.tokens)
            assert not given or sum(given.values()) + -(-len(work.state.tokens) // BLOCK) <= replica.num_blocks
            given[id_] = -(-len(work.state.tokens) // BLOCK)
            assert len(given) <= replica.slots, "more sequences than slots"

    # --- environments

    def ask(self, state: SequenceState) -> None:
        call = state.sequence_id, len(state.observed)
        assert call not in self.heard, "an environment hears a turn twice"
        self.heard.add(call)
        self.asked[state.sequence_id] = SequenceState.from_bytes(state.to_bytes())

    def answer(self) -> None:
        """Some environments answer, perhaps after their trajectory's end; some answers come again."""
        ids = self.rng.sample(list(self.asked), min(len(self.asked), self.rng.randint(1, 3)))
        answers = [answer_to(self.asked.pop(id_)) for id_ in ids]
        if self.answers and self.rng.random() < 0.2:
            answers.append(self.rng.choice(self.answers))
            self.count("answers again")
        self.answers += answers
        self.say(r.AnswerTurns(answers=tuple(answers)))

    # --- the wires

    def pump(self, key: tuple[int, int]) -> None:
        """Moves the next event of one replica to the core; sometimes one that came before comes again."""
        replica = self.replicas[key]
        if not replica.outbox:
            return
        data = replica.outbox.popleft()
        event = decode_event(data)
        returned: list[SequenceId] = []
        if isinstance(event, m.SequencesReleased | m.SequencesPaused):
            returned = [work.state.sequence_id for work in event.works]
        for id_ in returned:
            self.given[key].pop(id_, None)
        self.say(event)
        self.repeats.append(data)
        if self.faults and self.rng.random() < 0.1:
            self.count("repeated")
            self.say(decode_event(self.rng.choice(self.repeats)))

    def take(self, key: tuple[int, int]) -> None:
        replica = self.replicas[key]
        if replica.inbox and isinstance(regroup := replica.take(), m.Regroup):
            for rank in replica.spec.ranks:
                self.join(rank, regroup.layout)
            if not replica.outbox:
                del self.replicas[key]  # it can do no more: a command for it is a KeyError

    def take_idle(self, rank: int) -> None:
        if not self.idle.get(rank):
            return
        command = decode_command(self.idle[rank].popleft())
        if isinstance(command, m.Regroup):
            del self.idle[rank]
            self.join(rank, command.layout)
        else:
            envelope = {"replica_id": None, "rank": rank, "phase": command.phase, "epoch": command.epoch, "seq": 0}
            self.idle_events.append(encode(m.PhaseEnded(**envelope, acks=command.seq)))

    def join(self, rank: int, layout: Layout) -> None:
        """A rank takes its place; the last one of a new replica makes it ready."""
        spec = layout.replica_of(rank)
        if spec is None:
            self.idle[rank] = deque()
            envelope = {"replica_id": None, "rank": rank, "phase": self.phase, "epoch": layout.epoch, "seq": 0}
            self.idle_events.append(encode(m.RankIdle(**envelope)))
            return
        there = self.joining.setdefault((layout.epoch, spec.id), set())
        there.add(rank)
        if there == set(spec.ranks):
            self.form(spec, layout.epoch, self.version)

    def lose(self, replica_id: int) -> None:
        """Some of its last words are lost with it; what was already on the wire may still come after."""
        replica = self.replicas[replica_id, 0]
        self.count("lost")
        for _ in range(self.rng.randint(0, len(replica.outbox))):
            replica.outbox.pop()
        if self.rng.random() < 0.5:
            while replica.outbox:
                self.pump((replica_id, 0))
        self.lost.add(replica_id)
        self.given[replica_id, 0] = {}
        if self.rng.random() < 0.2 and replica.num_events > 1 and not replica.outbox:
            replica.num_events += 1  # a hole in its events tells as well
            replica.emit(m.WorkRejected, sequence_id=(0, 0, 0), reason="after a hole")
            self.pump((replica_id, 0))
        else:
            envelope = {"replica_id": replica_id, "rank": replica.spec.ranks[0], "phase": 0, "epoch": 0, "seq": 0}
            self.say(m.ReplicaLost(**envelope, reason="killed"))
        while replica.outbox:
            self.pump((replica_id, 0))
        assert not self.core.failed

    # --- a run

    def add_replica(self) -> None:
        id_ = 100 + self.num_outside
        self.num_outside += 1
        spec = ReplicaSpec(id=id_, ranks=(self.world_size + id_,))
        self.say(r.AddReplica(spec=spec))
        self.form(spec, 0, self.rng.randint(0, self.version))

    def fault(self) -> None:
        rng = self.rng
        kind = rng.choice(["move", "move", "regroup", "lose", "add", "abort", "submit", "tick", "predict"])
        outside = [key[0] for key in self.alive() if key[0] >= 100]
        known = list(self.submitted)
        if kind == "move" and known:
            targets = [None, *(spec.id for spec in self.core.layout.replicas), *outside]
            self.count("moves")
            id_ = rng.choice(known)
            try:
                self.say(r.RequestMove(sequence_id=id_, replica_id=rng.choice(targets), with_kv=rng.random() < 0.5))
            except r.RequestRefused as refused:
                assert re.search(r"has \d+ tokens, and the KV cache of replica \d+ .* holds", str(refused))
                self.count("infeasible")
                if self.keeps_log:
                    self.log.pop()  # it had no effect
        elif kind == "regroup" and self.world_size and not self.core.regrouping:
            layout = self.random_layout(self.core.layout.epoch + 1)
            self.say(r.RequestRegroup(layout=layout, with_kv=rng.random() < 0.5))
        elif kind == "lose" and outside and (self.world_size or len(outside) > 1):
            self.lose(rng.choice(sorted(outside)))
        elif kind == "add" and self.num_outside < 4:
            self.add_replica()
        elif kind == "abort" and known and rng.random() < 0.3:
            id_ = rng.choice(known)
            self.aborted.add(id_)
            self.say(r.RequestAbort(sequence_ids=(id_,)))
        elif kind == "submit":
            self.submit(rng.randint(1, 3))
        elif kind == "tick":
            self.say(r.Tick())
        elif kind == "predict" and known:
            answers = [
                r.PredictedLength(
                    sequence_id=rng.choice(known),
                    num_turns=rng.randint(0, 3),
                    remaining=rng.choice([0.0, 7.5, float("nan"), float("inf"), -1.0]),
                )
                for _ in range(3)
            ]
            self.say(r.NotePredictions(source="random", answers=tuple(answers)))

    def submit(self, number: int) -> None:
        states = []
        for _ in range(number):
            num_prompt = self.rng.randint(1, 8)
            uid, most, in_turns = len(self.submitted), self.rng.randint(1, 16), self.rng.random() < 0.4
            states.append(make_state(uid, self.phase, num_prompt, most, in_turns=in_turns))
            self.submitted[states[-1].sequence_id] = SequenceState.from_bytes(states[-1].to_bytes())
        self.say(r.SubmitSequences(states=tuple(states)))
        for state in states:
            if state.in_turns:
                self.ask(state)

    def turn(self) -> None:
        """Somebody, chosen at random, does something: this is what reorders events of different replicas."""
        rng = self.rng
        keys = sorted(key for key in self.alive() if self.replicas[key].is_busy)
        if self.idle_events and rng.random() < 0.5:
            self.say(decode_event(self.idle_events.popleft()))
        for rank in list(self.idle):
            if rng.random() < 0.5:
                self.take_idle(rank)
        if self.asked and self.core.phase is not None and not self.core.ending and rng.random() < 0.2:
            self.answer()
        if not keys:
            return
        key = rng.choice(keys)
        replica = self.replicas[key]
        action = rng.random()
        if action < 0.3:
            self.take(key)
        elif action < 0.6:
            self.count("handed over", replica.step(report=rng.random() < 0.7))
        else:
            for _ in range(rng.randint(1, 3)):
                self.pump(key)

    def run_phase(self) -> None:
        rng = self.rng
        self.submitted, self.delivered, self.aborted, self.phase_complete = {}, {}, set(), False
        self.asked, self.answers = {}, []
        self.say(r.BeginPhase(phase=self.phase, policy_version=self.version, weights_source="somewhere"))
        for (id_, _), replica in self.replicas.items():
            if id_ < 100:
                replica.version = self.version
        if not self.world_size and not [key for key in self.alive() if key[0] >= 100]:
            self.add_replica()
        self.submit(rng.randint(1, 12))
        self.faults = True
        for _ in range(rng.randint(0, 80)):
            if rng.random() < 0.15:
                self.fault()
            self.turn()
        self.faults = False
        abort_all = rng.random() < 0.15
        if abort_all:
            self.aborted |= set(self.submitted)
            self.say(r.RequestEndPhase(abort=True))
        self.until(lambda: self.core.num_unfinished == 0, "every sequence is delivered")
        if not abort_all:
            self.say(r.RequestEndPhase())
        self.until(lambda: self.phase_complete, "the phase ends")
        assert self.core.phase is None
        self.check_delivered()

    def until(self, done: Any, what: str) -> None:
        for _ in range(6000):
            if done():
                return
            self.turn()
        raise AssertionError(f"not within 6000 turns: {what}")

    def check_delivered(self) -> None:
        assert set(self.delivered) == set(self.submitted)
        for id_, finished in self.delivered.items():
            want, completion = expected_tokens(self.submitted[id_]), finished.completion
            if completion.finish_reason == "abort":
                assert id_ in self.aborted
                want = want[: len(completion.token_ids)]
            assert completion.token_ids == want
            assert finished.state.tokens == self.submitted[id_].tokens + want
            assert len(completion.logprobs) == len(want) == len(completion.versions)
            assert all(
                version == (self.version if kept else -1)
                for version, kept in zip(completion.versions, completion.loss_mask, strict=True)
            )


class RandomLayouts:
    def __init__(self, world: World) -> None:
        self.world = world
        self.num_ended = 0

    def decide(self, view: LayoutView) -> LayoutChange | None:
        assert view.num_unfinished >= view.num_waiting
        self.num_ended += len(view.ended)
        assert self.num_ended >= view.num_delivered
        unfinished = view.unfinished
        assert all(unfinished[one].sequence_id == one for one in unfinished)
        if not self.world.world_size or self.world.rng.random() > 0.05 or not self.world.faults:
            return None
        layout = self.world.random_layout(view.layout.epoch + 1)
        ids = [spec.id for spec in layout.replicas if spec.role == "rollout"]
        places = {one: self.world.rng.choice(ids) for one in unfinished if ids and self.world.rng.random() < 0.5}
        return LayoutChange(layout=layout, places=places)


def replay(seed: int, keeps_log: bool = False, policy: SchedulePolicy | None = None) -> World:
    world = World(seed, keeps_log, policy)
    try:
        for phase in range(world.rng.choice([1, 1, 2])):
            world.phase, world.version = phase, phase
            world.run_phase()
    except Exception as error:
        error.add_note(f"replay({seed}) runs this case again")
        raise
    return world


NUM_CASES, NUM_PARTS = 10_000, 20
KINDS = ("regroups", "moves", "lost", "repeated", "kv", "discarded", "turns", "answers again")
KINDS += ("expected", "not expected any more", "handed over")


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_sequence_is_delivered_once_whatever_happens(part: int) -> None:
    counts: dict[str, int] = {}
    for seed in range(part, NUM_CASES, NUM_PARTS):
        world = replay(seed)
        for what, number in world.counts.items():
            counts[what] = counts.get(what, 0) + number
    assert min(counts[what] for what in KINDS) > 30 and counts["infeasible"] > 5


def test_the_same_events_give_the_same_commands() -> None:
    for seed in range(40):
        world = replay(seed, keeps_log=True)
        if world.policy_kind == "on_demand" and world.layout_policy is None and world.counts.get("lost"):
            core = World(seed).core  # as it was at the start
            assert [copy.deepcopy(core.on_event(event, now)) for event, now in world.log] == world.outputs
            assert core.decisions == world.core.decisions and core.decisions
            return
    raise AssertionError("no seed with a policy that draws nothing, and a loss; choose others")


# --- The rules one by one


class Desk:
    """A core and the events of its replicas, numbered by hand."""

    def __init__(self, layout: Layout, world_size: int | None = None, policy: Any = None, **options: Any) -> None:
        self.size = max((rank for spec in layout.replicas for rank in spec.ranks), default=-1) + 1
        self.core = RolloutCore(
            layout=layout, world_size=world_size or self.size, schedule_policy=policy or OnDemand(), **options
        )
        self.num_events: dict[tuple[int, int], int] = {}
        self.now = 0.0

    def ask(self, request: Any) -> list[Any]:
        return self.core.on_event(request, self.now)

    def hear(self, kind: Any, replica_id: int, epoch: int = 0, phase: int = 0, **fields: Any) -> list[Any]:
        seq = fields.pop("seq", None)
        if seq is None:
            seq = self.num_events.get((replica_id, epoch), 0)
            self.num_events[replica_id, epoch] = seq + 1
        event = kind(replica_id=replica_id, rank=replica_id, epoch=epoch, phase=phase, seq=seq, **fields)
        return self.core.on_event(event, self.now)

    def ready(
        self, *replica_ids: int, epoch: int = 0, slots: int = 2, blocks: int = 100, version: int = 0
    ) -> list[Any]:
        size = {"max_num_seqs": slots, "num_kv_tokens": blocks * BLOCK, "block_size": BLOCK, "policy_version": version}
        return [item for id_ in replica_ids for item in self.hear(m.ReplicaReady, id_, epoch, **size)]

    def report(self, replica_id: int, *progress: tuple[SequenceId, int], num_running: int = 1) -> list[Any]:
        load = {"num_running": num_running, "num_waiting": 0, "num_free_blocks": 9, "seconds": 0.5}
        return self.hear(m.StepReported, replica_id, progress=progress, **load)

    def move(self, uid: int, replica_id: int | None) -> list[Any]:
        return self.ask(r.RequestMove(sequence_id=(0, uid, 0), replica_id=replica_id))

    def lose(self, replica_id: int) -> list[Any]:
        return self.hear(m.ReplicaLost, replica_id, seq=0, reason="killed")

    def add(self, *replica_ids: int, ranks: tuple[int, ...] | None = None) -> None:
        for id_ in replica_ids:
            self.ask(r.AddReplica(spec=ReplicaSpec(id=id_, ranks=ranks or (id_,))))

    def finish(self, replica_id: int, state: SequenceState, **fields: Any) -> list[Any]:
        done = SequenceState.from_bytes(state.to_bytes())
        done.tokens += expected_tokens(state)[done.num_generated :]
        done.logprobs = done.versions = [0] * done.num_generated
        return self.hear(m.SequencesFinished, replica_id, finished=(completion_of(done, "stop"),), **fields)


def open_desk(num_states: int, tp: int = 1, num_ranks: int = 2, **options: Any) -> tuple[Desk, list[SequenceState]]:
    """A phase in which every replica has 2 slots, with so many sequences submitted."""
    ready = {name: options.pop(name) for name in ("slots", "blocks") if name in options}
    desk = Desk(contiguous_layout(range(num_ranks), tp), **options)
    desk.ask(r.BeginPhase(phase=0, policy_version=0, weights_source="somewhere"))
    desk.ready(*range(num_ranks // tp), **ready)
    states = [make_state(uid) for uid in range(num_states)]
    desk.sent = desk.ask(r.SubmitSequences(states=tuple(states)))  # type: ignore[attr-defined]
    return desk, states


def given(output: list[Any]) -> dict[int, list[int]]:
    """Replica id -> prompt uids submitted to it."""
    got: dict[int, list[int]] = {}
    for item in output:
        if isinstance(item, m.SubmitWork):
            assert item.replica_id is not None
            got.setdefault(item.replica_id, []).extend(work.state.key.prompt_uid for work in item.works)
    return got


def only(output: list[Any], kind: Any) -> Any:
    (item,) = [item for item in output if isinstance(item, kind)]
    return item


def test_on_demand_gives_one_by_one_as_room_comes() -> None:
    desk, states = open_desk(6)
    assert given(desk.sent) == {0: [0, 2], 1: [1, 3]}
    assert desk.core.num_waiting == 2
    output = desk.finish(1, states[3])
    assert only(output, r.Deliver).finished.state.tokens == states[3].tokens + expected_tokens(states[3])
    assert given(output) == {1: [4]}


def test_nothing_runs_on_a_replica_without_sequences() -> None:
    """Whatever its last report says: it sends none before it has some."""
    desk, states = open_desk(2, num_ranks=1)
    desk.report(0, num_running=2)
    replica = desk.core._books.replicas[0]
    desk.finish(0, states[0])
    assert replica.view(accepts=True).num_running == 2
    desk.finish(0, states[1])
    assert replica.view(accepts=True).num_running == 0


def test_room_counts_the_kv_of_what_was_given_and_what_it_has_grown_by() -> None:
    # 3 tokens of prompt and a block ahead: 2 blocks each.
    desk, states = open_desk(3, num_ranks=1, slots=8, blocks=5)
    assert given(desk.sent) == {0: [0, 1]}
    desk.report(0, (states[0].sequence_id, 8))
    assert not given(desk.finish(0, states[1])), "the first takes 4 blocks of 5 by now"
    assert given(desk.finish(0, states[0])) == {0: [2]}


def test_an_empty_replica_takes_what_will_not_fit_and_its_refusal_fails_the_run() -> None:
    desk, states = open_desk(2, num_ranks=1, blocks=1)
    assert given(desk.sent) == {0: [0]}
    (failed,) = desk.hear(m.WorkRejected, 0, sequence_id=states[0].sequence_id, reason="too long")
    assert failed == r.Failed(reason="replica 0 (rank 0) refused sequence (0, 0, 0): too long")
    assert desk.finish(0, states[0]) == [] and desk.core.ignored


def test_static_gives_all_at_once_by_index() -> None:
    desk = Desk(contiguous_layout(range(3), 1), policy=Static())
    desk.ask(r.BeginPhase(phase=0, policy_version=0))
    desk.ready(2, 0)
    states = tuple(make_state(uid) for uid in range(8))
    assert not given(desk.ask(r.SubmitSequences(states=states))), "the second replica is not ready"
    output = desk.ready(1)
    assert given(output) == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}
    assert len(output) == 3, "one command each, so that all of it is there before the first step"


class Fixed:
    def __init__(self, *dispatches: Dispatch) -> None:
        self.dispatches = list(dispatches)
        self.seen: list[ScheduleView] = []

    def next(self, view: ScheduleView) -> Dispatch | None:
        self.seen.append(view)
        return self.dispatches.pop(0) if self.dispatches else None


def test_a_policy_that_dispatches_nothing_is_waited_for_and_named() -> None:
    desk, _states = open_desk(2, policy=Fixed(), timeout_s=10.0)
    desk.now = 9.0
    assert desk.ask(r.Tick()) == []
    desk.now = 11.0
    (failed,) = desk.ask(r.Tick())
    why = "the schedule policy was waited for to dispatch a sequence, as none runs, and did not within 10 s"
    assert failed == r.Failed(reason=why)


def test_a_policy_that_waits_for_one_to_end_is_not_hurried() -> None:
    first = Dispatch(sequence_id=(0, 0, 0), replica_id=0)
    desk, states = open_desk(2, policy=Fixed(first), timeout_s=10.0)
    desk.now = 9.0
    desk.report(0)
    desk.now = 15.0
    assert desk.ask(r.Tick()) == []
    desk.finish(0, states[0])  # from now on nobody has any
    desk.now = 24.0
    assert desk.ask(r.Tick()) == []
    desk.now = 26.0
    assert isinstance(desk.ask(r.Tick())[0], r.Failed)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_id": (0, 9, 0)}, "the sequence is not waiting"),
        ({"max_new_tokens": 7.5}, "max_new_tokens must be at least 1 and an integer, or None"),
        ({"replica_id": 7}, "no such replica that accepts"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"priority": math.nan}, "priority must be a finite number"),
        ({"priority": math.inf}, "priority must be a finite number"),
        ({}, "has no room"),
    ],
)
def test_an_invalid_dispatch_is_named(fields: dict[str, Any], message: str) -> None:
    first = Dispatch(sequence_id=(0, 0, 0), replica_id=0)
    second = Dispatch(**{"sequence_id": (0, 1, 0), "replica_id": 0, **fields})
    with pytest.raises(RuntimeError, match=message) as error:
        open_desk(2, num_ranks=1, slots=1, policy=Fixed(first, second))
    assert str(error.value).startswith(f"schedule policy Fixed of {__file__}: Dispatch(sequence_id=")


class Reading(Fixed):
    """Answers with these prefetches, and dispatches each sequence to replica 1, with a priority."""

    def __init__(self, *prefetches: Any) -> None:
        super().__init__()
        self.prefetches = list(prefetches)

    def prefetch(self, view: ScheduleView) -> Any:
        self.seen.append(view)
        return self.prefetches.pop(0) if view.parked and self.prefetches else None

    def next(self, view: ScheduleView) -> Dispatch | None:
        self.seen.append(view)
        for id_ in view.waiting:
            return Dispatch(sequence_id=id_, replica_id=1, queued=True, priority=2.5)
        return None


def end_turn(desk: Desk, state: SequenceState) -> list[Any]:
    """The first turn of the trajectory, which replica 1 has, ends; its KV has been stored."""
    state = SequenceState.from_bytes(state.to_bytes())
    state.tokens += [1, STOP_TOKEN]
    state.logprobs, state.versions = [0.0] * 2, [0] * 2
    kv = KVHandle(policy_version=0, dtype="f", parts=(replace(PART, num_tokens=len(state.tokens) - 1),))
    return desk.hear(m.SequencesReleased, 1, works=(Work(state=state, kv=kv, turn="turn 1"),))


def in_a_gap(*prefetches: Any) -> tuple[Desk, Reading, list[Any]]:
    """A trajectory whose first turn has ended; what the core then said."""
    policy = Reading()
    desk, _ = open_desk(0, policy=policy)
    state = make_state(0, in_turns=True)
    desk.ask(r.SubmitSequences(states=(state,)))
    observed = r.ContinueTurn(sequence_id=state.sequence_id, turn=0, observation=())
    (work,) = only(desk.ask(r.AnswerTurns(answers=(observed,))), m.SubmitWork).works
    assert work.priority == 2.5
    policy.prefetches += prefetches
    return desk, policy, end_turn(desk, work.state)


def test_the_kv_of_a_parked_trajectory_is_read_where_it_will_go_on() -> None:
    desk, _policy, output = in_a_gap(Prefetch(sequence_id=(0, 0, 0), replica_id=0))
    (expected,) = [item for item in output if isinstance(item, m.ExpectSequences)]
    assert expected.replica_id == 0 and not expected.dropped
    assert [work.state.sequence_id for work in expected.works] == [(0, 0, 0)] and expected.works[0].kv is not None
    assert [decision.action for decision in desk.core.decisions][-1] == "prefetch"
    desk.core.check_integrity()
    # It goes on elsewhere after all.
    observed = r.ContinueTurn(sequence_id=(0, 0, 0), turn=1, observation=(7, 8))
    output = desk.ask(r.AnswerTurns(answers=(observed,)))
    assert only(output, m.ExpectSequences).dropped == ((0, 0, 0),)
    assert only(output, m.SubmitWork).replica_id == 1
    desk.core.check_integrity()


def test_a_move_in_a_tool_gap_begins_to_read() -> None:
    desk, _, _ = in_a_gap()
    assert only(desk.move(0, 0), m.ExpectSequences).replica_id == 0
    observed = r.ContinueTurn(sequence_id=(0, 0, 0), turn=1, observation=(7, 8))
    (work,) = only(desk.ask(r.AnswerTurns(answers=(observed,))), m.SubmitWork).works
    assert work.priority == 2.5, "the last one"


def test_a_replica_that_is_not_formed_yet_reads_nothing() -> None:
    """Its ranks would not all be there to do so together."""
    desk, _, _ = in_a_gap()
    layout = contiguous_layout(range(2), 2, epoch=1)
    (first, second) = [item for item in desk.ask(r.RequestRegroup(layout=layout)) if isinstance(item, m.PauseSequences)]
    for pause in (first, second):
        output = desk.hear(m.SequencesPaused, pause.replica_id, acks=pause.seq, works=())
    assert any(isinstance(item, m.Regroup) for item in output)
    assert not [item for item in desk.move(0, 0) if isinstance(item, m.ExpectSequences)]
    desk.core.check_integrity()


@pytest.mark.parametrize(
    ("prefetch", "message"),
    [
        (Prefetch(sequence_id=(0, 1, 0), replica_id=0), "the sequence is not parked; only in a tool gap may"),
        (Prefetch(sequence_id=(0, 0, 0), replica_id=7), "there is no such replica that accepts sequences"),
        ("anything", "is no Prefetch and not None"),
    ],
)
def test_an_invalid_prefetch_is_named(prefetch: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"schedule policy Reading of .*{message}"):
        in_a_gap(prefetch)


def test_a_running_trajectory_cannot_be_prefetched_nor_read_twice() -> None:
    desk, policy, _ = in_a_gap(Prefetch(sequence_id=(0, 0, 0), replica_id=0))
    policy.prefetches.append(Prefetch(sequence_id=(0, 0, 0), replica_id=0))
    with pytest.raises(RuntimeError, match="reads its KV already"):
        desk.ask(r.Tick())
    desk.ask(r.SubmitSequences(states=(make_state(1, in_turns=True),)))  # so that one is parked
    desk.ask(r.AnswerTurns(answers=(r.ContinueTurn(sequence_id=(0, 0, 0), turn=1, observation=()),)))
    policy.prefetches.append(Prefetch(sequence_id=(0, 0, 0), replica_id=0))
    with pytest.raises(RuntimeError, match="is not parked"):
        desk.ask(r.Tick())


def test_views_have_the_last_estimate_that_came_in_time() -> None:
    desk, policy, _ = in_a_gap()

    def say(num_turns: int, remaining: float) -> None:
        desk.now += 1.0
        answer = r.PredictedLength(sequence_id=(0, 0, 0), num_turns=num_turns, remaining=remaining)
        desk.ask(r.NotePredictions(source="the predictor", answers=(answer,)))

    assert [view.changed for view in policy.seen][-2:-1] == [()] or policy.seen[-1].changed
    say(0, 30.0)  # about the turn that is over
    assert policy.seen[-1].parked[0, 0, 0].prediction is None and desk.core.ignored
    say(1, 20.0)
    (changed,) = policy.seen[-1].changed
    assert changed.prediction is not None and changed.answered_turns == 1
    assert (changed.prediction.remaining, changed.prediction.num_generated) == (20.0, 2)
    assert (changed.prediction.now, changed.prediction.source) == (1.0 + 1.0, "the predictor")
    assert changed.predicted_remaining == 20.0 and changed.prediction.total == 22.0
    for wrong in (float("nan"), float("inf"), -1.0):
        say(1, wrong)
        (changed,) = policy.seen[-1].changed
        assert changed.predicted_remaining == 20.0
    desk.ask(r.AnswerTurns(answers=(r.ContinueTurn(sequence_id=(0, 0, 0), turn=1, observation=()),)))
    say(1, 10.0)  # later than the tool, but before the turn's end
    record = desk.core._books.sequences[0, 0, 0]
    assert record.view().predicted_remaining == 10.0
    desk.report(1, ((0, 0, 0), 4))
    assert record.view().predicted_remaining == 6.0


def test_what_was_assigned_before_a_policy_s_error_is_sent() -> None:
    policy = Fixed()
    desk, _ = open_desk(3, num_ranks=1, policy=policy)
    policy.dispatches = [Dispatch(sequence_id=(0, uid, 0), replica_id=0) for uid in (0, 9)]
    with pytest.raises(RuntimeError, match="the sequence is not waiting") as error:
        desk.ask(r.RequestAbort(sequence_ids=((0, 2, 0),)))
    assert not isinstance(error.value, r.RequestRefused), "the request was as it should be"
    output = desk.ask(r.Tick())
    assert only(output, r.Deliver).finished.state.key.prompt_uid == 2
    assert given(output) == {0: [0]}


def test_views_show_the_cap_and_no_more() -> None:
    policy = Fixed()
    open_desk(2, policy=policy)
    seen = policy.seen
    assert [(s.index, s.num_prompt_tokens, s.num_generated, s.max_tokens) for s in seen[-1].entered] == [
        (0, 3, 0, 12),
        (1, 3, 0, 12),
    ]
    with pytest.raises(TypeError):
        seen[-1].waiting[0, 0, 0] = seen[-1].entered[0]  # type: ignore[index]
    with pytest.raises(AttributeError):
        seen[-1].replicas[0].num_assigned = 3  # type: ignore[misc]


def test_stale_and_repeated_events_are_counted_and_change_nothing() -> None:
    desk, states = open_desk(3, num_ranks=1)
    desk.finish(0, states[0])
    assert desk.finish(0, states[0], seq=1) == []
    assert desk.finish(0, states[1], phase=5) == []
    assert desk.finish(0, states[1], epoch=3) == []
    assert desk.finish(0, states[0]) == []
    assert dict(desk.core.ignored) == {
        "repeated": 1,
        "from another phase": 1,
        "from a replica that is gone": 1,
        "about a sequence that is not there": 1,
    }


KV = KVHandle(policy_version=0, dtype="float32", parts=(PART,))


def pause(desk: Desk, replica_id: int, state: SequenceState, seq: int, num_new: int = 2) -> list[Any]:
    state = SequenceState.from_bytes(state.to_bytes())
    state.tokens += expected_tokens(state)[:num_new]
    return desk.hear(m.SequencesPaused, replica_id, acks=seq, works=(Work(state=state, kv=KV),))


def test_a_move_pauses_pins_and_resumes_with_kv() -> None:
    desk, states = open_desk(4, slots=2)  # 0 and 2 on the first replica, 1 and 3 on the second
    command = only(desk.move(0, 1), m.PauseSequences)
    assert (command.replica_id, command.sequence_ids, command.with_kv) == (0, ((0, 0, 0),), True)
    assert not given(pause(desk, 0, states[0], command.seq)), "the first has a free slot, but the sequence is pinned"
    work = only(desk.finish(1, states[1]), m.SubmitWork)
    assert work.replica_id == 1 and work.works[0].kv == KV and work.works[0].state.num_generated == 2


def test_a_move_of_a_sequence_that_ends_first_is_fine() -> None:
    desk, states = open_desk(1)
    command = only(desk.move(0, 1), m.PauseSequences)
    only(desk.finish(0, states[0]), r.Deliver)
    assert desk.hear(m.SequencesPaused, 0, acks=command.seq, works=()) == []
    assert desk.move(0, 1) == []


def test_a_move_keeps_what_is_left_of_the_bound() -> None:
    policy = Fixed(Dispatch(sequence_id=(0, 0, 0), replica_id=0, max_new_tokens=7))
    desk, states = open_desk(1, policy=policy)
    command = only(desk.move(0, 1), m.PauseSequences)
    (work,) = only(pause(desk, 0, states[0], command.seq), m.SubmitWork).works
    assert work.max_new_tokens == 5


def outside_desk(num_states: int) -> tuple[Desk, list[SequenceState]]:
    """Replica 0 in the world with one slot, replica 50 outside with two."""
    desk, states = open_desk(num_states, num_ranks=1, slots=1)
    desk.add(50, ranks=(1,))
    desk.sent = desk.ready(50)  # type: ignore[attr-defined]
    return desk, states


def test_a_lost_replica_s_sequences_go_on_from_what_is_known() -> None:
    desk, states = outside_desk(3)
    assert given(desk.sent) == {50: [1, 2]}
    output = desk.lose(50)
    assert only(output, r.ReplicaDropped).replica_id == 50 and desk.core.num_waiting == 2
    assert desk.finish(50, states[1]) == [], "the dead say nothing"
    (work,) = only(desk.finish(0, states[0]), m.SubmitWork).works
    assert work.state == states[1] and work.kv is None
    with pytest.raises(RuntimeError, match="was used before"):
        desk.add(50, ranks=(1,))


def test_a_loss_keeps_stored_kv_and_forgets_tokens_that_were_only_reported() -> None:
    desk, states = outside_desk(2)
    command = only(desk.move(0, 50), m.PauseSequences)
    assert only(pause(desk, 0, states[0], command.seq), m.SubmitWork).works[0].kv == KV
    desk.report(50, ((0, 0, 0), 4))
    output = desk.lose(50)
    (work,) = only(output, m.SubmitWork).works
    assert work.kv == KV and work.state.num_generated == 2 and not [o for o in output if isinstance(o, r.DiscardKV)]


def test_policies_hear_once_of_each_sequence_that_has_ended() -> None:
    num_ended = 0
    for seed in range(200):
        world = replay(seed)
        if isinstance(policy := world.core._dispatcher._policy, RandomPolicy):
            assert len({one.sequence_id for one in policy.ended}) == len(policy.ended)
            for one in policy.ended:
                if finished := world.delivered.get(one.sequence_id):  # of the last phase
                    assert one.num_generated == finished.completion.num_generated == finished.state.num_generated
                    assert one.num_prompt_tokens == finished.state.num_prompt_tokens
                    assert (one.group_id, one.finish_reason) == (
                        finished.state.group_id,
                        finished.completion.finish_reason,
                    )
                    num_ended += 1
    assert num_ended > 100


def test_a_loss_counts_tokens_from_the_state_again() -> None:
    policy = Fixed(Dispatch(sequence_id=(0, 0, 0), replica_id=0))
    desk, _ = open_desk(2, num_ranks=1, slots=1, policy=policy)
    desk.add(50, ranks=(1,))
    policy.dispatches = [Dispatch(sequence_id=(0, 1, 0), replica_id=50)]
    assert given(desk.ready(50)) == {50: [1]}
    desk.report(50, ((0, 1, 0), 4))
    desk.lose(50)
    assert [(s.sequence_id, s.num_generated) for s in policy.seen[-1].entered] == [((0, 1, 0), 0)]


def test_a_lost_destination_unpins() -> None:
    desk, states = outside_desk(2)
    command = only(desk.move(0, 50), m.PauseSequences)
    desk.lose(50)
    assert given(pause(desk, 0, states[0], command.seq)) == {0: [0]}


def test_a_lost_replica_of_the_world_ends_the_run() -> None:
    desk, _ = open_desk(1, tp=2)
    (failed,) = desk.lose(0)
    assert failed == r.Failed(reason="replica 0 (ranks 0, 1) of the torchrun world is lost: killed")


def test_a_missing_event_is_a_loss() -> None:
    desk, states = outside_desk(2)
    output = desk.finish(50, states[1], seq=2)
    assert only(output, r.ReplicaDropped).reason == "its event 1 is missing, 2 came"


def test_replicas_outside_load_the_phase_s_weights_and_agree_on_them() -> None:
    desk = Desk(Layout(epoch=0, replicas=()))
    desk.add(50, 51)
    desk.ready(50, 51, version=0)
    with pytest.raises(RuntimeError, match="weights_source=None"):
        desk.ask(r.BeginPhase(phase=0, policy_version=3))
    loads = desk.ask(r.BeginPhase(phase=0, policy_version=3, weights_source="folder"))
    assert [(c.replica_id, c.version, c.source) for c in loads] == [(50, 3, "folder"), (51, 3, "folder")]
    assert not given(desk.ask(r.SubmitSequences(states=(make_state(0),))))
    assert given(desk.hear(m.WeightsLoaded, 50, acks=loads[0].seq, version=3, checksum=1)) == {50: [0]}
    output = desk.hear(m.WeightsLoaded, 51, acks=loads[1].seq, version=3, checksum=2)
    assert "checksum 2, not 1" in only(output, r.ReplicaDropped).reason


def test_a_regroup_leaves_unchanged_replicas_alone() -> None:
    desk, states = open_desk(4, num_ranks=3, world_size=4, slots=1)  # rank 3 is idle; sequence 3 waits
    old = desk.core.layout.replicas
    layout = Layout(epoch=1, replicas=(old[0], ReplicaSpec(id=1, ranks=(1, 3))))  # rank 2 becomes idle
    pauses = desk.ask(r.RequestRegroup(layout=layout))
    assert [(type(c), c.replica_id, c.sequence_ids) for c in pauses] == [
        (m.PauseSequences, 1, None),
        (m.PauseSequences, 2, None),
    ]
    assert given(desk.finish(0, states[0])) == {0: [3]}, "the first goes on meanwhile"
    assert pause(desk, 1, states[1], pauses[0].seq) == []
    regroups = pause(desk, 2, states[2], pauses[1].seq)
    assert [(type(c), c.replica_id, c.rank) for c in regroups] == [
        (m.Regroup, 1, 1),
        (m.Regroup, 2, 2),
        (m.Regroup, None, 3),
    ]
    assert desk.core.layout == layout and desk.core.regrouping
    with pytest.raises(RuntimeError, match="under way"):
        desk.ask(r.RequestRegroup(layout=layout))
    assert desk.finish(2, states[2]) == [], "the old replica is gone"
    assert desk.ready(1, epoch=1) == [], "rank 2 has not taken its place yet"
    idle = m.RankIdle(replica_id=None, rank=2, epoch=1, phase=0, seq=0)
    output = desk.core.on_event(idle, 0.0)
    assert only(output, r.RegroupComplete).layout == layout
    assert given(output) == {1: [1, 2]}
    assert all(work.kv == KV for work in only(output, m.SubmitWork).works)


BAD_REQUESTS = [
    (r.RequestRegroup(layout=Layout(epoch=5, replicas=())), "Layout.epoch=5: the next is 1"),
    (r.RequestRegroup(layout=contiguous_layout(range(3), 1, epoch=1)), "use those below 2"),
    (r.RequestMove(sequence_id=(0, 5, 0), replica_id=1), "was not submitted"),
    (r.RequestMove(sequence_id=(0, 0, 0), replica_id=9), "replica_id=9: is no rollout replica"),
    (r.RequestAbort(sequence_ids=((0, 7, 0),)), "was not submitted"),
    (r.RequestEndPhase(), "1 sequences are unfinished"),
    (r.SubmitSequences(states=(make_state(0),)), "is there already"),
    (r.BeginPhase(phase=1, policy_version=1), "open is 0"),
    (r.RequestShutdown(), "phase 0 is open"),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
def test_a_request_that_does_not_fit_is_refused_and_changes_nothing(request_: Any, message: str) -> None:
    desk, states = open_desk(1)
    with pytest.raises(r.RequestRefused, match=message):
        desk.ask(request_)
    assert not desk.core.regrouping and not desk.core.ending and desk.core.phase == 0
    only(desk.finish(0, states[0]), r.Deliver)


def test_the_layout_policy_is_asked_on_reports() -> None:
    class Once:
        def __init__(self) -> None:
            self.views: list[LayoutView] = []

        def decide(self, view: LayoutView) -> LayoutChange | None:
            self.views.append(view)
            self.lengths = {one.sequence_id: one.num_generated for one in view.unfinished.values()}
            if view.num_unfinished != 1:
                return None
            return LayoutChange(layout=nested_layout(range(2), 2, epoch=1), places=dict.fromkeys(view.unfinished, 0))

    policy = Once()
    desk, states = open_desk(2, layout_policy=policy)
    assert desk.report(0) == []
    assert policy.views[-1].num_unfinished == 2
    assert set(policy.lengths) == {state.sequence_id for state in states} and policy.views[-1].ended == ()
    output = desk.finish(0, states[0])
    assert [one.sequence_id for one in policy.views[-1].ended] == [states[0].sequence_id]
    assert [c.replica_id for c in output if isinstance(c, m.PauseSequences)] == [0, 1]
    assert [d.action for d in desk.core.decisions] == ["dispatch", "dispatch", "regroup"]


def test_a_regroup_takes_sequences_to_the_places_that_its_policy_names() -> None:
    class Places:
        def decide(self, view: LayoutView) -> LayoutChange | None:
            ids = sorted(view.unfinished)
            replicas = (ReplicaSpec(id=5, ranks=(0,)), ReplicaSpec(id=6, ranks=(1,)))
            places = {ids[0]: 6, ids[2]: 6, ids[1]: 5}
            return (
                LayoutChange(layout=Layout(epoch=1, replicas=replicas), places=places)
                if not view.layout.epoch
                else None
            )

    class Bounded(OnDemand):
        def next(self, view: ScheduleView) -> Dispatch | None:
            dispatch = super().next(view)
            return None if dispatch is None else replace(dispatch, max_new_tokens=6)

    desk, states = open_desk(4, layout_policy=Places(), policy=Bounded(), slots=2)
    pauses = [c for c in desk.report(0) if isinstance(c, m.PauseSequences)]
    assert {c.replica_id for c in pauses} == {0, 1}
    for command in pauses:
        works = tuple(Work(state=state) for state in states[command.replica_id :: 2])
        desk.hear(m.SequencesPaused, command.replica_id, acks=command.seq, works=works)
    assert not given(desk.ready(5, epoch=1))
    output = desk.ready(6, epoch=1)
    got = given(output)
    assert got == {6: [0, 2], 5: [1, 3]}, "the last one has no place, and goes where there is room"
    assert [work.max_new_tokens for c in output if isinstance(c, m.SubmitWork) for work in c.works] == [6] * 4


def test_replicas_that_go_on_do_not_take_sequences_which_have_a_place() -> None:
    class Partly:
        def decide(self, view: LayoutView) -> LayoutChange | None:
            if view.layout.epoch:
                return None
            layout = Layout(epoch=1, replicas=(view.layout.replicas[0], ReplicaSpec(id=1, ranks=(1, 2))))
            return LayoutChange(layout=layout, places={(0, 1, 0): 1, (0, 2, 0): 0})

    desk, states = open_desk(3, num_ranks=3, layout_policy=Partly(), slots=4)
    pauses = {c.replica_id: c.seq for c in desk.report(0) if isinstance(c, m.PauseSequences)}
    assert pauses.keys() == {1, 2}
    assert given(pause(desk, 1, states[1], pauses[1])) == {}, "replica 0 has room, and is not its place"
    assert given(pause(desk, 2, states[2], pauses[2])) == {0: [2]}
    assert given(desk.ready(1, epoch=1)) == {1: [1]}
    desk.core.check_integrity()


def test_a_pinned_sequence_between_two_chunks_gets_another_chunk() -> None:
    class InChunks(OnDemand):
        def next(self, view: ScheduleView) -> Dispatch | None:
            dispatch = super().next(view)
            return None if dispatch is None else replace(dispatch, max_new_tokens=4)

    desk, states = open_desk(1, policy=InChunks())
    desk.move(0, 1)
    desk.now = 1.0
    tokens = states[0].tokens + expected_tokens(states[0])[:4]
    back = SequenceState.from_bytes(states[0].to_bytes())
    back.tokens, back.logprobs, back.versions = tokens, [0.0] * 4, [0] * 4
    (work,) = only(desk.hear(m.SequencesReleased, 0, works=(Work(state=back),)), m.SubmitWork).works
    assert (work.max_new_tokens, len(work.state.tokens)) == (4, len(tokens)), "no policy has decided on it"


def test_a_replica_that_goes_on_keeps_its_sequences() -> None:
    class Partly:
        def decide(self, view: LayoutView) -> LayoutChange | None:
            if view.layout.epoch:
                return None
            layout = Layout(epoch=1, replicas=(view.layout.replicas[0], ReplicaSpec(id=1, ranks=(1, 2))))
            return LayoutChange(layout=layout, places={(0, 0, 0): 1})

    desk, _ = open_desk(3, num_ranks=3, layout_policy=Partly(), slots=4)
    desk.report(0)
    assert not desk.core._books.find((0, 0, 0), "test").pin, "replica 0 runs it, and goes on"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (nested_layout(range(2), 2, epoch=1), r"Layout\(.*: is no LayoutChange; return one, or None"),
        (LayoutChange(layout=2), r"LayoutChange\(layout=2.*at `\$.layout`; see LayoutChange in"),  # type: ignore[arg-type]
        (LayoutChange(layout=nested_layout(range(2), 2, epoch=1), places=[0]), r"at `\$.places`"),  # type: ignore[arg-type]
        (LayoutChange(layout=Layout(epoch="1", replicas=())), r"at `\$.layout.epoch`"),  # type: ignore[arg-type]
        (LayoutChange(layout=nested_layout(range(2), 2)), r"Layout.epoch=0: the next is 1"),
        (LayoutChange(layout=nested_layout(range(4), 4, epoch=1)), r"has a rank outside the world; use those below 2"),
    ],
)  # fmt: skip
def test_an_invalid_answer_of_a_layout_policy_is_named(answer: Any, message: str) -> None:
    class Wrong:
        def decide(self, view: LayoutView) -> Any:
            return answer

    desk, _ = open_desk(2, layout_policy=Wrong())
    desk.report(0)
    told = str(desk.core.layout_error)
    assert re.search(message, told) and re.match(rf"layout_policy \S*Wrong of {re.escape(__file__)}: decide gave", told)


def test_what_a_policy_raises_names_it() -> None:
    class Careless:
        def next(self, view: ScheduleView) -> Any:
            return max(view.ended)

        def decide(self, view: LayoutView) -> Any:
            return Layout(epoch=1, replicas=(view.layout.replicas[0], replace(view.layout.replicas[0], id=7)))

    desk, _ = open_desk(2, layout_policy=Careless())
    for method, raised, act in (
        ("decide", r"ValueError: Layout.replicas: ranks \[0, 0\] repeat", lambda: desk.report(0)),
        ("next", "ValueError: max()", lambda: open_desk(2, policy=Careless())),
    ):
        with pytest.raises(RuntimeError, match=rf"Careless of {re.escape(__file__)}: {method} raised") as error:
            act()
        assert re.search(raised.replace("()", r"\(\)"), str(error.value)) and isinstance(
            error.value.__cause__, ValueError
        )


def test_places_must_be_replicas_of_the_layout() -> None:
    class Nowhere:
        def decide(self, view: LayoutView) -> LayoutChange | None:
            layout = nested_layout(range(2), 2, epoch=1)
            return LayoutChange(layout=layout, places=dict.fromkeys(view.unfinished, 1))

    desk, _ = open_desk(2, layout_policy=Nowhere())
    desk.report(0)
    assert "LayoutChange.places: [1] are no rollout replicas" in str(desk.core.layout_error)


def test_a_phase_ends_when_all_have_acknowledged() -> None:
    desk, states = open_desk(1, world_size=3)
    desk.finish(0, states[0])
    ends = desk.ask(r.RequestEndPhase())
    assert [(type(c), c.replica_id, c.rank) for c in ends] == [
        (m.EndPhase, 0, 0),
        (m.EndPhase, 1, 1),
        (m.EndPhase, None, 2),
    ]
    with pytest.raises(RuntimeError, match="no phase is open"):
        desk.ask(r.SubmitSequences(states=(make_state(5),)))
    assert desk.hear(m.PhaseEnded, 1, acks=ends[1].seq) == []
    assert desk.hear(m.PhaseEnded, 0, acks=ends[0].seq) == []
    last = m.PhaseEnded(replica_id=None, rank=2, epoch=0, phase=0, seq=0, acks=ends[2].seq)
    assert desk.core.on_event(last, 0.0) == [r.PhaseComplete(phase=0)]
    with pytest.raises(RuntimeError, match="count up"):
        desk.ask(r.BeginPhase(phase=0, policy_version=1))
    shutdowns = desk.ask(r.RequestShutdown())
    assert [(type(c), c.rank) for c in shutdowns] == [(m.Shutdown, rank) for rank in range(3)]


def test_an_aborting_end_delivers_what_there_is() -> None:
    desk, states = open_desk(3, num_ranks=1, slots=1)
    output = desk.ask(r.RequestEndPhase(abort=True))
    waiting = [item.finished.completion for item in output if isinstance(item, r.Deliver)]
    assert [(c.finish_reason, c.token_ids) for c in waiting] == [("abort", []), ("abort", [])]
    command = only(output, m.AbortSequences)
    output = desk.hear(m.SequencesAborted, 0, acks=command.seq, finished=(completion_of(states[0], "abort"),))
    assert [type(item) for item in output] == [r.Deliver, m.EndPhase]


def test_a_sequence_comes_once() -> None:
    desk, states = open_desk(1)
    desk.finish(0, states[0])
    with pytest.raises(RuntimeError, match="is there already"):
        desk.ask(r.SubmitSequences(states=(make_state(0),)))


def test_an_answer_that_is_late_names_who_and_what() -> None:
    desk, _ = open_desk(1, tp=2)
    desk.move(0, None)
    desk.now = 60.0
    assert desk.ask(r.Tick()) == []
    desk.now = 60.1
    (failed,) = desk.ask(r.Tick())
    assert failed.reason == (
        "replica 0 (ranks 0, 1) of the torchrun world is lost: it was waited for to pause sequences, and did not "
        "within 60 s"
    )


def test_silence_with_work_is_a_loss() -> None:
    desk, _ = outside_desk(2)
    desk.now = 50.0
    desk.report(0)
    desk.now = 70.0
    output = desk.ask(r.Tick())
    assert "1 sequences, and reported no step" in only(output, r.ReplicaDropped).reason


def test_nobody_left_to_run_on_fails_after_the_timeout() -> None:
    desk = Desk(Layout(epoch=0, replicas=()))
    desk.add(50)
    desk.ready(50)
    desk.ask(r.BeginPhase(phase=0, policy_version=0))
    desk.ask(r.SubmitSequences(states=(make_state(0),)))
    desk.lose(50)
    desk.now = 61.0
    assert "the launcher was waited for to add a replica" in only(desk.ask(r.Tick()), r.Failed).reason


# --- Replicas of unequal size


def unequal_desk(*num_prompts: int, policy: Any = None) -> Desk:
    """Replica 0 holds 8 tokens, replica 1 holds 100; each has 2 slots. One sequence for each prompt's length."""
    desk = Desk(contiguous_layout(range(2), 1), policy=policy)
    desk.ask(r.BeginPhase(phase=0, policy_version=0, weights_source="somewhere"))
    desk.ready(0, blocks=2)
    desk.ready(1, blocks=25)
    states = tuple(make_state(uid, num_prompt=number) for uid, number in enumerate(num_prompts))
    desk.sent = desk.ask(r.SubmitSequences(states=states))  # type: ignore[attr-defined]
    return desk


def test_on_demand_lets_the_first_wait_and_others_pass_only_where_it_cannot_run() -> None:
    """Sequence 2 waits for the large replica: 3 may pass it on the small one, and 4 and 5, too, but not to there."""
    desk = unequal_desk(20, 20, 20, 3, 3, 3)
    assert given(desk.sent) == {1: [0, 1], 0: [3]}  # type: ignore[attr-defined]
    assert given(desk.finish(1, make_state(0, num_prompt=20))) == {1: [2]}
    assert given(desk.finish(0, make_state(3))) == {0: [4]}
    assert desk.core.num_waiting == 1
    # Although 3 would fit beside 0 on the large replica, it waits: 1, which came before, would not.
    desk = unequal_desk(60, 60, 3, 3)
    assert given(desk.sent) == {1: [0], 0: [2]}  # type: ignore[attr-defined]


def test_static_passes_over_a_replica_that_is_too_small() -> None:
    desk = unequal_desk(8, 3, 9, 9, policy=Static())
    assert given(desk.sent) == {0: [0], 1: [1, 2, 3]}  # type: ignore[attr-defined]


def test_what_outgrows_a_replica_goes_to_a_larger_one_with_its_kv() -> None:
    desk = unequal_desk(3)
    state = make_state(0, num_prompt=9)  # as it is when 8 tokens are full
    state.num_prompt_tokens, state.logprobs, state.versions = 3, [0.0] * 6, [0] * 6
    kv = KVHandle(policy_version=0, dtype="f", parts=(replace(PART, num_tokens=8),))
    sent = desk.hear(m.SequencesReleased, 0, works=(Work(state=state, kv=kv),))
    (work,) = only(sent, m.SubmitWork).works
    assert given(sent) == {1: [0]} and work.kv == kv and work.max_new_tokens is None


@pytest.mark.parametrize("queued", [False, True])
def test_a_dispatch_to_a_replica_that_is_too_small_names_the_policy(queued: bool) -> None:
    class TooSmall:
        def next(self, view: ScheduleView) -> Dispatch | None:
            return Dispatch(sequence_id=(0, 0, 0), replica_id=0, queued=queued)

    told = r"TooSmall of .*: the sequence has 9 tokens, and the KV cache of replica 0 \(rank 0\) holds 8"
    with pytest.raises(RuntimeError, match=told):
        unequal_desk(9, policy=TooSmall())


def test_a_move_to_a_replica_that_is_too_small_is_refused() -> None:
    desk = unequal_desk(9)
    with pytest.raises(r.RequestRefused, match="the sequence has 9 tokens, and the KV cache of replica 0"):
        desk.move(0, 0)
    assert only(desk.move(0, None), m.PauseSequences).replica_id == 1


def test_a_sequence_that_has_outgrown_its_next_replica_goes_elsewhere() -> None:
    """It is known with 3 tokens when it is moved, and comes back with 9; so do places of a regroup."""
    desk = unequal_desk(3, 3)
    assert given(desk.sent) == {0: [0], 1: [1]}  # type: ignore[attr-defined]
    pause = only(desk.move(1, 0), m.PauseSequences)
    grown = make_state(1, num_prompt=9)
    grown.num_prompt_tokens, grown.logprobs, grown.versions = 3, [0.0] * 6, [0] * 6
    sent = desk.hear(m.SequencesPaused, 1, acks=pause.seq, works=(Work(state=grown),))
    assert given(sent) == {1: [1]}
    desk.core.check_integrity()

    layout = contiguous_layout(range(2), 1, epoch=1)
    layout = replace(layout, replicas=tuple(replace(spec, id=spec.id + 5) for spec in layout.replicas))
    pauses = desk.ask(r.RequestRegroup(layout=layout, places={(0, 1, 0): 5}))
    works = {0: (Work(state=make_state(0)),), 1: (Work(state=grown),)}
    for one in pauses:
        desk.hear(m.SequencesPaused, one.replica_id, acks=one.seq, works=works[one.replica_id])
    desk.ready(5, epoch=1, blocks=2)
    assert given(desk.ready(6, epoch=1, blocks=25)) == {5: [0], 6: [1]}
    desk.core.check_integrity()


# --- Messages

ENVELOPE: dict[str, Any] = {"replica_id": 1, "rank": 2, "phase": 3, "epoch": 4, "seq": 5}
WORK = Work(
    state=make_state(3),
    max_new_tokens=5,
    kv=KVHandle(policy_version=1, dtype="bfloat16", parts=(PART,)),
)


STEP = {"num_running": 1, "num_waiting": 2, "num_free_blocks": 3, "seconds": 0.5, "progress": (((0, 1, 2), 7),)}
COMMANDS = [
    m.SubmitWork(**ENVELOPE, works=(WORK,)),
    m.PauseSequences(**ENVELOPE, sequence_ids=((0, 1, 2),), with_kv=True),
    m.AbortSequences(**ENVELOPE, sequence_ids=((0, 1, 2),)),
    m.Regroup(**ENVELOPE, layout=nested_layout(range(4), 2), before=nested_layout(range(4), 1)),
    m.LoadWeights(**ENVELOPE, version=2, source="folder"),
    m.EndPhase(**ENVELOPE),
    m.Shutdown(**ENVELOPE),
]
EVENTS = [
    m.StepReported(**ENVELOPE, **STEP),
    m.SequencesFinished(**ENVELOPE, finished=(completion_of(make_state(1), "stop"),)),
    m.SequencesPaused(**ENVELOPE, acks=8, works=(WORK,)),
    m.WeightsLoaded(**ENVELOPE, acks=8, version=2, checksum=2**64 - 1),
    m.RankIdle(**{**ENVELOPE, "replica_id": None}),
]


@pytest.mark.parametrize("message", [*COMMANDS, *EVENTS])
def test_messages_survive_the_wire(message: Any) -> None:
    mine, other = (decode_event, decode_command) if message in EVENTS else (decode_command, decode_event)
    assert mine(encode(message)) == message
    with pytest.raises(ProtocolError, match=f"Invalid value '{type(message).__name__}'"):
        other(encode(message))


def test_bytes_that_are_no_message_are_refused() -> None:
    data = encode(m.EndPhase(**ENVELOPE))
    bad = {
        b"": "0 bytes are not a message",
        data[:-1]: "are not a message",
        data.replace(b"epoch", b"epock"): "unknown field `epock`",
        data.replace(b"EndPhase", b"EndPhasy"): "Invalid value 'EndPhasy'",
        encode(m.Regroup(**ENVELOPE, layout=nested_layout([0, 1], 2), before=nested_layout([0, 1], 1))).replace(
            b"\x92\x00\x01", b"\x92\x01\x01"
        ): "repeat",
    }
    for data, message in bad.items():
        with pytest.raises(ProtocolError, match=message):
            decode_command(data)
