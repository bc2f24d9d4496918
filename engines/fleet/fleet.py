"""Rollouts without a torchrun world: replicas in processes of their own, which may be added or lost at any time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from engines.config import ModelConfig, engine_config
from engines.constraints import WholeNumber, check_value
from engines.control.messages import ReplicaLost
from engines.control.sealing import new_token
from engines.control.transport import Server
from engines.coordination.core import RolloutCore
from engines.coordination.policies import OnDemand, SchedulePolicy
from engines.fleet.borrowing import Agreement, BorrowOrders, ask_for_loan
from engines.fleet.launcher import PaceData, ReplicaLauncher, ReplicaOrders
from engines.fleet.planning import check_folders, check_numbers, plan
from engines.fleet.relayed import RelayedWeights, source_of, version_of
from engines.fleet.weights import PublishedWeights
from engines.kvcache.tiers import host_pool_bytes, make_kv_store, reclaim_tiers
from engines.models.chat import ChatTemplate
from engines.models.tokenizer import detokenizer, tokenizer_digest, with_end_token
from engines.parallel.layout import Layout, ReplicaSpec
from engines.relay.client import Relay
from engines.relay.requests import Version
from engines.replica.endings import Endings
from engines.replica.preflight import check_policy, usable_device
from engines.rollout.coordinator import POLL_S, Coordinator
from engines.rollout.environment import Environments
from engines.rollout.pace import Pace
from engines.rollout.turns import Columns, Turns
from engines.sequence import Finished, SequenceState

_GRACE_S = 5.0  # time for replicas to end by themselves


class Fleet:
    """Replicas of one rank each, and the coordinator that dispatches sequences to them.

    A replica that dies, hangs or loses its connection is dropped, and other replicas complete its sequences, with the
    same tokens. Any thread may call `launch` and `borrow`, at any time; all other methods
    are for one thread.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_replicas: int,
        schedule_policy: SchedulePolicy | None = None,
        device: str | torch.device = "cpu",
        num_threads: int = 1,
        weights: Literal["folder", "relay"] = "folder",
        weights_folder: str | Path | None = None,
        log_folder: str | Path | None = None,
        kv_store_bytes: int = 2**30,
        timeout_s: float = 60.0,
        patience_s: float = 10.0,
        pace: Pace | None = None,
        **options: Any,
    ) -> None:
        """`model` is a Hugging Face checkpoint with the weights of the first phase; `options` are the fields of
        `EngineConfig`. The policy must use `view.replicas`, as there is no layout. `publish` writes to a new folder in
        `weights_folder` (by default the temporary folder), or, with `weights="relay"`, pushes to a relay on this host,
        from which replicas pull what has changed. A replica is dropped after `patience_s` seconds without any
        message, or `timeout_s` without a due answer or step; see `ReplicaLauncher` and `ReplicaOrders`. With a `pace`,
        a dataclass, steps and transfers take at least its seconds. Raises FileNotFoundError or ValueError, naming
        field, value and fix, before anything is made.
        """
        check_numbers(
            num_replicas=num_replicas,
            num_threads=num_threads,
            kv_store_bytes=kv_store_bytes,
            timeout_s=timeout_s,
            patience_s=patience_s,
        )
        check_value("Fleet.weights", weights, Literal["folder", "relay"])
        if weights == "relay" and weights_folder is not None:
            raise ValueError(f"Fleet.weights_folder={str(weights_folder)!r}: with weights='relay' there is none")
        check_folders(weights_folder=weights_folder, log_folder=log_folder)
        schedule_policy = OnDemand() if schedule_policy is None else schedule_policy
        check_policy("schedule_policy", schedule_policy, "next")
        for method in ("step", "transfer", "switch") if pace is not None else ():
            check_policy("Fleet.pace", pace, method)
        where = usable_device("Fleet", device)
        config, self._limits, self._tokenizer = plan(
            model, engine_config("Fleet", options), where, max(1, num_replicas)
        )
        if config.kv_host_bytes is not None:
            kv_store_bytes = host_pool_bytes(config.kv_host_bytes, num_ranks=max(1, num_replicas))
        model = Path(model).resolve()  # replicas run in another folder
        self._kv_disk_folder = config.kv_disk_folder
        self._timeout_s = timeout_s
        self._phase = -1
        orders = ReplicaOrders(
            address="",
            token=new_token(),
            model=str(model),
            config=config,
            device=str(where),
            kv_token=secrets.token_hex(16),
            kv_store_bytes=kv_store_bytes,
            max_kv_tokens=self._limits.num_kv_tokens,
            interval_s=min(1.0, patience_s / 5),
            patience_s=patience_s,
            pace=None if pace is None else PaceData.of(pace),
        )
        with ExitStack() as undo:
            self._weights: PublishedWeights | RelayedWeights
            if weights == "relay":
                self._weights = RelayedWeights(model, config, orders.token, timeout_s=timeout_s, patience_s=patience_s)
                orders = msgspec.structs.replace(orders, relay=self._weights.relay.address, timeout_s=timeout_s)
            else:
                self._weights = PublishedWeights(model, weights_folder)
            undo.callback(self._weights.close)
            self._connect(orders, schedule_policy, undo, num_threads, log_folder)
            for _ in range(num_replicas):
                self.launch()
            undo.pop_all()

    def _connect(
        self,
        orders: ReplicaOrders,
        schedule_policy: SchedulePolicy,
        undo: ExitStack,
        num_threads: int,
        log_folder: str | Path | None,
    ) -> None:
        self._server = Server(orders.token, interval_s=orders.interval_s, patience_s=orders.patience_s)
        undo.callback(self._server.close)
        self._orders = orders = msgspec.structs.replace(orders, address=self._server.address)
        logs = None if log_folder is None else Path(log_folder)
        self.launcher = ReplicaLauncher(orders, num_threads=num_threads, log_folder=logs)
        undo.callback(self.launcher.close)
        core = RolloutCore(
            layout=Layout(epoch=0, replicas=()),
            world_size=0,
            schedule_policy=schedule_policy,
            timeout_s=self._timeout_s,
        )
        store = make_kv_store(  # only to drop KV that replicas have stored
            orders.kv_token, host_bytes=0, disk_bytes=0, disk_parent=self._kv_disk_folder
        )
        self.coordinator = Coordinator(
            core,
            self._server,
            num_ranks=0,
            timeout_s=self._timeout_s,
            drop_kv=store.drop,
            launcher=self.launcher,
            check_state=self._check,
        )

    def launch(self) -> ReplicaSpec:
        """Adds a replica, which takes part as soon as it has started and loaded the weights of the phase."""
        spec = self.launcher.launch()
        self.coordinator.add_replica(spec)
        return spec

    def borrow(self, url: str, *, api_key: str | None = None) -> ReplicaSpec:
        """Borrows a serving process (`serve.py --rollout-model`) as a replica, which takes part as `launch`'s does.

        The loan ends with the fleet, or when the replica is lost. `api_key` is the server's. Raises ValueError if that
        server has another model or other options, RuntimeError while it is lent to another job, ConnectionError if it
        does not answer within `timeout_s`.
        """
        orders = self._orders
        model = ModelConfig.from_pretrained(orders.model)
        agreement = Agreement(
            model=with_end_token(model, self._tokenizer),
            dtype=orders.config.dtype,
            block_size=orders.config.block_size,
            max_model_len=self._limits.max_model_len,
            batch_invariant=orders.config.batch_invariant,
            tokenizer=tokenizer_digest(self._tokenizer),
            is_paced=orders.pace is not None,
        )
        spec = self.launcher.number()
        asked = BorrowOrders(
            address=orders.address,
            token=orders.token,
            replica_id=spec.id,
            relay=orders.relay or None,
            interval_s=orders.interval_s,
            patience_s=orders.patience_s,
            timeout_s=self._timeout_s,
            max_kv_tokens=self._limits.num_kv_tokens,
            agreement=agreement,
        )
        self.coordinator.add_replica(spec)  # before it can announce itself
        try:
            ask_for_loan(url, asked, api_key=api_key, timeout_s=self._timeout_s)
        except BaseException as error:
            self.coordinator.post(ReplicaLost.of(spec.id, spec.ranks[0], f"was not lent: {error}"))
            raise
        return spec

    def wait_for_replicas(self, num_replicas: int) -> None:
        """Returns when `num_replicas` replicas are ready. For use between phases only.

        Raises RuntimeError, naming the lost replicas, after `timeout_s` seconds, or when all replicas are lost.
        """
        start = time.monotonic()
        self.coordinator.pump(0.0)
        while (num_ready := self.num_ready) < num_replicas:
            waited_s = time.monotonic() - start
            if waited_s > self._timeout_s or not self.coordinator.outside:
                lost = "".join(f"\n  lost: {one}" for one in self.coordinator.lost)
                raise RuntimeError(
                    f"fleet: {num_ready} replicas stand by after {waited_s:.1f} s, {num_replicas} wanted; "
                    f"starting: {sorted(set(self.coordinator.outside) - self.coordinator.standing_by)}{lost}"
                )
            self.coordinator.pump(POLL_S)

    @property
    def num_ready(self) -> int:
        """Number of replicas that have announced themselves and are not known to be lost."""
        return len(self.coordinator.standing_by)

    @property
    def relay(self) -> Relay:
        """Where trainers push, with `weights="relay"`. Raises ValueError without."""
        if not isinstance(self._weights, RelayedWeights):
            raise ValueError("Fleet.weights='folder': has no relay; make it with weights='relay'")
        return self._weights.relay

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path | str:
        """Writes weights for the replicas to load, completely or not at all; returns the folder, or the session at the
        relay.

        Raises ValueError unless names and shapes are those of the checkpoint, and, by a relay, for a `version` that is
        not above the last one. Weights published before are removed: at once, or, if a running rollout loads them, at
        its end.
        """
        check_value("version", version, WholeNumber)
        return self._weights.publish(weights, version)

    def roll_out(
        self,
        states: list[SequenceState],
        *,
        policy_version: int | None = None,
        weights_source: str | Path | Version | None = None,
        on_finished: Callable[[Finished], None] | None = None,
        environment: Environments | None = None,
        columns: Mapping[int, Columns] | None = None,
        in_chat: bool = False,
    ) -> list[Finished]:
        """Completes the sequences; returns them in the order in which they ended, each once, even if replicas die.

        An `environment` is for those that are `in_turns`: see `LLM.generate`. `columns` are by prompt uid; `in_chat`:
        whether prompts were rendered with the chat template, without the opening of an answer.

        `policy_version` is by default the version published last, at first the checkpoint as version 0. Replicas with
        another version load its weights, from where they were published last, or from `weights_source`: a folder, or
        what a `Pusher` has pushed to `relay`, for which they wait beside the rollout of others. Raises ValueError,
        before any sequence has begun, for one that could never run or a version without weights. Raises RuntimeError,
        naming the lost replicas and why, when there was no replica for `timeout_s` seconds. After an error of a policy
        or of `on_finished`, and after an interrupt, another rollout may follow.
        """
        if isinstance(weights_source, Version):
            policy_version, weights_source = weights_source.number, source_of(weights_source)
        if policy_version is None:
            policy_version = self._weights.version
        check_value("policy_version", policy_version, WholeNumber)
        if weights_source is None and policy_version != self._weights.version:
            raise ValueError(
                f"policy_version={policy_version}: version {self._weights.version} was published last; publish the "
                f"weights of this one first, or name their folder as weights_source"
            )
        self._phase += 1
        num_lost = len(self.coordinator.lost)
        source = str(weights_source or self._weights.source)
        if version_of(source, policy_version) is None:
            source = str(Path(source).resolve())
        self._weights.in_use = source
        try:
            return self.coordinator.roll_out(
                states,
                phase=self._phase,
                policy_version=policy_version,
                weights_source=source,
                on_finished=on_finished,
                turns=None if environment is None else self._turns(environment, columns or {}, in_chat),
            )
        finally:
            if self.coordinator.core.phase is None:
                self._weights.in_use = None
                self._weights.remove_outdated()
                if len(self.coordinator.lost) > num_lost:
                    # Removes KV that dead replicas stored and never reported; no unfinished sequence can use it.
                    reclaim_tiers(self._kv_disk_folder)

    def _turns(self, environment: Environments, columns: Mapping[int, Columns], in_chat: bool) -> Turns:
        """Raises ValueError without a tokenizer."""
        if self._tokenizer is None:
            raise ValueError("environment: reads the text of turns; give a model with a tokenizer")
        template = ChatTemplate(tokenizer=self._tokenizer)
        return Turns(
            environment,
            columns=columns,
            encode=lambda _, answer, said: template.observe(answer.text, answer.role, said, is_rendered=in_chat),
            endings=Endings(eos_token_ids=(), detokenize=detokenizer(self._tokenizer)),
            max_model_len=self._limits.max_model_len,
        )

    def _check(self, state: SequenceState) -> None:
        """Raises ValueError for a sequence that no replica could run, or that could not be sent to one."""
        try:
            SequenceState.from_bytes(state.to_bytes())
        except (TypeError, OverflowError, msgspec.ValidationError) as error:
            raise ValueError(f"{error}; use Python's own numbers, of the types that SequenceState names") from None
        self._limits.check_state(state)

    def close(self) -> None:
        """Ends all replicas; no process, file or connection is left. May be called twice."""
        core = self.coordinator.core
        grace_s = 0.0
        if core.phase is None and core.failed is None:
            grace_s = _GRACE_S
            self.coordinator.shut_down()
            for replica_id in set(self.launcher.pids()) - self.coordinator.standing_by:
                self.launcher.kill(replica_id)  # still starting, it cannot receive the command
        try:
            self.launcher.close(grace_s)
        finally:
            self._server.close()
            self._weights.close()
            reclaim_tiers(self._kv_disk_folder)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
