"""One process in a rollout: it steps its replica, and executes commands between two steps.

The leader of a replica (`ranks[0]`) receives commands from the coordinator and relays them to the replica's other ranks
(followers), so that all shards execute a command at the same step. An idle rank receives its commands directly. A
replica outside the world (`engines/fleet/outside.py`) runs the same loop; only there do commands load weights.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from engines.control import messages as m
from engines.control.transport import Client
from engines.decoding import from_msgpack
from engines.parallel.layout import Layout
from engines.replica.engine import LocalEngine
from engines.rollout.draft_ranks import DraftRanks
from engines.rollout.pace import Pace
from engines.rollout.steps import Stepper, wait_until
from engines.rollout.telemetry import StepRecord, SwitchRecord
from engines.rollout.worker_core import WorkerCore
from engines.sequence import SequenceId

IDLE_WAIT_S = 0.2
"""Longest time that a leader without work waits for a command before it shows its followers that it is alive."""
NO_WEIGHTS = -1
"""`policy_version` of a replica that has loaded no weights yet; no phase has this version."""

RegroupEngine = Callable[[Layout, Layout, Mapping[SequenceId, int]], LocalEngine | None]
"""(layout before, layout after, places of kept sequences) -> this rank's engine after, with its weights; None if it is
idle then. The ranks that change their replicas call it together."""
LoadFrom = Callable[[str, int], int]
"""(folder, policy version) -> checksum of the weights that the engine now has."""


class _Relayed(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a leader broadcasts to its followers."""

    commands: list[bytes] = []
    failure: str | None = None
    """Why the leader cannot receive commands any more; the followers then raise, too."""


class Worker:
    """Owns this rank's engine during a rollout; `run` returns when the phase has ended."""

    def __init__(
        self,
        *,
        rank: int,
        client: Client,
        layout: Layout,
        engine: LocalEngine | None,
        regroup: RegroupEngine,
        pace: Pace | None = None,
        load_from: LoadFrom | None = None,
        draft_ranks: DraftRanks | None = None,
    ) -> None:
        """`regroup`: see `RegroupEngine`.

        `load_from` is given only outside the torchrun world, where commands load weights and end the process.
        """
        self._rank = rank
        self._client = client
        self._regroup_engine = regroup
        self._pace = pace
        self._load_from = load_from
        self._draft_ranks = draft_ranks
        self._core = WorkerCore(rank)
        self._is_running = False
        self._last_heard = -1
        self._pending: deque[m.Command] = deque()
        self.is_shut_down = False
        """Whether a command has ended the process's work; outside the world only."""
        self.step_records: list[StepRecord] = []
        """The steps of this rank's replicas since `run` was last called."""
        self.switches: list[SwitchRecord] = []
        """What its regroups have taken since it was made."""
        self._take_place(layout, engine)

    def _take_place(self, layout: Layout, engine: LocalEngine | None) -> None:
        """Takes this rank's place in the layout; a replica's leader announces it once all its ranks have done so."""
        self.engine = engine
        self._stepper = None if engine is None else Stepper(engine, layout.epoch, self._pace)
        if engine is None:
            self._core.take_place(layout.epoch, None, None, time.monotonic())
            self._say(self._core.event(m.RankIdle))
            return
        self._core.take_place(layout.epoch, engine.spec.id, engine.replica, time.monotonic())
        engine.tensor_parallel.barrier()
        self._say(
            self._core.event(
                m.ReplicaReady,
                max_num_seqs=engine.config.max_num_seqs,
                num_kv_tokens=engine.num_kv_tokens,
                block_size=engine.config.block_size,
                policy_version=engine.replica.policy_version if engine.has_weights else NO_WEIGHTS,
            )
        )

    def run(self) -> None:
        """Steps and executes commands until the coordinator ends the phase or the process. Called once per phase.

        Raises ConnectionError when the connection to the coordinator is lost.
        """
        self.step_records = []
        self._is_running = True
        self._start_drafting()
        try:
            while True:
                if not self._pending:
                    self._pending.extend(self._next_commands())
                while self._pending:
                    if self._obey(self._pending.popleft()):
                        return  # other pending commands are for the next phase
                if self._stepper is not None and self._core.has_work:
                    output, record = self._stepper.step()
                    if output.num_running or output.released:
                        self.step_records.append(record)
                    self._say(*self._core.on_step(output, record.seconds, record.start + record.seconds))
                if self._draft_ranks is not None:
                    self._draft_ranks.flush()
        finally:
            self._is_running = False
            if self._draft_ranks is not None:
                self._draft_ranks.stop()

    def _start_drafting(self) -> None:
        """Drafts in a thread until the phase ends, if this rank's place is to draft."""
        drafter = None if self.engine is None else self.engine.drafter
        if self._is_running and self._draft_ranks is not None and self.engine is not None and drafter is not None:
            self._draft_ranks.start(drafter, self.engine.spec)

    @property
    def _speaks(self) -> bool:
        """Whether this rank exchanges messages with the coordinator: as a replica's leader, or as an idle rank."""
        return self.engine is None or self.engine.tensor_parallel.rank == 0

    def _next_commands(self) -> list[m.Command]:
        if self.engine is None or self.engine.tensor_parallel.size == 1:
            return self._hear()
        group = self.engine.tensor_parallel
        if self._core.may_skip_commands and group.name != "shared memory":
            return []
        relayed = _Relayed()
        problem: Exception | None = None
        if self._speaks:
            try:
                relayed = _Relayed(commands=[m.encode(command) for command in self._hear()])
            except Exception as error:
                problem = error  # raised after the broadcast: the followers would wait for a leader that is gone
                relayed = _Relayed(failure=str(error))
        data = group.broadcast_bytes(msgspec.msgpack.encode(relayed) if self._speaks else None)
        if problem is not None:
            raise problem
        relayed = from_msgpack(data, _Relayed)
        if relayed.failure is not None:
            raise ConnectionError(f"rank {self._rank}: the leader of its replica has failed: {relayed.failure}")
        return [m.decode_command(data) for data in relayed.commands]

    def _hear(self) -> list[m.Command]:
        """Returns the commands that have come from the coordinator; without work, waits `IDLE_WAIT_S` for the first."""
        heard = []
        data = self._client.receive(0.0 if self._core.has_work else IDLE_WAIT_S)
        while data is not None:
            command = m.decode_command(data)
            # Checked here and not in `_obey`: a follower may have received fewer commands than its new leader.
            if command.seq > self._last_heard:
                self._last_heard = command.seq
                heard.append(command)
            data = self._client.receive(0.0)
        return heard

    def _obey(self, command: m.Command) -> bool:
        """Executes a command; returns whether the phase or the process's work is over."""
        start = time.monotonic()
        events = self._core.obey(command, start)
        if self._stepper is not None:
            self._stepper.wait_for_transfers(start)
        self._say(*events)
        if isinstance(command, m.Regroup):
            self.regroup(command.before, command.layout, dict(command.places))
        elif isinstance(command, m.LoadWeights | m.Shutdown):
            if self._load_from is None:
                raise RuntimeError(f"rank {self._rank}: cannot {type(command).__name__} inside a torchrun world")
            if isinstance(command, m.LoadWeights):
                checksum = self._load_from(command.source, command.version)
                fields = {"acks": command.seq, "version": command.version, "checksum": checksum}
                self._say(self._core.event(m.WeightsLoaded, **fields))
            else:
                self.is_shut_down = True
        return self.is_shut_down or isinstance(command, m.EndPhase)

    def regroup(self, before: Layout, after: Layout, places: Mapping[SequenceId, int]) -> None:
        """Leaves this rank's place for that in another layout."""
        start = time.monotonic()
        if self._draft_ranks is not None:
            self._draft_ranks.stop()
        engine = self._regroup_engine(before, after, places)
        switch = None if engine is None else engine.switch
        if self._pace is not None:
            wait_until(start + self._pace.switch(before, after, 0 if switch is None else switch.num_kv_tokens))
        if engine is not None and switch is not None:
            record = SwitchRecord(
                epoch=after.epoch,
                tp_size=engine.spec.tp_size,
                start=start,
                seconds=time.monotonic() - start,
                parts=switch,
            )
            self.switches.append(record)
        self._take_place(after, engine)
        self._start_drafting()

    def _say(self, *events: m.Event) -> None:
        if not self._speaks:
            return
        # When the coordinator is gone, the next check for commands raises, on the followers too.
        with contextlib.suppress(ConnectionError):
            for event in events:
                self._client.send(m.encode(event))
