"""One process in a rollout: it steps its replica, and between two steps takes commands.

The leader of a replica (`ranks[0]`) hears the coordinator and passes on what it hears, so that all shards take a
command at the same step; followers hear their leader only. An idle rank hears the coordinator itself. A replica outside
the world (`engines/fleet/outside.py`) runs the same loop, and there alone weights are loaded by command.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from engines.control import messages as m
from engines.control.transport import Client
from engines.parallel.layout import Layout
from engines.replica.engine import LocalEngine
from engines.rollout.telemetry import StepRecord
from engines.sequence import SequenceId

IDLE_WAIT_S = 0.2
"""Longest that an idle leader waits for a command before it shows its followers that it is alive."""
REPORT_EVERY_S = 0.05
"""Shortest time between two reports of a replica's load."""
SLOW_CONTROL_INTERVAL = 16
"""Steps between two looks for commands where telling the followers costs a network round trip."""

NO_WEIGHTS = -1
"""`policy_version` of a replica that has loaded none yet: no phase has it."""

Pace = Callable[[int, int, int], float]
"""(sequences, new tokens, context tokens, all summed over the batch) -> seconds that the step is to last."""
LoadFrom = Callable[[str, int], int]
"""(folder, policy version) -> checksum of the weights that the engine now has."""


class _Told(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a leader passes on to its followers."""

    commands: list[bytes] = []
    failure: str | None = None
    """Why it hears no more: all are to give up."""


class Worker:
    """Owns this rank's engine during a rollout; `run` returns when the phase has ended."""

    def __init__(
        self,
        *,
        rank: int,
        client: Client,
        layout: Layout,
        engine: LocalEngine | None,
        rebuild: Callable[[Layout], LocalEngine | None],
        pace: Pace | None = None,
        load_from: LoadFrom | None = None,
    ) -> None:
        """`rebuild` makes this rank's engine in another layout, weights included; None where it is idle there.

        `load_from` is given outside the torchrun world only: there weights are loaded, and the process ended, by
        command.
        """
        self._rank = rank
        self._client = client
        self._rebuild = rebuild
        self._pace = pace
        self._load_from = load_from
        self._phase = -1
        self._last_heard = -1
        self._pending: deque[m.Command] = deque()
        self.is_shut_down = False
        """Whether a command has ended the process's work; outside the world only."""
        self.step_records: list[StepRecord] = []
        """The steps of this rank's replicas since `run` was last called."""
        self._take_place(layout, engine)

    def _take_place(self, layout: Layout, engine: LocalEngine | None) -> None:
        """Joins the replica that the layout gives; its leader announces it once all its ranks are there."""
        self.engine = engine
        self._epoch = layout.epoch
        self._seq = 0
        self._num_steps = 0
        self._lengths: dict[SequenceId, int] = {}
        self._reported = time.monotonic()
        self._seconds = 0.0
        if engine is None:
            self._send(m.RankIdle)
            return
        engine.tensor_parallel.barrier()
        self._send(
            m.ReplicaReady,
            max_num_seqs=engine.config.max_num_seqs,
            num_kv_tokens=engine.num_kv_tokens,
            block_size=engine.config.block_size,
            policy_version=engine.replica.policy_version if engine.has_weights else NO_WEIGHTS,
        )

    def run(self) -> None:
        """Steps and obeys until the coordinator ends the phase, or the process. To be called again for each phase.

        Raises ConnectionError when the coordinator is gone.
        """
        self.step_records = []
        while True:
            if not self._pending:
                self._pending.extend(self._next_commands())
            while self._pending:
                if self._obey(self._pending.popleft()):
                    return  # what is left is for the next phase
            if self._has_work:
                self._step()

    @property
    def _has_work(self) -> bool:
        return self.engine is not None and self.engine.replica.has_work

    @property
    def _speaks(self) -> bool:
        """Whether this rank talks with the coordinator for its replica, or for itself when idle."""
        return self.engine is None or self.engine.tensor_parallel.rank == 0

    # -- commands

    def _next_commands(self) -> list[m.Command]:
        if self.engine is None or self.engine.tensor_parallel.size == 1:
            return self._hear()
        group = self.engine.tensor_parallel
        is_local = group.name == "shared memory"
        if self._has_work and not is_local and self._num_steps % SLOW_CONTROL_INTERVAL:
            return []
        told = _Told()
        problem: Exception | None = None
        if self._speaks:
            try:
                told = _Told(commands=[m.encode(command) for command in self._hear()])
            except Exception as error:
                problem = error  # raised once the followers know: they would wait for a leader that is gone
                told = _Told(failure=str(error))
        told = msgspec.msgpack.decode(
            group.broadcast_bytes(msgspec.msgpack.encode(told) if self._speaks else None), type=_Told
        )
        if problem is not None:
            raise problem
        if told.failure is not None:
            raise ConnectionError(f"rank {self._rank}: the leader of its replica has failed: {told.failure}")
        return [m.decode_command(data) for data in told.commands]

    def _hear(self) -> list[m.Command]:
        """What has come from the coordinator; waits for it a while when there is nothing else to do."""
        heard = []
        data = self._client.receive(0.0 if self._has_work else IDLE_WAIT_S)
        while data is not None:
            command = m.decode_command(data)
            # Checked here and not where it is obeyed: a follower may have heard less than its new leader.
            if command.seq > self._last_heard:
                self._last_heard = command.seq
                heard.append(command)
            data = self._client.receive(0.0)
        return heard

    def _obey(self, command: m.Command) -> bool:
        """Returns whether the phase, or all, is over."""
        self._phase = command.phase
        if isinstance(command, m.SubmitWork):
            self._submit(command)
        elif isinstance(command, m.PauseSequences):
            works = self._local.replica.pause(
                self._here(command.sequence_ids),
                self._local.replica.kv_store if command.with_kv else None,
            )
            self._send(m.SequencesPaused, acks=command.seq, works=tuple(works))
        elif isinstance(command, m.AbortSequences):
            ids = self._here(command.sequence_ids) or ()
            finished = tuple(self._local.replica.abort(sequence_id) for sequence_id in ids)
            self._send(m.SequencesAborted, acks=command.seq, finished=finished)
        elif isinstance(command, m.Regroup):
            self._take_place(command.layout, self._rebuild(command.layout))
        elif isinstance(command, m.EndPhase):
            self._send(m.PhaseEnded, acks=command.seq)
            return True
        elif self._load_from is None:
            raise RuntimeError(f"rank {self._rank}: cannot {type(command).__name__} inside a torchrun world")
        elif isinstance(command, m.LoadWeights):
            checksum = self._load_from(command.source, command.version)
            self._send(m.WeightsLoaded, acks=command.seq, version=command.version, checksum=checksum)
        else:
            self.is_shut_down = True
            return True
        return False

    @property
    def _local(self) -> LocalEngine:
        assert self.engine is not None, "a command for a replica came to an idle rank"
        return self.engine

    def _here(self, sequence_ids: tuple[SequenceId, ...] | None) -> list[SequenceId] | None:
        """Those of the sequences that are still here."""
        if sequence_ids is None:
            return None
        return [sequence_id for sequence_id in sequence_ids if self._local.replica.holds(sequence_id)]

    def _submit(self, command: m.SubmitWork) -> None:
        for work in command.works:
            try:
                self._local.replica.submit(work)
                self._lengths[work.state.sequence_id] = work.state.num_generated
            except ValueError as error:
                self._send(m.WorkRejected, sequence_id=work.state.sequence_id, reason=str(error))

    # -- steps

    def _step(self) -> None:
        engine = self._local
        start = time.monotonic()
        output = engine.replica.step()
        if self._pace is not None:
            wanted = self._pace(output.num_running, output.num_tokens, output.num_context_tokens)
            time.sleep(max(0.0, start + wanted - time.monotonic()))
        seconds = time.monotonic() - start
        self._num_steps += 1
        self._seconds += seconds
        self.step_records.append(
            StepRecord(
                replica_id=engine.spec.id,
                epoch=self._epoch,
                tp_size=engine.spec.tp_size,
                start=start,
                seconds=seconds,
                num_running=output.num_running,
                num_tokens=output.num_tokens,
                num_preempted=output.num_preempted,
                num_swapped_out=output.num_swapped_out,
                num_swapped_in=output.num_swapped_in,
            )
        )
        if output.finished:
            self._send(m.SequencesFinished, finished=tuple(output.finished))
        if output.released:
            self._send(m.SequencesReleased, works=tuple(output.released))
        if start + seconds - self._reported >= REPORT_EVERY_S:
            self._report(start + seconds)

    def _report(self, now: float) -> None:
        replica = self._local.replica
        progress = []
        lengths = {}
        for state in replica.states():
            sequence_id = state.sequence_id
            lengths[sequence_id] = state.num_generated
            grown = state.num_generated - self._lengths.get(sequence_id, 0)
            if grown:
                progress.append((sequence_id, grown))
        self._lengths = lengths
        self._send(
            m.StepReported,
            num_running=len(replica.scheduler.running),
            num_waiting=len(replica.scheduler.waiting),
            num_free_blocks=replica.scheduler.blocks.num_free_blocks,
            seconds=self._seconds,
            progress=tuple(progress),
        )
        self._reported, self._seconds = now, 0.0

    def _send(self, kind: Any, **fields: Any) -> None:
        if not self._speaks:
            return
        replica_id = None if self.engine is None else self.engine.spec.id
        event = kind(
            replica_id=replica_id, rank=self._rank, phase=self._phase, epoch=self._epoch, seq=self._seq, **fields
        )
        self._seq += 1
        # When the coordinator is gone, the next look for commands says so, to the followers too.
        with contextlib.suppress(ConnectionError):
            self._client.send(m.encode(event))
