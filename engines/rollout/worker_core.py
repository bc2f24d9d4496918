"""The rules of one rank in a rollout: how it executes commands, and which events it sends when. Torch-free.

It has no clock and no connection: the caller passes `now`, and gets the events back. A live `Worker` holds one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, Literal

from engines.control import messages as m
from engines.sequence import SequenceId, Work

if TYPE_CHECKING:
    from engines.replica.replica import Replica, StepOutput

REPORT_EVERY_S = 0.05
"""Shortest time between two reports of a replica's load."""
SLOW_CONTROL_INTERVAL = 16
"""Steps between two checks for commands where relaying them to the followers costs a network round trip."""


class WorkerCore:
    """Executes the commands of its rank's place in a layout (in a replica, or idle), and numbers its events."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._phase = -1

    def take_place(self, epoch: int, replica_id: int | None, replica: Replica | None, now: float) -> None:
        """Places the rank in this replica of the layout with this epoch; None when it is idle."""
        self._epoch = epoch
        self._replica_id = replica_id
        self._replica = replica
        self._num_events = 0
        self._num_steps = 0
        self._lengths: dict[SequenceId, int] = {}
        self._reported = now
        self._seconds = 0.0
        self._queued: dict[SequenceId, float] = {}
        """Since when trajectories are in the replica's queue."""
        self._reading: dict[SequenceId, float] = {}
        """Since when their stored KV is being read, if it is."""
        self._waits: list[tuple[SequenceId, Literal["queue", "move"], float, float]] = []
        """What has ended of both: since when it was so, and for how long."""

    @property
    def has_work(self) -> bool:
        return self._replica is not None and self._replica.has_work

    @property
    def may_skip_commands(self) -> bool:
        """Whether the next step may run before the next check for commands, where a check is slow."""
        return self.has_work and self._num_steps % SLOW_CONTROL_INTERVAL != 0

    def event(self, kind: Any, **fields: Any) -> Any:
        """Makes the next event of this place."""
        self._num_events += 1
        return kind(
            replica_id=self._replica_id,
            rank=self._rank,
            phase=self._phase,
            epoch=self._epoch,
            seq=self._num_events - 1,
            **fields,
        )

    def obey(self, command: m.Command, now: float) -> list[m.Event]:
        """Applies a command to the replica's sequences; returns the answers. The caller does what else it asks for."""
        self._phase = command.phase
        if isinstance(command, m.SubmitWork):
            return self._submit(command, now)
        if isinstance(command, m.ExpectSequences):
            self._here.give_up(command.dropped)
            for work in command.works:
                self._reading[work.state.sequence_id] = now
                self._here.expect(work)
        if isinstance(command, m.PauseSequences):
            ids = command.sequence_ids
            here = None if ids is None else [id_ for id_ in ids if self._here.holds(id_)]
            works = self._here.pause(here, with_kv=command.with_kv, keeping=frozenset(command.keeping))
            return [self.event(m.SequencesPaused, acks=command.seq, works=tuple(works))]
        if isinstance(command, m.AbortSequences):
            finished = tuple(self._here.abort(id_) for id_ in command.sequence_ids if self._here.holds(id_))
            return [self.event(m.SequencesAborted, acks=command.seq, finished=finished)]
        if isinstance(command, m.EndPhase):
            if self._replica is not None:
                self._replica.give_up()
            self._queued.clear()
            self._reading.clear()
            return [self.event(m.PhaseEnded, acks=command.seq)]
        return []

    def _submit(self, command: m.SubmitWork, now: float) -> list[m.Event]:
        events = []
        for work in command.works:
            try:
                self._here.submit(work)
                self._lengths[work.state.sequence_id] = len(work.state.tokens)
                if work.state.in_turns:
                    self._queued[work.state.sequence_id] = now
                    self._reading.setdefault(work.state.sequence_id, now)
            except ValueError as error:
                fields = {"sequence_id": work.state.sequence_id, "reason": str(error)}
                events.append(self.event(m.WorkRejected, **fields))
        return events

    @property
    def _here(self) -> Replica:
        assert self._replica is not None, "a command for a replica came to an idle rank"
        return self._replica

    def on_step(self, output: StepOutput, seconds: float, now: float) -> list[m.Event]:
        """Returns the events after a step that took `seconds` and ended at `now`."""
        self._num_steps += 1
        self._seconds += seconds
        start = now - seconds
        for sequence_id in output.fetched:
            since = self._reading.pop(sequence_id, start)
            self._waits.append((sequence_id, "move", since, start - since))
        for sequence_id in output.preempted:
            self._queued[sequence_id] = start
        for sequence_id in output.admitted:
            since = self._queued.pop(sequence_id, start)
            if since < start:
                self._waits.append((sequence_id, "queue", since, start - since))
            self._reading.pop(sequence_id, None)
        events = []
        if output.finished:
            events.append(self.event(m.SequencesFinished, finished=tuple(output.finished)))
        if output.released:
            events.append(self.event(m.SequencesReleased, works=tuple(output.released)))
        if now - self._reported >= REPORT_EVERY_S or (self._waits and not self.has_work):
            events.append(self.report(now))
        return events

    def let_go(self, works: Items[Work], now: float) -> list[m.Event]:
        """Returns the events when the replica has let go of sequences between two steps, if any: first its load, so
        that the coordinator does not send them where the blocks have just been taken away."""
        return [self.report(now), self.event(m.SequencesReleased, works=tuple(works))] if works else []

    def report(self, now: float) -> m.Event:
        """Returns the replica's load, and what has changed since the last report."""
        lengths = {state.sequence_id: len(state.tokens) for state in self._here.states()}
        grown = [(id_, length - self._lengths[id_]) for id_, length in lengths.items()]
        seconds, self._seconds = self._seconds, 0.0
        self._lengths, self._reported = lengths, now
        waits, self._waits = self._waits, []
        scheduler = self._here.scheduler
        return self.event(
            m.StepReported,
            num_running=len(scheduler.running),
            num_waiting=self._here.num_waiting,
            num_free_blocks=scheduler.blocks.num_free_blocks,
            num_blocks=scheduler.blocks.num_allowed_blocks if scheduler.blocks.is_leased else None,
            seconds=seconds,
            progress=tuple(one for one in grown if one[1]),
            waits=tuple((id_, kind, now - since, wait) for id_, kind, since, wait in waits),
        )
