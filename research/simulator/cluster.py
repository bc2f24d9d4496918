"""A rollout on many GPUs in virtual time, decided by the objects that decide in a live one. Torch-free.

`RolloutCore`, the policies, `WorkerCore`, `Replica`, `Scheduler` and `BlockManager` are the live ones. Simulated are
passes and KV (`runner.py`), the time that they take (`pace.py`), messages, which arrive some time after being sent, and
tools, which answer the turns of trajectories after their time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from random import Random

from engines.config import EngineConfig
from engines.constraints import Count, Fraction, NonNegative, WholeNumber, check_fields
from engines.control import messages
from engines.coordination.core import RolloutCore
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.coordination.requests import (
    AddReplica,
    AnswerTurns,
    BeginPhase,
    Deliver,
    DiscardKV,
    Failed,
    PhaseComplete,
    ReplicaDropped,
    Request,
    RequestEndPhase,
    SubmitSequences,
    Tick,
    TurnEnded,
)
from engines.coordination.views import Decision
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.cost import SwapCost
from engines.kvcache.kept import KeptKV, arrivals
from engines.parallel.layout import Layout, ReplicaSpec, drafters_of, joint_groups, share_lacked
from engines.replica.endings import Endings
from engines.replica.replica import Replica, StepOutput
from engines.replica.scheduler import Scheduler
from engines.rollout.pace import Pace, prices_of
from engines.rollout.prediction import LengthPredictor
from engines.rollout.telemetry import StepRecord, TurnSpan, turn_spans
from engines.rollout.turns import Turns
from engines.rollout.worker_core import REPORT_EVERY_S
from engines.sequence import Finished, SequenceId, SequenceState
from engines.speculation.drafter import Drafter, DraftPass
from engines.speculation.marginal_gain import MarginalGain, check_draft_policy
from engines.speculation.policy import AdaptedDrafter, DraftPolicy, elsewhere
from engines.speculation.remote import Link, RemoteDrafter
from research.simulator.draft_ranks import DraftingRank
from research.simulator.drafts import DraftAcceptance, References, SimulatedDrafter
from research.simulator.events import STEP_END, TO_CORE, TO_WORKER, EventQueue
from research.simulator.rank import Rank
from research.simulator.runner import OBSERVED, VOCAB_SIZE, KVPool, SimulatedMover, SimulatedRunner
from research.simulator.serving import Served, ServingRank, ServingSetup
from research.workloads.trajectories import Later, TimedTools, Turn, turn_has_ended


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds that a live run spends beside steps and transfers: inputs, see docs/simulator.md."""

    message_s: NonNegative = 0.0
    """From the sending of a message to the moment in which its receiver, if idle, acts on it."""
    gap_s: NonNegative = 0.0
    """From the end of a step to the start of the replica's next one."""
    jitter: Fraction = 0.0
    """Most by which each single one of these differs from its mean, as a share of the mean."""
    seed: int = 0
    """Of the jitter. In a real cluster, too, milliseconds decide where a waiting sequence finds room first."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class OutsideReplica:
    """A replica of one rank outside the layout. Times are virtual seconds from the start of the rollout."""

    join_s: NonNegative = 0.0
    """When it is ready, with the weights of the rollout."""
    death_s: NonNegative | None = None
    """When it ends without a word."""
    detection_s: NonNegative = 0.02
    """From its end until the coordinator notices it; a live one polls every 0.02 s."""
    serving: ServingSetup | None = None
    """What it serves beside the rollout, from time 0 on."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.death_s is not None and self.death_s < self.join_s:
            raise ValueError(f"OutsideReplica.death_s={self.death_s}: is before join_s={self.join_s}; give a later one")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The cluster and the engine that are simulated."""

    layout: Layout
    engine: EngineConfig
    pace: Pace
    num_kv_tokens: Mapping[int, int]
    """Tokens that a replica's KV cache holds, by its TP size."""
    max_model_len: int
    overheads: Overheads = Overheads()
    gpus_per_host: Count | None = None
    """Ranks of a host, which are neighbours; None: all ranks are on one host."""
    pool_tokens: WholeNumber = 2**62
    """Tokens of KV that the memory of each host keeps for sequences that move or are preempted."""
    swap_cost: Mapping[int, SwapCost] = field(default_factory=dict)
    """By TP size, for `preemption="auto"`; where there is none, preempted sequences are recomputed."""
    drafts: DraftAcceptance | None = None
    """How often drafts are right. They are those of `EngineConfig.drafter="grouped_suffix"`, which it is given with."""
    own_drafter: Callable[[], Drafter] | None = None
    """As `LLM` has it, with `EngineConfig.drafter="own"`: one that knows simulated tokens, such as a `StatedDrafter`
    of `simulated_token`. Draft ranks need it."""
    draft_policy: DraftPolicy = MarginalGain
    """As `LLM` has it; it decides by the pace."""
    outside: tuple[OutsideReplica, ...] = ()
    """Their ids and ranks follow the ranks of the layout."""
    timeout_s: float = 60.0
    records_steps: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        drafter = "none" if self.drafts is None else "grouped_suffix"
        drafter = drafter if self.own_drafter is None else "own"
        if self.engine.drafter != drafter or self.engine.draft_paths > 1 or (drafter == "own" and self.drafts):
            raise ValueError(
                f"ClusterConfig.drafts={self.drafts}, own_drafter={self.own_drafter}: with drafter="
                f"{self.engine.drafter!r} and draft_paths={self.engine.draft_paths}; give drafts with 'grouped_suffix' "
                f"and 1 path, own_drafter with 'own', or neither with 'none'"
            )
        if drafter != "own" and any(spec.role == "draft" for spec in self.layout.replicas):
            raise ValueError(
                f"layout: a replica has role='draft', and EngineConfig.drafter={self.engine.drafter!r}; simulated "
                f"draft ranks need drafter='own'"
            )
        if drafter == "own" and self.layout.replicas:
            self.pace.draft(self.layout.replicas[0], self.engine.draft_method, [DraftPass(1)])  # raises, if it cannot
        check_draft_policy(self.engine, self.draft_policy)

    def num_blocks(self, spec: ReplicaSpec) -> int:
        return self.num_kv_tokens.get(spec.tp_size, 0) // self.engine.block_size

    def longest(self, layout: Layout) -> int:
        """Returns the tokens that the largest rollout replica holds; without any, those of a replica outside."""
        specs = [spec for spec in layout.replicas if spec.role == "rollout"] or [ReplicaSpec(id=0, ranks=(0,))]
        return max(map(self.num_blocks, specs)) * self.engine.block_size

    def host_of(self, spec: ReplicaSpec) -> int:
        """Raises ValueError for a replica whose ranks are on two hosts."""
        hosts = {0 if self.gpus_per_host is None else rank // self.gpus_per_host for rank in spec.ranks}
        if len(hosts) > 1:
            raise ValueError(
                f"layout: replica {spec.id} has ranks on {len(hosts)} hosts of gpus_per_host={self.gpus_per_host}; "
                f"give replicas whose ranks are on one"
            )
        return hosts.pop()


@dataclass(frozen=True, kw_only=True)
class SimulatedRollout:
    """The result of a simulated rollout."""

    finish_times: dict[SequenceId, float]
    """Virtual seconds to each sequence's end, in the order of the ends. All times count from the rollout's start."""
    steps: list[StepRecord]
    decisions: list[Decision]
    num_preempted: int
    lengths: dict[SequenceId, int]
    """Tokens that each sequence has generated."""
    turns: list[TurnSpan]
    """Where its trajectories were."""
    served: list[Served]
    """What the ranks did that serve."""

    @property
    def makespan(self) -> float:
        return max(self.finish_times.values())


class Cluster:
    """Ranks, and the coordinator's core. One rollout."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        schedule_policy: SchedulePolicy,
        lengths: Mapping[SequenceId, int],
        turns: Mapping[SequenceId, Items[Turn]] | None = None,
        layout_policy: LayoutPolicy | None = None,
        predictor: Callable[[Later], LengthPredictor] | None = None,
    ) -> None:
        """`lengths` are the tokens that each sequence will generate, `turns` those of trajectories, turn by turn: the
        policies do not see them. `predictor` makes one that answers through a function that calls another one later.

        Raises ValueError for a layout with a replica for whose TP size `config` has no KV cache.
        """
        self.config = config
        self.lengths = lengths
        self.turns = turns or {}
        # Ranks take their places before time 0, at which a rollout begins: long enough that a first step is reported.
        before = [one.serving.arrivals[0].time_s for one in config.outside if one.serving and one.serving.arrivals]
        self.queue = EventQueue(now=min([0.0, *before]) - REPORT_EVERY_S - 2 * config.overheads.message_s)
        self._random = Random(config.overheads.seed)
        self._arrivals: dict[tuple[int, ...], float] = {}
        """When the last message of each way arrives: the next one does not overtake it."""
        self.pool = KVPool(capacity_tokens=config.pool_tokens)
        self._references = References(self._has_ended)
        """What all replicas know of each other's sequences, with a draft server."""
        self.desks: dict[int, DraftingRank] = {}
        """The drafters of ranks that only draft now."""
        self._steps: list[StepRecord] = []
        num_ranks = 1 + max((rank for spec in config.layout.replicas for rank in spec.ranks), default=-1)

        def check(layout: Layout, longest: int = 0) -> None:
            for spec in layout.replicas:
                config.host_of(spec)
                if not config.num_blocks(spec):
                    raise ValueError(
                        f"layout: replica {spec.id} of {spec.tp_size} GPUs has no room for weights and a block of KV; "
                        f"give replicas of {sorted(config.num_kv_tokens)}"
                    )
            longest = min(longest, config.max_model_len)
            if longest > (held := config.longest(layout)):
                raise ValueError(
                    f"layout: its largest replica holds KV of {held} tokens, and an unfinished sequence may reach "
                    f"{longest}; give a larger replica"
                )

        specs = [ReplicaSpec(id=rank, ranks=(rank,)) for rank in range(num_ranks, num_ranks + len(config.outside))]
        check(config.layout)
        size, others = config.engine.block_size, () if layout_policy is None else config.num_kv_tokens.values()
        self._max_kv_tokens = min([config.longest(config.layout), *(count // size * size for count in others)])
        """The longest sequence that the largest replica holds in each layout that the rollout may have."""
        check(Layout(epoch=0, replicas=tuple(specs)))
        self._outside = dict(zip(specs, config.outside, strict=True))
        self.core = RolloutCore(
            layout=config.layout,
            world_size=num_ranks,
            schedule_policy=schedule_policy,
            layout_policy=layout_policy,
            check_layout=lambda _, after, longest: check(after, longest),
            keeps_kv=lambda *_: True,
            timeout_s=config.timeout_s,
        )
        self._calls = Turns(
            TimedTools(self.turns, self._later),
            columns={},
            encode=lambda _, answer, __: [OBSERVED] * len(answer.text or ""),
            endings=Endings(eos_token_ids=(), detokenize=None),
            max_model_len=config.max_model_len,
            predictor=None if predictor is None else predictor(self._later),
        )
        self._calls.wake = self._wake
        self._layout = config.layout
        self._unplaced: set[int] = set()
        """Ranks that have left a replica and wait for the others with which they exchange weights and KV."""
        self._kept: dict[SequenceId, KeptKV] = {}
        """What is in the caches of these ranks."""
        self._num_ranks = num_ranks
        self._serving = {
            rank: ServingRank(self, rank, one.serving)
            for rank, one in enumerate(config.outside, num_ranks)
            if one.serving is not None
        }
        ranks = range(num_ranks + len(config.outside))
        self._ranks = [self._serving.get(rank) or Rank(self, rank) for rank in ranks]
        self._finish_times: dict[SequenceId, float] = {}
        self._lengths_of_ended: dict[SequenceId, int] = {}
        self.is_complete = False
        self._is_submitted = False
        self._is_awake = False
        """Whether answers of tools will be taken now."""
        self._num_preempted = 0

    def check_integrity(self) -> None:
        """Asserts that sequences, blocks and stored KV add up; linear in their number."""
        self.core.check_integrity()
        self.pool.check_integrity()
        for rank in self._ranks:
            rank.check_integrity()

    def roll_out(
        self, states: Iterable[SequenceState], on_finished: Callable[[Finished], object] = lambda _: None
    ) -> SimulatedRollout:
        """Completes the sequences; each state is cut back to its prompt when it ends, after `on_finished`.

        Raises RuntimeError, as a live rollout does, when the core fails, and ValueError for an invalid layout of the
        layout policy.
        """
        for serving in self._serving.values():
            serving.open()
        self.queue.run_until(-REPORT_EVERY_S - 2 * self.config.overheads.message_s)
        for spec in self._layout.replicas:
            self._form(spec, self._layout.epoch)
        for rank in self._ranks[: self._num_ranks]:
            if self._layout.replica_of(rank.number) is None:
                rank.take_place(None, self._layout.epoch)
        self.queue.run_until(0.0)  # all replicas stand by before a rollout begins, as in a live world
        for serving in self._serving.values():
            serving.count_anew()
        self._take(BeginPhase(phase=0, policy_version=0))
        self._is_submitted = True
        self._on_finished = on_finished
        for spec, outside in self._outside.items():
            self._schedule(spec, outside)
        states = tuple(states)
        self._take(SubmitSequences(states=states))
        for state in states:
            if state.in_turns:
                self._calls.begin(state)
        while not self.is_complete:
            if not self.queue.run_next():
                # Nothing will happen any more but that deadlines pass.
                self.queue.at(self.queue.now + self.config.timeout_s + 1, (TO_CORE,), self.check_deadlines)
        while any(serving.has_requests for serving in self._serving.values()):
            self.queue.run_next()
        if self.core.layout_error is not None:
            raise ValueError(self.core.layout_error)
        return SimulatedRollout(
            finish_times=self._finish_times,
            steps=self._steps,
            decisions=list(self.core.decisions),
            num_preempted=self._num_preempted,
            lengths=self._lengths_of_ended,
            turns=turn_spans(self.core.passages, waits=self.core.waits),
            served=[serving.served for serving in self._serving.values()],
        )

    def _schedule(self, spec: ReplicaSpec, outside: OutsideReplica) -> None:
        rank = self._ranks[spec.id]
        lost = messages.ReplicaLost(
            replica_id=spec.id, rank=rank.number, phase=-1, epoch=0, seq=0, reason="its process ended"
        )

        def join() -> None:
            self._take(AddReplica(spec=spec))
            rank.take_place(spec, 0)

        self.queue.at(outside.join_s, (TO_CORE, rank.number), join)
        if outside.death_s is not None:
            self.queue.at(outside.death_s, (TO_WORKER, rank.number), rank.die)
            self.queue.at(outside.death_s + outside.detection_s, (TO_CORE, rank.number), lambda: self._take(lost))

    def check_deadlines(self) -> None:
        self._take(Tick())

    def send_event(self, event: messages.Event, delay_s: float = 0.0) -> None:
        self.at_arrival((TO_CORE, event.rank), delay_s, lambda: self._take(event))

    def _take(self, event: Request | messages.Event) -> None:
        for output in self.core.on_event(event, self.queue.now):
            match output:
                case Deliver() if output.finished.state.in_turns:
                    self._calls.end(output.finished)
                case Deliver():
                    self._deliver(output.finished)
                case TurnEnded():
                    self._calls.step(output.state, output.text)
                case DiscardKV():
                    self.pool.drop(output.kv.parts)
                case ReplicaDropped():
                    self._ranks[output.replica_id].die()
                case PhaseComplete():
                    self.is_complete = True
                case Failed():
                    raise RuntimeError(f"simulated rollout, at {self.queue.now:g} s: {output.reason}")
                case _ if isinstance(output, messages.Command):
                    self._send(output)
        self._end_if_done()

    def _end_if_done(self) -> None:
        num_left = self.core.num_unfinished + self._calls.num_open
        if self._is_submitted and not num_left and not self.core.regrouping:
            self._is_submitted = False
            self._take(RequestEndPhase())

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self.queue.at(self.queue.now + seconds, (TO_CORE,), act)

    def _wake(self) -> None:
        """Takes, after all else that is at this time, what tools have answered."""
        if not self._is_awake:
            self._is_awake = True
            self.queue.at(self.queue.now, (TO_CORE,), self._take_answers)

    def _take_answers(self) -> None:
        self._is_awake = False
        if predictions := self._calls.take_predictions():
            self._take(predictions)
        for finished in self._calls.take_finished():
            self._deliver(finished)
        if answers := self._calls.take(is_running=True):
            self._take(AnswerTurns(answers=answers))
        self._end_if_done()

    def _send(self, command: messages.Command) -> None:
        rank = self._ranks[command.rank]
        if command.rank >= self._num_ranks:  # a copy, as in a live run: what it generates is lost with it
            command = messages.decode_command(messages.encode(command))
        self.at_arrival((TO_WORKER, command.rank), 0.0, lambda: rank.hear(command))

    def at_arrival(self, way: tuple[int, ...], delay_s: float, action: Callable[[], None]) -> None:
        """Does this when a message arrives that leaves after a delay. Of one way, none overtakes another."""
        time = self.queue.now + delay_s + self.vary(self.config.overheads.message_s)
        self._arrivals[way] = time = max(time, self._arrivals.get(way, time))
        self.queue.at(time, way, action)

    def vary(self, seconds: float) -> float:
        """A time that jitters around this mean."""
        jitter = self.config.overheads.jitter
        return seconds * (1 + jitter * (2 * self._random.random() - 1)) if jitter else seconds

    def _deliver(self, finished: Finished) -> None:
        self._finish_times[finished.state.sequence_id] = self.queue.now
        self._lengths_of_ended[finished.state.sequence_id] = finished.state.num_generated
        self._on_finished(finished)
        finished.state.cut(finished.state.num_prompt_tokens)  # so that memory is in proportion to what runs

    def record(self, spec: ReplicaSpec, epoch: int, start: float, seconds: float, output: StepOutput) -> None:
        self._num_preempted += output.num_preempted
        if self.config.records_steps:
            self._steps.append(StepRecord.of(spec, epoch, start, seconds, output, seconds))

    # -- places

    def drafters_of(self, spec: ReplicaSpec) -> tuple[int, ...]:
        """See `engines.parallel.layout.drafters_of`."""
        return drafters_of(self._layout, spec)

    def replica(
        self, spec: ReplicaSpec, contents: Iterable[bytes], links: Items[Link]
    ) -> tuple[Replica, SimulatedMover]:
        """A live replica with a runner and a mover that only count, and these contents in its cache; and this mover.
        `links`: to the ranks that draft for it."""
        blocks = BlockManager(self.config.num_blocks(spec), self.config.engine.block_size)
        blocks.adopt(list(contents))
        return self.replica_on(spec, self.config.engine, blocks, self._drafter(spec, links))

    def replica_on(
        self, spec: ReplicaSpec, engine: EngineConfig, blocks: BlockManager, drafter: Drafter | None = None
    ) -> tuple[Replica, SimulatedMover]:
        """The same with these blocks."""
        config = self.config
        swap_cost = config.swap_cost.get(spec.tp_size)
        mover = SimulatedMover(
            self.pool,
            engine.preemption,
            swap_cost,
            config.host_of(spec),
            now=lambda: self.queue.now,
            transfer_s=partial(config.pace.transfer, spec),
        )
        replica = Replica(
            runner=SimulatedRunner(),
            scheduler=Scheduler(engine, blocks),
            mover=mover,
            max_model_len=config.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            detokenize=None,
            hidden_stop=self._stops,
            max_kv_tokens=self._max_kv_tokens,
            drafter=drafter,
        )
        return replica, mover

    def _stops(self, state: SequenceState) -> bool:
        turns = self.turns.get(state.sequence_id)
        return self._has_ended(state) if turns is None else turn_has_ended(state, turns)

    def _has_ended(self, state: SequenceState) -> bool:
        return state.num_generated >= self.lengths[state.sequence_id]

    def _drafter(self, spec: ReplicaSpec, links: Items[Link]) -> Drafter | None:
        config, engine = self.config, self.config.engine
        drafter: Drafter
        prices = prices_of(config.pace, spec, engine)
        if spec.role == "draft":
            return None
        if links:
            window, mode = engine.max_draft_tokens, engine.draft_mode
            drafter = RemoteDrafter(links, mode, window=window, clock=lambda: self.queue.now)
            prices = prices._replace(draft=elsewhere)
        elif config.own_drafter is not None:
            drafter = config.own_drafter()
        elif config.drafts is not None:
            seen = self._references if engine.draft_server else References(self._has_ended)
            drafter = SimulatedDrafter(config.drafts, seen)
        else:
            return None
        return drafter if engine.draft_lengths == "fixed" else AdaptedDrafter(drafter, config.draft_policy(prices))

    def regroup(self, command: messages.Regroup, ranks: Iterable[int], kept: dict[SequenceId, KeptKV]) -> None:
        """These ranks have left their replica, or were idle; `kept` is in their caches. Ranks that exchange weights and
        KV form their next replicas when all of them have left."""
        before, after = command.before, command.layout
        self._layout = after
        self._unplaced |= set(ranks)
        for rank in ranks:
            self.desks.pop(rank, None)
        self._kept |= kept
        groups = joint_groups(before, after)
        for group in groups:
            if set(group) <= self._unplaced:
                self._unplaced -= set(group)
                self._form_all([spec for spec in after.replicas if spec.ranks[0] in group], command)
                for rank in group:
                    if after.replica_of(rank) is None:
                        self._ranks[rank].take_place(None, after.epoch)
        for rank in sorted(self._unplaced.difference(*groups)):
            self._unplaced.discard(rank)
            self._ranks[rank].take_place(None, after.epoch)

    def _form_all(self, specs: list[ReplicaSpec], command: messages.Regroup) -> None:
        """Forms these replicas, after the time of the switch, with the KV that the command sends there."""
        places = {id_: to for id_, to in command.places if any(spec.id == to for spec in specs)}
        arriving = arrivals(self._kept, places, {spec.id: self.config.num_blocks(spec) for spec in specs})
        for id_ in places:
            self._kept.pop(id_, None)
        old = {spec.id: spec for spec in command.before.replicas}
        for spec in specs:
            counts = Counter(replica_id for replica_id, _ in arriving[spec.id].values())
            num_blocks = max(
                sum(count * share_lacked(old[id_], spec, rank) for id_, count in counts.items()) for rank in spec.ranks
            )
            num_tokens = round(num_blocks * self.config.engine.block_size)
            seconds = self.config.pace.switch(command.before, command.layout, num_tokens)
            form = partial(self._form, spec, command.layout.epoch, list(arriving[spec.id]))
            self.queue.at(self.queue.now + seconds, (STEP_END, spec.ranks[0]), form)

    def _form(self, spec: ReplicaSpec, epoch: int, contents: Iterable[bytes] = ()) -> None:
        if spec.role == "draft" and self.config.own_drafter is not None:
            self.desks |= {rank: DraftingRank(self, spec, rank, self.config.own_drafter()) for rank in spec.ranks}
        self._ranks[spec.ranks[0]].take_place(spec, epoch, contents)
