"""Coordinated rollouts in a torchrun world: each rank steps its replica, a thread on rank 0 assigns the sequences."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping

import msgspec

from engines.control.sealing import new_token
from engines.control.transport import Client, Server
from engines.coordination.core import RolloutCore
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.decoding import from_msgpack
from engines.kvcache.files import FileKVStore
from engines.kvcache.peer import PeerKVStore
from engines.kvcache.tiers import TieredKVStore
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout
from engines.replica.engine import LocalEngine
from engines.rollout.coordinator import Coordinator, peer_of
from engines.rollout.draft_ranks import DraftRanks
from engines.rollout.pace import Pace
from engines.rollout.telemetry import Mark, StepRecord, SwitchRecord, TurnSpan
from engines.rollout.turns import Turns
from engines.rollout.worker import RegroupEngine, Worker
from engines.sequence import Finished, SequenceId, SequenceState


class Launch(msgspec.Struct, frozen=True):
    """What rank 0 sends the other ranks so that they can connect to it, and find each other's KV."""

    address: str
    token: bytes
    kv_token: str


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 sends the other ranks when a rollout has ended."""

    finished: list[Finished]
    layout: Layout
    layout_error: str | None


class RolloutWorld:
    """This rank's part of coordinated rollouts. All ranks of the world make, use and close it together.

    The calling thread steps the replica and runs every collective; on rank 0 a second thread coordinates.
    """

    def __init__(
        self,
        groups: GroupCache,
        layout: Layout,
        *,
        engine: LocalEngine | None,
        regroup: RegroupEngine,
        can_regroup: Callable[[Layout, Layout], bool],
        make_kv_store: Callable[[str], FileKVStore | TieredKVStore],
        schedule_policy: SchedulePolicy,
        layout_policy: LayoutPolicy | None = None,
        check_layout: Callable[[Layout, Layout, int], None] | None = None,
        pace: Pace | None = None,
        draft_ranks: DraftRanks | None = None,
    ) -> None:
        """`regroup`: see `Worker`; `check_layout`, and `can_regroup` as `keeps_kv`: see `RolloutCore`. `make_kv_store`
        makes this rank's store from the run's token, for the KV of sequences that move to other replicas or are
        preempted.

        The timeout is the groups'. This rank listens on the loopback address if all ranks are on one host, otherwise on
        the address by which other hosts reach it (`GroupCache.address`).
        """
        address, timeout_s = groups.address, groups.timeout_s
        world = self._world = groups.world
        self._phase = -1
        self.layout = layout
        """The present layout, if this rank has taken part in every regroup; after a rollout, on every rank."""
        self.has_failed = False
        """Whether a rollout has ended with an error, which closed the connections between the ranks."""
        self.coordinator: Coordinator | None = None
        launch, server = self._meet(address, timeout_s)
        self._client = Client(peer_of(world.rank), launch.address, launch.token, patience_s=timeout_s)
        local_store = make_kv_store(launch.kv_token)
        self._kv_store: FileKVStore | TieredKVStore | PeerKVStore = local_store
        if len(set(groups.hosts)) > 1:
            host = groups.hosts[world.rank]
            self._kv_store = PeerKVStore(local_store, host=host, address=address, token=launch.token)
        self._regroup_engine = regroup
        if server is not None:
            core = RolloutCore(
                layout=layout,
                world_size=world.size,
                schedule_policy=schedule_policy,
                layout_policy=layout_policy,
                check_layout=check_layout,
                keeps_kv=can_regroup,
                timeout_s=timeout_s,
            )
            self.coordinator = Coordinator(
                core, server, num_ranks=world.size, timeout_s=timeout_s, drop_kv=self._kv_store.drop
            )
            self.coordinator.wait_for_ranks()
        self._worker = Worker(
            rank=world.rank,
            client=self._client,
            layout=layout,
            engine=self._with_store(engine),
            regroup=self._regroup,
            pace=pace,
            draft_ranks=draft_ranks,
        )

    def _meet(self, address: str, timeout_s: float) -> tuple[Launch, Server | None]:
        """Returns rank 0's `Launch` on every rank; on rank 0 also its `Server`."""
        if self._world.rank:
            return from_msgpack(self._world.broadcast_bytes(None), Launch), None
        token = new_token()
        server = Server(token, host=address, patience_s=timeout_s)
        launch = Launch(address=server.address, token=token, kv_token=secrets.token_hex(16))
        self._world.broadcast_bytes(msgspec.msgpack.encode(launch))
        return launch, server

    def _with_store(self, engine: LocalEngine | None) -> LocalEngine | None:
        if engine is not None:
            engine.mover.use(self._kv_store)
        return engine

    def _regroup(self, before: Layout, after: Layout, places: Mapping[SequenceId, int]) -> LocalEngine | None:
        engine = self._regroup_engine(before, after, places)
        self.layout = after
        return self._with_store(engine)

    def regroup(self, layout: Layout) -> None:
        """Takes this rank's place in another layout between two rollouts. All ranks of the world call it together."""
        before, self.layout = self.layout, layout
        if self.coordinator is not None:
            self.coordinator.assume(layout)
        if before.replica_of(self._world.rank) != layout.replica_of(self._world.rank):
            self._worker.regroup(before, layout, {})

    @property
    def engine(self) -> LocalEngine | None:
        """This rank's engine in the current layout."""
        return self._worker.engine

    @property
    def step_records(self) -> list[StepRecord]:
        """The steps of this rank's replicas in the last rollout."""
        return self._worker.step_records

    @property
    def switches(self) -> list[SwitchRecord]:
        """The regroups of this rank since it was made."""
        return self._worker.switches

    @property
    def marks(self) -> list[Mark]:
        """On rank 0, the decisions of the last rollout; empty on other ranks."""
        return self.coordinator.marks() if self.coordinator is not None else []

    @property
    def turn_spans(self) -> list[TurnSpan]:
        """On rank 0, where the last rollout's trajectories were, and when; empty on other ranks."""
        return self.coordinator.turn_spans() if self.coordinator is not None else []

    def roll_out(
        self,
        states: list[SequenceState],
        *,
        policy_version: int,
        on_finished: Callable[[Finished], None] | None = None,
        turns: Turns | None = None,
    ) -> list[Finished]:
        """Completes the sequences, the same on all ranks; returns all on every rank, in the order in which they ended.

        The coordinating thread on rank 0 calls `on_finished` for each sequence when it ends, and uses `turns`. Raises
        ValueError, on every rank, for an invalid layout of the layout policy; the unfinished sequences have then been
        aborted.
        """
        self._phase += 1
        finished: list[Finished] = []
        problems: list[BaseException] = []

        def coordinate(coordinator: Coordinator) -> None:
            try:
                finished.extend(
                    coordinator.roll_out(
                        states,
                        phase=self._phase,
                        policy_version=policy_version,
                        on_finished=on_finished,
                        turns=turns,
                    )
                )
            except BaseException as error:
                problems.append(error)
                coordinator.close()  # ends the workers' wait, on every rank

        thread = None
        if self.coordinator is not None:
            thread = threading.Thread(target=coordinate, args=(self.coordinator,), name="coordinator", daemon=True)
            thread.start()
        try:
            self._worker.run()
        except BaseException:
            self.has_failed = True
            if thread is not None and self.coordinator is not None and not problems:
                self.coordinator.stop()
                thread.join()
                problems.clear()
            self._drop_kv()
            if problems:
                raise problems[0] from None
            raise
        if thread is not None:
            thread.join()
            if problems:
                self.has_failed = True
                self._drop_kv()
                raise problems[0]
        return self._share(finished)

    def _share(self, finished: list[Finished]) -> list[Finished]:
        """Returns rank 0's finished sequences, and takes over its layout, on every rank."""
        outcome: Outcome | None = None
        if self.coordinator is not None:
            core = self.coordinator.core
            outcome = Outcome(finished, core.layout, core.layout_error)
        data = self._world.broadcast_bytes(None if outcome is None else msgspec.msgpack.encode(outcome))
        outcome = outcome or from_msgpack(data, Outcome)
        self.layout = outcome.layout
        if outcome.layout_error is not None:
            raise ValueError(outcome.layout_error)
        return outcome.finished

    def _drop_kv(self) -> None:
        if self.engine is not None:
            self.engine.mover.close()
        self._kv_store.close()

    def close(self) -> None:
        """Closes the connections, and drops KV that no replica has loaded. Returns quickly."""
        self._client.close()
        self._drop_kv()
        if self.coordinator is not None:
            self.coordinator.close()
