"""One rank of a simulated cluster: its worker's loop, in virtual time. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engines.control import messages
from engines.kvcache.kept import kept_kv
from engines.parallel.layout import ReplicaSpec
from engines.replica.replica import Replica, StepOutput
from engines.rollout.pace import paced_step_s
from engines.rollout.worker_core import WorkerCore
from engines.speculation.remote import PATIENCE_S
from research.simulator.draft_ranks import VirtualLink
from research.simulator.events import STEP_END, TURN
from research.simulator.runner import SimulatedMover

if TYPE_CHECKING:
    from research.simulator.cluster import Cluster


class Rank:
    """A rank that speaks for a replica, or that is idle: its worker's loop, turn by turn."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.number = number
        self._cluster = cluster
        self._core = WorkerCore(number)
        self._inbox: deque[messages.Command] = deque()
        self._spec: ReplicaSpec | None = None
        self._replica: Replica | None = None
        self._mover: SimulatedMover | None = None
        self._links: list[VirtualLink] = []
        """To the ranks that draft for it."""
        self._is_waiting = self._looks_again = False
        """Whether all of its sequences wait for drafts; whether it will look for lost ones."""
        self._epoch = 0
        self._is_free = True
        """Whether no turn or step of it is scheduled."""
        self._is_dead = False

    def take_place(self, spec: ReplicaSpec | None, epoch: int, contents: Iterable[bytes] = ()) -> None:
        cluster = self._cluster
        self._spec, self._epoch = spec, epoch
        self._links = (
            [] if spec is None else [VirtualLink(cluster, self, epoch, to) for to in cluster.drafters_of(spec)]
        )
        self._replica, self._mover = (None, None) if spec is None else cluster.replica(spec, contents, self._links)
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

    def hear_drafts(self) -> None:
        """Drafts have come: they are taken by the next step, which begins now where all sequences wait for them."""
        if self._is_free and self._is_waiting:
            self._begin_turn(0.0)

    def _begin_turn(self, gap_s: float) -> None:
        self._is_free = self._is_waiting = False
        queue = self._cluster.queue
        queue.at(queue.now + gap_s, (TURN, self.number), self._turn)

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
                for link in self._links:
                    link.close()
                spec, replica, self._spec, self._replica = self._spec, self._replica, None, None
                if spec is None or replica is None:
                    cluster.regroup(command, (self.number,), {})
                else:
                    kept = kept_kv(replica.kept, replica.scheduler.blocks, spec.id)
                    cluster.regroup(command, spec.ranks, kept)
                return
            events = self._core.obey(command, cluster.queue.now + delay_s)
            delay_s += self._transfer_s()
            for event in events:
                cluster.send_event(event, delay_s)
        self._post(delay_s)
        if self._core.has_work:
            self._is_free = False
            self._start(cluster.queue.now + delay_s)

    def _start(self, start: float) -> None:
        assert self._replica is not None and self._spec is not None
        cluster = self._cluster
        output = self._replica.step()
        seconds = (
            paced_step_s(cluster.config.pace, self._spec, output, cluster.config.engine.draft_method)
            + self._transfer_s()
        )
        if not (output.num_running or output.released or seconds):
            self._wait_for_drafts()
            return
        cluster.record(self._spec, self._epoch, start, seconds, output)
        cluster.queue.at(start + seconds, (STEP_END, self.number), lambda: self._end_step(output, seconds))

    def _end_step(self, output: StepOutput, seconds: float) -> None:
        if self._is_dead:
            return
        for event in self._core.on_step(output, seconds, self._cluster.queue.now):
            self._cluster.send_event(event)
        self._post()
        self._begin_turn(self._cluster.vary(self._cluster.config.overheads.gap_s))

    def _wait_for_drafts(self) -> None:
        """Stands by until drafts or commands come, or so long that the drafter counts as silent."""
        self._is_free = self._is_waiting = True
        if not self._looks_again:
            self._looks_again = True
            queue = self._cluster.queue
            queue.at(queue.now + PATIENCE_S, (TURN, self.number), self._look_again)

    def _look_again(self) -> None:
        self._looks_again = False
        self.hear_drafts()

    def _post(self, delay_s: float = 0.0) -> None:
        """Sends the draft ranks what is new for them."""
        for link in self._links:
            link.flush(delay_s)

    def _transfer_s(self) -> float:
        """What the KV that has moved since the last call takes, and the waits for KV."""
        return 0.0 if self._mover is None else self._mover.take_seconds()
