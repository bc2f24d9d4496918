"""Coordinated rollouts in a torchrun world: every rank steps its replica, a thread on rank 0 says who runs what."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import msgspec

from engines.control.sealing import new_token
from engines.control.transport import Client, Server
from engines.coordination.core import RolloutCore
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.kvcache.files import FileKVStore
from engines.kvcache.peer import PeerKVStore
from engines.kvcache.tiers import TieredKVStore
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout
from engines.replica.engine import LocalEngine
from engines.rollout.coordinator import Coordinator, peer_of
from engines.rollout.pace import Pace
from engines.rollout.telemetry import Mark, StepRecord
from engines.rollout.worker import Worker
from engines.sequence import Finished, SequenceState


class Launch(msgspec.Struct, frozen=True):
    """What rank 0 sends the others so that they find it, and each other's KV."""

    address: str
    token: bytes
    kv_token: str


class Outcome(msgspec.Struct, frozen=True):
    """What rank 0 sends the others when a rollout has ended."""

    finished: list[Finished]
    layout: Layout
    layout_error: str | None


class RolloutWorld:
    """This rank's part. Made, used and closed by all ranks of the world together.

    The calling thread steps the replica and runs every collective; on rank 0 a second one coordinates.
    """

    def __init__(
        self,
        groups: GroupCache,
        layout: Layout,
        *,
        engine: LocalEngine | None,
        rebuild: Callable[[Layout], LocalEngine | None],
        make_kv_store: Callable[[str], FileKVStore | TieredKVStore],
        schedule_policy: SchedulePolicy,
        layout_policy: LayoutPolicy | None = None,
        check_layout: Callable[[Layout], None] | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`rebuild`: see `Worker`; `check_layout`: see `RolloutCore`. `make_kv_store` makes this rank's store of the
        run's token, for KV on its way to other replicas and of preempted sequences.

        Waits are as long as the groups'. Listens on the loopback where all ranks are on one host, else where its host
        is reached on the way to rank 0's (`GroupCache.address`).
        """
        address, timeout_s = groups.address, groups.timeout_s
        world = self._world = groups.world
        self._phase = -1
        self.layout = layout
        """The present one, where this rank takes part in each regroup; after a rollout on every rank."""
        self.has_failed = False
        """Whether a rollout has ended by an error that closed the connections between the ranks."""
        self.coordinator: Coordinator | None = None
        launch, server = self._meet(address, timeout_s)
        self._client = Client(peer_of(world.rank), launch.address, launch.token, patience_s=timeout_s)
        local_store = make_kv_store(launch.kv_token)
        self._kv_store: FileKVStore | TieredKVStore | PeerKVStore = local_store
        if len(set(groups.hosts)) > 1:
            host = groups.hosts[world.rank]
            self._kv_store = PeerKVStore(local_store, host=host, address=address, token=launch.token)
        self._rebuild_engine = rebuild
        if server is not None:
            core = RolloutCore(
                layout=layout,
                world_size=world.size,
                schedule_policy=schedule_policy,
                layout_policy=layout_policy,
                check_layout=check_layout,
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
            rebuild=self._rebuild,
            pace=pace,
        )

    def _meet(self, address: str, timeout_s: float) -> tuple[Launch, Server | None]:
        """Where rank 0 listens, for every rank; on rank 0 also its end."""
        if self._world.rank:
            return msgspec.msgpack.decode(self._world.broadcast_bytes(None), type=Launch), None
        token = new_token()
        server = Server(token, host=address, patience_s=timeout_s)
        launch = Launch(address=server.address, token=token, kv_token=secrets.token_hex(16))
        self._world.broadcast_bytes(msgspec.msgpack.encode(launch))
        return launch, server

    def _with_store(self, engine: LocalEngine | None) -> LocalEngine | None:
        if engine is not None:
            engine.mover.use(self._kv_store)
        return engine

    def _rebuild(self, layout: Layout) -> LocalEngine | None:
        engine = self._rebuild_engine(layout)
        self.layout = layout
        return self._with_store(engine)

    @property
    def engine(self) -> LocalEngine | None:
        """This rank's engine in the current layout."""
        return self._worker.engine

    @property
    def step_records(self) -> list[StepRecord]:
        """Of this rank's replica in the last rollout."""
        return self._worker.step_records

    @property
    def marks(self) -> list[Mark]:
        """On rank 0, what was decided in the last rollout; elsewhere nothing."""
        return self.coordinator.marks() if self.coordinator is not None else []

    def roll_out(
        self,
        states: list[SequenceState],
        *,
        policy_version: int,
        on_finished: Callable[[Finished], None] | None = None,
    ) -> list[Finished]:
        """Completes the sequences, which all ranks name alike; every rank gets all, in the order in which they ended.

        `on_finished` is called on rank 0 as each one ends, by the coordinating thread. Raises ValueError, on every
        rank, for a layout of the layout policy that cannot be had; what was running has then ended by `abort`.
        """
        self._phase += 1
        finished: list[Finished] = []
        problems: list[BaseException] = []

        def coordinate(coordinator: Coordinator) -> None:
            try:
                finished.extend(
                    coordinator.roll_out(
                        states, phase=self._phase, policy_version=policy_version, on_finished=on_finished
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
            if problems:
                raise problems[0] from None
            raise
        if thread is not None:
            thread.join()
            if problems:
                self.has_failed = True
                raise problems[0]
        return self._share(finished)

    def _share(self, finished: list[Finished]) -> list[Finished]:
        """What rank 0 has heard, on every rank."""
        outcome: Outcome | None = None
        if self.coordinator is not None:
            core = self.coordinator.core
            outcome = Outcome(finished, core.layout, core.layout_error)
        data = self._world.broadcast_bytes(None if outcome is None else msgspec.msgpack.encode(outcome))
        outcome = outcome or msgspec.msgpack.decode(data, type=Outcome)
        self.layout = outcome.layout
        if outcome.layout_error is not None:
            raise ValueError(outcome.layout_error)
        return outcome.finished

    def close(self) -> None:
        """Ends the connections, and drops KV that nobody came for. Prompt."""
        self._client.close()
        self._kv_store.close()
        if self.coordinator is not None:
            self.coordinator.close()
