"""A rollout on many GPUs in virtual time, decided by the objects that decide in a live one. Torch-free.

`RolloutCore`, the policies, `WorkerCore`, `Replica`, `Scheduler` and `BlockManager` are the live ones. Simulated are
passes and KV (`runner.py`), the time that they take (`pace.py`), and messages, which arrive some time after being sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
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
)
from engines.coordination.views import Decision
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.cost import SwapCost
from engines.parallel.layout import Layout, ReplicaSpec
from engines.replica.replica import Replica, StepOutput
from engines.replica.scheduler import Scheduler
from engines.rollout.pace import Pace, row_seconds
from engines.rollout.telemetry import StepRecord
from engines.rollout.worker_core import REPORT_EVERY_S, WorkerCore
from engines.sequence import Finished, SequenceId, SequenceState
from engines.speculation.drafter import Drafter
from engines.speculation.policy import AdaptedDrafter, DraftPolicy
from research.simulator.drafts import DraftAcceptance, References, SimulatedDrafter
from research.simulator.events import EventQueue
from research.simulator.runner import VOCAB_SIZE, KVPool, SimulatedMover, SimulatedRunner

# Of what happens at one time: first messages reach workers, then the coordinator, then steps end, then steps begin.
_TO_WORKER, _TO_CORE, _STEP_END, _TURN = range(4)


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
    disk_tokens: WholeNumber = 0
    """Tokens of KV that the disk of each host keeps, where its memory is full."""
    swap_cost: Mapping[int, SwapCost] = field(default_factory=dict)
    """By TP size, for `preemption="auto"`; where there is none, preempted sequences are recomputed."""
    drafts: DraftAcceptance | None = None
    """How often drafts are right. They are those of `EngineConfig.drafter="grouped_suffix"`, which it is given with."""
    draft_policy: DraftPolicy | None = None
    """As `LLM` has it; it decides by the pace."""
    outside: tuple[OutsideReplica, ...] = ()
    """Their ids and ranks follow the ranks of the layout."""
    timeout_s: float = 60.0
    records_steps: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        drafter = "none" if self.drafts is None else "grouped_suffix"
        if self.engine.drafter != drafter or self.engine.draft_paths > 1:
            raise ValueError(
                f"ClusterConfig.drafts={self.drafts}: with drafter={self.engine.drafter!r} and draft_paths="
                f"{self.engine.draft_paths}; give drafts with 'grouped_suffix' and 1 path, or neither with 'none'"
            )

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
        layout_policy: LayoutPolicy | None = None,
    ) -> None:
        """`lengths` are the tokens that each sequence will generate: the policies do not see them.

        Raises ValueError for a layout with a replica for whose TP size `config` has no KV cache.
        """
        self.config = config
        self.lengths = lengths
        # Ranks take their places before time 0, at which a rollout begins: long enough that a first step is reported.
        self.queue = EventQueue(now=-REPORT_EVERY_S - 2 * config.overheads.message_s)
        self._random = Random(config.overheads.seed)
        self._arrivals: dict[tuple[int, ...], float] = {}
        """When the last message of each way arrives: the next one does not overtake it."""
        self.pool = KVPool(memory_tokens=config.pool_tokens, disk_tokens=config.disk_tokens)
        self._references = References(self._has_ended)
        """What all replicas know of each other's sequences, with a draft server."""
        self._steps: list[StepRecord] = []
        num_ranks = 1 + max((rank for spec in config.layout.replicas for rank in spec.ranks), default=-1)

        def check(layout: Layout) -> None:
            for spec in layout.replicas:
                config.host_of(spec)
                if config.num_kv_tokens.get(spec.tp_size, 0) < config.engine.block_size:
                    raise ValueError(
                        f"layout: replica {spec.id} of {spec.tp_size} GPUs has no room for weights and a block of KV; "
                        f"give replicas of {sorted(config.num_kv_tokens)}"
                    )

        specs = [ReplicaSpec(id=rank, ranks=(rank,)) for rank in range(num_ranks, num_ranks + len(config.outside))]
        check(config.layout)
        check(Layout(epoch=0, replicas=tuple(specs)))
        self._outside = dict(zip(specs, config.outside, strict=True))
        self.core = RolloutCore(
            layout=config.layout,
            world_size=num_ranks,
            schedule_policy=schedule_policy,
            layout_policy=layout_policy,
            check_layout=check,
            timeout_s=config.timeout_s,
        )
        self._layout = config.layout
        self._old: set[ReplicaSpec] = set()
        self._switch_s = 0.0
        """Of the regroup to `_layout`, from `_old`."""
        self._unplaced: set[int] = set()
        """Ranks that have left a replica and wait for the others of their next one."""
        self._num_ranks = num_ranks
        self._ranks = [_Rank(self, rank) for rank in range(num_ranks + len(config.outside))]
        self._finish_times: dict[SequenceId, float] = {}
        self._lengths_of_ended: dict[SequenceId, int] = {}
        self._is_complete = False
        self._is_submitted = False
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
        for spec in self._layout.replicas:
            self._form(spec, self._layout.epoch)
        for rank in self._ranks[: self._num_ranks]:
            if self._layout.replica_of(rank.number) is None:
                rank.take_place(None, self._layout.epoch)
        while self.queue.run_next():
            pass  # all replicas stand by before a rollout begins, as in a live world
        self.queue.now = 0.0
        self._take(BeginPhase(phase=0, policy_version=0))
        self._is_submitted = True
        self._on_finished = on_finished
        for spec, outside in self._outside.items():
            self._schedule(spec, outside)
        self._take(SubmitSequences(states=tuple(states)))
        while not self._is_complete:
            if not self.queue.run_next():
                # Nothing will happen any more but that deadlines pass.
                self.queue.at(self.queue.now + self.config.timeout_s + 1, (_TO_CORE,), lambda: self._take(Tick()))
        if self.core.layout_error is not None:
            raise ValueError(self.core.layout_error)
        return SimulatedRollout(
            finish_times=self._finish_times,
            steps=self._steps,
            decisions=list(self.core.decisions),
            num_preempted=self._num_preempted,
            lengths=self._lengths_of_ended,
        )

    def _schedule(self, spec: ReplicaSpec, outside: OutsideReplica) -> None:
        rank = self._ranks[spec.id]
        lost = messages.ReplicaLost(
            replica_id=spec.id, rank=rank.number, phase=-1, epoch=0, seq=0, reason="its process ended"
        )

        def join() -> None:
            self._take(AddReplica(spec=spec))
            rank.take_place(spec, 0)

        self.queue.at(outside.join_s, (_TO_CORE, rank.number), join)
        if outside.death_s is not None:
            self.queue.at(outside.death_s, (_TO_WORKER, rank.number), rank.die)
            self.queue.at(outside.death_s + outside.detection_s, (_TO_CORE, rank.number), lambda: self._take(lost))

    def send_event(self, event: messages.Event, delay_s: float = 0.0) -> None:
        self._at_arrival((_TO_CORE, event.rank), delay_s, lambda: self._take(event))

    def _take(self, event: Request | messages.Event) -> None:
        for output in self.core.on_event(event, self.queue.now):
            match output:
                case Deliver():
                    self._deliver(output.finished)
                case DiscardKV():
                    self.pool.drop(output.kv)
                case ReplicaDropped():
                    self._ranks[output.replica_id].die()
                case PhaseComplete():
                    self._is_complete = True
                case Failed():
                    raise RuntimeError(f"simulated rollout, at {self.queue.now:g} s: {output.reason}")
                case _ if isinstance(output, messages.Command):
                    self._send(output)
        if self._is_submitted and not self.core.num_unfinished and not self.core.regrouping:
            self._is_submitted = False
            self._take(RequestEndPhase())

    def _send(self, command: messages.Command) -> None:
        rank = self._ranks[command.rank]
        if command.rank >= self._num_ranks:  # a copy, as in a live run: what it generates is lost with it
            command = messages.decode_command(messages.encode(command))
        self._at_arrival((_TO_WORKER, command.rank), 0.0, lambda: rank.hear(command))

    def _at_arrival(self, way: tuple[int, ...], delay_s: float, action: Callable[[], None]) -> None:
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
            self._steps.append(
                StepRecord(
                    replica_id=spec.id,
                    epoch=epoch,
                    tp_size=spec.tp_size,
                    start=start,
                    seconds=seconds,
                    num_running=output.num_running,
                    num_tokens=output.num_tokens,
                    drafted=tuple(output.drafted),
                    accepted=tuple(output.accepted),
                    num_preempted=output.num_preempted,
                    num_swapped_out=output.num_swapped_out,
                    num_swapped_in=output.num_swapped_in,
                )
            )

    # -- places

    def replica(self, spec: ReplicaSpec) -> tuple[Replica, SimulatedMover]:
        """A live replica with a runner and a mover that only count; and this mover."""
        config, tp_size = self.config, spec.tp_size
        swap_cost = config.swap_cost.get(tp_size)
        mover = SimulatedMover(self.pool, config.engine.preemption, swap_cost, config.host_of(spec))
        blocks = BlockManager(config.num_kv_tokens[tp_size] // config.engine.block_size, config.engine.block_size)
        replica = Replica(
            runner=SimulatedRunner(),
            scheduler=Scheduler(config.engine, blocks),
            mover=mover,
            max_model_len=config.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            detokenize=None,
            hidden_stop=self._has_ended,
            max_kv_tokens=min(config.num_kv_tokens.values()) // config.engine.block_size * config.engine.block_size,
            drafter=self._drafter(spec),
        )
        return replica, mover

    def _has_ended(self, state: SequenceState) -> bool:
        return state.num_generated >= self.lengths[state.sequence_id]

    def _drafter(self, spec: ReplicaSpec) -> Drafter | None:
        config = self.config
        if config.drafts is None:
            return None
        seen = self._references if config.engine.draft_server else References(self._has_ended)
        drafter = SimulatedDrafter(config.drafts, seen)
        if config.draft_policy is None:
            return drafter
        return AdaptedDrafter(drafter, config.draft_policy(row_seconds(config.pace, spec)))

    def regroup(self, ranks: Iterable[int], layout: Layout) -> None:
        """These ranks have left their places; a replica of the layout forms when all its ranks have left theirs."""
        self._unplaced |= set(ranks)
        if layout.epoch != self._layout.epoch:
            self._switch_s = self.config.pace.switch(self._layout, layout, 0)
            self._old, self._layout = set(self._layout.replicas), layout
        old, switch_s = self._old, self._switch_s
        for new in layout.replicas:
            if new not in old and set(new.ranks) <= self._unplaced:
                self._unplaced -= set(new.ranks)
                form = partial(self._form, new, layout.epoch)
                self.queue.at(self.queue.now + switch_s, (_STEP_END, new.ranks[0]), form)
        for idle in [one for one in sorted(self._unplaced) if layout.replica_of(one) is None]:
            self._unplaced.discard(idle)
            self._ranks[idle].take_place(None, layout.epoch)

    def _form(self, spec: ReplicaSpec, epoch: int) -> None:
        self._ranks[spec.ranks[0]].take_place(spec, epoch)


class _Rank:
    """A rank that speaks for a replica, or that is idle: its worker's loop, turn by turn."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.number = number
        self._cluster = cluster
        self._core = WorkerCore(number)
        self._inbox: deque[messages.Command] = deque()
        self._spec: ReplicaSpec | None = None
        self._replica: Replica | None = None
        self._mover: SimulatedMover | None = None
        self._epoch = 0
        self._is_free = True
        """Whether no turn or step of it is scheduled."""
        self._is_dead = False

    def take_place(self, spec: ReplicaSpec | None, epoch: int) -> None:
        cluster = self._cluster
        self._spec, self._epoch = spec, epoch
        self._replica, self._mover = (None, None) if spec is None else cluster.replica(spec)
        self._core.take_place(epoch, None if spec is None else spec.id, self._replica, cluster.queue.now)
        if spec is None:
            event = self._core.event(messages.RankIdle)
        else:
            engine = cluster.config.engine
            event = self._core.event(
                messages.ReplicaReady,
                max_num_seqs=engine.max_num_seqs,
                num_kv_tokens=cluster.config.num_kv_tokens[spec.tp_size],
                block_size=engine.block_size,
                policy_version=0,
            )
        cluster.send_event(event)
        self._is_free = True
        if self._inbox:
            self._begin_turn(0.0)

    def check_integrity(self) -> None:
        if self._replica is not None:
            self._replica.scheduler.blocks.check_integrity()

    def die(self) -> None:
        """Ends it: it obeys nothing and sends nothing any more."""
        self._is_dead = True

    def hear(self, command: messages.Command) -> None:
        """A command has come: it is obeyed at the next turn, which is now where nothing runs."""
        self._inbox.append(command)
        if self._is_free:
            self._begin_turn(0.0)

    def _begin_turn(self, gap_s: float) -> None:
        self._is_free = False
        queue = self._cluster.queue
        queue.at(queue.now + gap_s, (_TURN, self.number), self._turn)

    def _turn(self) -> None:
        """Between two steps: obeys, then starts a step."""
        if self._is_dead:
            return
        cluster = self._cluster
        self._is_free = True
        delay_s = 0.0
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, messages.Regroup):
                spec, self._spec, self._replica = self._spec, None, None
                cluster.regroup((self.number,) if spec is None else spec.ranks, command.layout)
                return
            events = self._core.obey(command)
            delay_s += self._transfer_s()
            for event in events:
                cluster.send_event(event, delay_s)
        if self._core.has_work:
            self._is_free = False
            self._start(cluster.queue.now + delay_s)

    def _start(self, start: float) -> None:
        assert self._replica is not None and self._spec is not None
        cluster = self._cluster
        output = self._replica.step()
        seconds = cluster.config.pace.step(self._spec, output) + self._transfer_s()
        cluster.record(self._spec, self._epoch, start, seconds, output)
        cluster.queue.at(start + seconds, (_STEP_END, self.number), lambda: self._end_step(output, seconds))

    def _end_step(self, output: StepOutput, seconds: float) -> None:
        if self._is_dead:
            return
        for event in self._core.on_step(output, seconds, self._cluster.queue.now):
            self._cluster.send_event(event)
        self._begin_turn(self._cluster.vary(self._cluster.config.overheads.gap_s))

    def _transfer_s(self) -> float:
        """What the KV that has moved since the last call takes."""
        if self._mover is None or self._spec is None:
            return 0.0
        pace = self._cluster.config.pace
        return sum(pace.transfer(self._spec, count, path) for path, count in self._mover.take_moved().items())
