"""A simulated rank that serves requests, and lends its idle memory and time to a rollout (ROSE §4.1). Torch-free.

`CoServing`, `Replica`, `Scheduler`, `PageShare` and `WorkerCore` are the live ones. What `EngineThread` and `Tenant` do
with them is done here between two steps in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from engines.config import EngineConfig
from engines.constraints import Count, NonNegative, Seconds, Share, check_fields
from engines.control import messages
from engines.kvcache.pages import PagePool, PageShare
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import Replica, StepOutput
from engines.replica.scheduler import Scheduler
from engines.rollout.pace import Pace
from engines.rollout.worker_core import WorkerCore
from engines.sequence import SamplingParams, SequenceId, SequenceKey, SequenceState, Work
from engines.serving.coserve import RENEW_S, CoServing, CoServingLimits, Lent, Neighbour, Turn
from engines.serving.engine_thread import LOOK_AGAIN_S
from engines.serving.policies import AdmissionPolicy, MemoryPolicy
from research.simulator.events import STEP_END, TO_WORKER, TURN
from research.simulator.runner import VOCAB_SIZE, KVPool, SimulatedMover, SimulatedRunner
from research.workloads.arrivals import Arrival

if TYPE_CHECKING:
    from research.simulator.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """What a rank serves, and how it lends."""

    arrivals: Items[Arrival]
    """By their times, which count from the rollout's start, and may be below 0. Those after its end are not served."""
    pace: Pace
    """Of the serving model."""
    engine: EngineConfig
    """Of the serving model."""
    rollout_engine: EngineConfig
    """Of the rollout's model here."""
    num_pages: Count
    serving_blocks: Count = 1
    """Blocks of the serving model in a page."""
    rollout_blocks: Count = 1
    """Blocks of the rollout's model in a page."""
    admission: Callable[[], AdmissionPolicy]
    """Makes the policy of a rank."""
    memory: Callable[[], MemoryPolicy]
    serving_share: Share = 1.0
    """Of the pages, those that the serving model may hold; less than all in a static split."""
    lease_s: Seconds | None = 10.0
    """See `PageShare`."""
    limits: CoServingLimits = field(default_factory=CoServingLimits)
    change_s: NonNegative = 0.0
    """Seconds before a step of another model than the last one, where only one is in the GPU's memory."""

    def __post_init__(self) -> None:
        check_fields(self)
        held = int(self.serving_share * self.num_pages) * self.serving_blocks * self.engine.block_size
        longest = max((one.num_prompt_tokens + one.num_generated_tokens for one in self.arrivals), default=0)
        if longest > held:
            raise ValueError(
                f"ServingSetup.arrivals: a request has {longest} tokens, and the serving model's pages hold {held}; "
                f"give more pages, or shorter requests"
            )


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """A request of the serving model."""

    arrived_s: float
    num_tokens: int
    """That it is to generate."""
    token_s: list[float] = field(default_factory=list)
    """When it got each of them."""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two tokens."""
        return [after - before for before, after in pairwise(self.token_s)]


@dataclass(kw_only=True)
class Served:
    """What a serving rank has done since the rollout's start, from which times count; and all of its requests."""

    rank: int
    lent: Lent
    requests: list[ServedRequest] = field(default_factory=list)
    busy_s: dict[Turn, float] = field(default_factory=lambda: {"serving": 0.0, "rollout": 0.0})
    """In which each model stepped."""
    idle_s: float = 0.0
    changing_s: float = 0.0
    """See `ServingSetup.change_s`."""
    begun_s: float = 0.0
    """The start of the rollout, or the end of a step that was running then."""
    until_s: float = 0.0
    """The end of its last step. The other seconds are all of those in between."""


class ServingRank:
    """A rank outside the layout, to which `Cluster` speaks as to a `Rank`. It serves also before it joins."""

    def __init__(self, cluster: Cluster, number: int, setup: ServingSetup) -> None:
        self.number = number
        self._cluster, self._setup = cluster, setup
        self._spec, self._epoch = ReplicaSpec(id=number, ranks=(number,)), 0
        self._core = WorkerCore(number)
        self._inbox: deque[messages.Command] = deque()
        self._is_free, self._is_dead, self._looks_again = True, False, False
        self._phase = -1
        self._last: Turn = "serving"
        self._open: dict[SequenceId, ServedRequest] = {}
        """Requests that have not got all of their tokens."""
        pool = PagePool(setup.num_pages)

        def pages(owner: Turn, share: float, engine: EngineConfig, blocks_per_page: int) -> PageShare:
            return PageShare(
                pool,
                owner,
                budget=int(share * setup.num_pages),
                block_size=engine.block_size,
                blocks_per_page=blocks_per_page,
                lease_s=setup.lease_s if owner == "rollout" else None,
            )

        served = pages("serving", setup.serving_share, setup.engine, setup.serving_blocks)
        lent = pages("rollout", 1.0, setup.rollout_engine, setup.rollout_blocks)
        rollout, self._mover = cluster.replica_on(self._spec, setup.rollout_engine, lent.blocks)
        self._neighbours: dict[Turn, Neighbour] = {
            "serving": Neighbour(replica=self._serving_replica(served), pages=served),
            "rollout": Neighbour(replica=rollout, pages=lent),
        }
        self._paces: dict[Turn, Pace] = {"serving": setup.pace, "rollout": cluster.config.pace}
        self.coserving = CoServing(
            serving=self._neighbours["serving"],
            rollout=self._neighbours["rollout"],
            admission=setup.admission(),
            memory=setup.memory(),
            seconds=lambda output: self._paces["rollout"].step(self._spec, output),
            limits=setup.limits,
        )
        self.served = Served(rank=number, lent=self.coserving.lent, until_s=cluster.queue.now)

    def _serving_replica(self, pages: PageShare) -> Replica:
        setup = self._setup
        mover = SimulatedMover(
            KVPool(capacity_tokens=0), "recompute", None, 0, now=lambda: 0.0, transfer_s=lambda count, path: 0.0
        )
        return Replica(
            runner=SimulatedRunner(),
            scheduler=Scheduler(setup.engine, pages.blocks),
            mover=mover,
            max_model_len=pages.blocks.most_blocks * setup.engine.block_size,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            detokenize=None,
            hidden_stop=lambda state: state.num_generated >= self._open[state.sequence_id].num_tokens,
        )

    # -- as a `Rank`

    def take_place(self, spec: ReplicaSpec | None, epoch: int, contents: Iterable[bytes] = ()) -> None:
        """Joins the rollout."""
        assert spec == self._spec and not contents
        now, engine = self._cluster.queue.now, self._setup.rollout_engine
        self._epoch = epoch
        self._core.take_place(epoch, spec.id, self._neighbours["rollout"].replica, now)
        self.coserving.begin(now)
        ready = self._core.event(
            messages.ReplicaReady,
            max_num_seqs=engine.max_num_seqs,
            num_kv_tokens=self._neighbours["rollout"].pages.blocks.most_blocks * engine.block_size,
            block_size=engine.block_size,
            policy_version=0,
        )
        self._cluster.send_event(ready)
        self._renew()

    def check_integrity(self) -> None:
        for one in self._neighbours.values():
            one.pages.check_integrity()

    def die(self) -> None:
        """Ends it: its requests are lost."""
        self._is_dead = True

    def hear(self, command: messages.Command) -> None:
        self._inbox.append(command)
        self._wake()

    def hear_drafts(self) -> None:
        raise AssertionError("a serving rank verifies no drafts")

    # -- requests

    @property
    def has_requests(self) -> bool:
        """Whether requests have come that it has not answered yet."""
        return bool(self._open) and not self._is_dead

    def count_anew(self) -> None:
        """Forgets the seconds before the rollout's start."""
        served = self.served
        served.begun_s = served.until_s = max(served.until_s, self._cluster.queue.now)
        served.busy_s = {"serving": 0.0, "rollout": 0.0}
        served.idle_s = 0.0

    def open(self, number: int = 0) -> None:
        """Lets requests come, from this one on."""
        if number < len(self._setup.arrivals):
            arrival, queue = self._setup.arrivals[number], self._cluster.queue
            queue.at(max(queue.now, arrival.time_s), (TO_WORKER, self.number), lambda: self._arrive(number, arrival))

    def _arrive(self, number: int, arrival: Arrival) -> None:
        if self._is_dead or self._cluster.is_complete:
            return
        now, replica = self._cluster.queue.now, self._neighbours["serving"].replica
        state = SequenceState(
            key=SequenceKey(run_seed=0, policy_step=0, prompt_uid=number, sample_index=0),
            group_id=number,
            tokens=[number] * arrival.num_prompt_tokens,
            num_prompt_tokens=arrival.num_prompt_tokens,
            params=SamplingParams(max_tokens=2**31),
        )
        request = ServedRequest(arrived_s=now, num_tokens=arrival.num_generated_tokens)
        self._open[state.sequence_id] = request
        self.served.requests.append(request)
        replica.submit(Work(state=state))
        self.coserving.times.arrived(state, now)
        self._wake()
        self.open(number + 1)

    # -- turns

    def _renew(self) -> None:
        cluster = self._cluster
        if self._is_dead or cluster.is_complete:
            return
        now = cluster.queue.now
        if self.coserving.renew(now):
            cluster.send_event(self._core.report(now))
        cluster.check_deadlines()
        cluster.queue.at(now + RENEW_S, (STEP_END, self.number), self._renew)

    def _wake(self) -> None:
        if self._is_free:
            self._begin_turn(0.0)

    def _begin_turn(self, gap_s: float) -> None:
        self._is_free = False
        queue = self._cluster.queue
        queue.at(queue.now + gap_s, (TURN, self.number), self._turn)

    def _turn(self) -> None:
        """Between two steps: obeys, then lets the model step whose turn it is."""
        if self._is_dead:
            return
        now, delay_s = self._cluster.queue.now, self._obey()
        turn = self.coserving.next(now)
        for event in self._core.let_go(self.coserving.take_released(), now):
            self._send(event, delay_s)
        self._is_free = True
        if turn is not None:
            self._start(turn, now + delay_s)
        elif self._neighbours["rollout"].replica.has_work:
            self._look_again()

    def _obey(self) -> float:
        """Returns the seconds of the transfers of KV."""
        delay_s, now = 0.0, self._cluster.queue.now
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, messages.SubmitWork) and command.phase != self._phase:
                self._phase = command.phase
                self.coserving.begin(now)
            events = self._core.obey(command, now + delay_s)
            delay_s += self._mover.take_seconds()
            for event in events:
                self._send(event, delay_s)
        return delay_s

    def _send(self, event: messages.Event, delay_s: float = 0.0) -> None:
        self._cluster.send_event(event, delay_s)

    def _look_again(self) -> None:
        def look() -> None:
            self._looks_again = False
            self._wake()

        if not self._looks_again:
            self._looks_again = True
            queue = self._cluster.queue
            queue.at(queue.now + LOOK_AGAIN_S, (TURN, self.number), look)

    def _start(self, turn: Turn, start: float) -> None:
        output = self._neighbours[turn].replica.step()
        if not (output.num_running or output.released or output.fetched):
            if turn == "rollout" and self.coserving.serves:
                self._start("serving", start)
            else:
                self._look_again()
            return
        self._is_free = False
        change_s = self._setup.change_s if turn != self._last else 0.0
        seconds = self._paces[turn].step(self._spec, output) if output.num_running else 0.0
        if turn == "rollout":
            seconds += self._mover.take_seconds()
        served, end = self.served, start + change_s + seconds
        served.idle_s += start - served.until_s
        served.changing_s += change_s
        served.busy_s[turn] += seconds
        self._last, served.until_s = turn, end
        self._cluster.queue.at(end, (STEP_END, self.number), lambda: self._end_step(turn, output, start + change_s))

    def _end_step(self, turn: Turn, output: StepOutput, start: float) -> None:
        if self._is_dead:
            return
        cluster, now = self._cluster, self._cluster.queue.now
        self.coserving.stepped(turn, output, start, now)
        if turn == "rollout":
            cluster.record(self._spec, self._epoch, start, now - start, output)
            for event in self._core.on_step(output, now - start, now):
                self._send(event)
        else:
            self._note_tokens(output, now)
        self._begin_turn(cluster.vary(cluster.config.overheads.gap_s))

    def _note_tokens(self, output: StepOutput, now: float) -> None:
        running = self._neighbours["serving"].replica.scheduler.running
        for state in [*(one.state for one in output.finished), *(one.state for one in running)]:
            request = self._open[state.sequence_id]
            if state.num_generated > len(request.token_s):
                request.token_s.append(now)
        for one in output.finished:
            del self._open[one.state.sequence_id]
