"""A rollout without a torchrun world: replicas in processes of their own, which may come, die and go."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from engines.config import EngineConfig
from engines.control.sealing import new_token
from engines.control.transport import Server
from engines.kvcache.transfer import HostKVStore, reclaim
from engines.parallel.layout import Layout, ReplicaSpec
from engines.rollout.coordinator import POLL_S, Coordinator
from engines.rollout.core import RolloutCore
from engines.rollout.launcher import ReplicaLauncher
from engines.rollout.policies import OnDemand, SchedulePolicy
from engines.rollout.worker import NO_WEIGHTS
from engines.sequence import Finished, SequenceState

SHARD_BYTES = 2**30
_GRACE_S = 5.0  # that replicas get to end by themselves


class Fleet:
    """Replicas of one rank each, and the coordinator that shares sequences out to them.

    A replica that dies, hangs or loses its connection is given up, and what it had is rolled out elsewhere, to the same
    tokens. `launch` may be called at any time, by any thread; all else belongs to one thread.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_replicas: int,
        schedule_policy: SchedulePolicy | None = None,
        device: str = "cpu",
        num_threads: int = 1,
        weights_folder: Path | None = None,
        log_folder: Path | None = None,
        kv_store_bytes: int = 2**30,
        timeout_s: float = 60.0,
        patience_s: float = 10.0,
        min_step_s: float = 0.0,
        **options: Any,
    ) -> None:
        """`model` is a Hugging Face checkpoint, whose weights are those of the first phase; `options` are the fields of
        `EngineConfig`. The policy is to go by `view.replicas`, as there is no layout. `publish` writes to a new folder
        in `weights_folder` (by default the temporary one).

        A replica is given up when it was silent on the network for `patience_s` seconds, or owes an answer or a step
        for `timeout_s`. For the other arguments see `ReplicaLauncher`.
        """
        self._timeout_s = timeout_s
        self._phase = NO_WEIGHTS
        self._model = Path(model).resolve()  # replicas run in another folder
        self._source = str(self._model)
        self._weights_folder = Path(tempfile.mkdtemp(prefix="curtail-weights-", dir=weights_folder))
        token, kv_token = new_token(), secrets.token_hex(16)
        reclaim(keep_token=kv_token)
        self._kv_store = HostKVStore(kv_token, 0)  # only to drop what others have made
        interval_s = min(1.0, patience_s / 5)
        self._server = Server(token, interval_s=interval_s, patience_s=patience_s)
        self.launcher = ReplicaLauncher(
            address=self._server.address,
            token=token,
            model=self._model,
            config=EngineConfig(**options),
            device=device,
            num_threads=num_threads,
            kv_token=kv_token,
            kv_store_bytes=kv_store_bytes,
            interval_s=interval_s,
            patience_s=patience_s,
            min_step_s=min_step_s,
            log_folder=log_folder,
        )
        core = RolloutCore(
            layout=Layout(epoch=0, replicas=()),
            world_size=0,
            schedule_policy=schedule_policy or OnDemand(),
            timeout_s=timeout_s,
        )
        self.coordinator = Coordinator(
            core,
            self._server,
            num_ranks=0,
            timeout_s=timeout_s,
            drop_kv=self._kv_store.drop,
            launcher=self.launcher,
        )
        for _ in range(num_replicas):
            self.launch()

    def launch(self) -> ReplicaSpec:
        """Adds a replica, which takes part as soon as it has started and loaded the weights of the phase."""
        spec = self.launcher.launch()
        self.coordinator.add_replica(spec)
        return spec

    def wait_for_replicas(self, num_replicas: int) -> None:
        """Returns when so many stand by. Between phases only.

        Raises RuntimeError, naming those that were lost, when they do not within `timeout_s` seconds, or all are lost.
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
        """Replicas that have announced themselves and were not lost, as far as is known."""
        return len(self.coordinator.standing_by)

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Writes weights where the replicas will load them from, whole or not at all; returns the folder.

        Names and shapes are those of the checkpoint. The next `roll_out` is to name this `version`; a replica that has
        it does not load it again, so that new weights need a new one.
        """
        target = self._weights_folder / f"version-{version}"
        partial = self._weights_folder / f".version-{version}.partial"
        for folder in (partial, target):
            shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir()
        _write_shards(partial, weights)
        shutil.copyfile(self._model / "config.json", partial / "config.json")
        for path in partial.iterdir():
            _flush(path)
        partial.rename(target)
        outdated, self._source = Path(self._source), str(target)
        if outdated.parent == self._weights_folder and outdated != target:
            shutil.rmtree(outdated)
        return target

    def roll_out(
        self,
        states: list[SequenceState],
        *,
        policy_version: int = 0,
        weights_source: str | Path | None = None,
        on_finished: Callable[[Finished], None] | None = None,
    ) -> list[Finished]:
        """Completes the sequences; returns them in the order in which they ended, each once, whoever dies.

        Replicas that do not have the weights of `policy_version` load them: what was published last, at first the
        checkpoint, or `weights_source`. Raises RuntimeError, naming those that were lost and why, when for `timeout_s`
        seconds none was left and none came.
        """
        self._phase += 1
        num_lost = len(self.coordinator.lost)
        finished = self.coordinator.roll_out(
            states,
            phase=self._phase,
            policy_version=policy_version,
            weights_source=str(Path(weights_source or self._source).resolve()),
            on_finished=on_finished,
        )
        if len(self.coordinator.lost) > num_lost:
            reclaim()  # KV of the dead that nobody was told of; no sequence is left that could want it
        return finished

    def close(self) -> None:
        """Ends all replicas; no process, file or connection is left. May be called twice."""
        core = self.coordinator.core
        grace_s = 0.0
        if core.phase is None and core.failed is None:
            grace_s = _GRACE_S
            self.coordinator.shut_down()
            for replica_id in set(self.launcher.pids()) - self.coordinator.standing_by:
                self.launcher.kill(replica_id)  # it is starting, and hears nothing
        try:
            self.launcher.close(grace_s)
        finally:
            self._server.close()
            shutil.rmtree(self._weights_folder, ignore_errors=True)
            reclaim()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_shards(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Files of about `SHARD_BYTES`, one in memory at a time, and the index that names them."""
    places: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    num_files = 0

    def flush() -> None:
        nonlocal num_files
        num_files += 1
        filename = f"model-{num_files:05}.safetensors"
        save_file(pending, folder / filename, metadata={"format": "pt"})
        places.update(dict.fromkeys(pending, filename))
        pending.clear()

    for name, tensor in weights:
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(one.nbytes for one in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
