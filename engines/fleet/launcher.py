"""Starts replicas outside the torchrun world, reports which have ended, and leaves none running. Torch-free."""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import IO

import msgspec

from engines.config import EngineConfig
from engines.parallel.layout import ReplicaSpec
from engines.rollout.coordinator import Exit
from engines.rollout.pace import Pace

_TAIL_BYTES = 2000
_KILL_S = 10.0  # a process that takes longer to die is stuck in the kernel


class PaceData(msgspec.Struct, frozen=True, kw_only=True):
    """A pace as data, for a process that trusts the sender: it imports the class."""

    kind: str
    """module:class"""
    fields: msgspec.Raw

    @classmethod
    def of(cls, pace: Pace) -> PaceData:
        """Raises ValueError for a pace that another process could not make from this data."""
        kind = type(pace)
        with contextlib.suppress(AttributeError, OverflowError, TypeError, ValueError):
            data = cls(kind=f"{kind.__module__}:{kind.__qualname__}", fields=msgspec.Raw(msgspec.json.encode(pace)))
            if is_dataclass(pace) and kind.__module__ != "__main__" and data.make() == pace:
                return data
        raise ValueError(
            f"Fleet.pace={pace!r}: other processes cannot make it; give a dataclass with fields of plain values, "
            f"defined at the top level of a module that they can import"
        )

    def make(self) -> Pace:
        module, _, name = self.kind.partition(":")
        pace: Pace = msgspec.json.decode(self.fields, type=operator.attrgetter(name)(importlib.import_module(module)))
        return pace


class ReplicaOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a replica's process outside the world, which it reads as a line of JSON from stdin."""

    address: str
    """Address of the coordinator's `Server`."""
    token: bytes
    model: str
    """Folder of the checkpoint whose config and tokenizer are used; weights are loaded by a command."""
    config: EngineConfig
    kv_token: str
    kv_store_bytes: int
    max_kv_tokens: int | None = None
    """See `Replica`: the longest sequence of the Fleet, of which this replica may hold a part only."""
    spec: ReplicaSpec = ReplicaSpec(id=0, ranks=(0,))
    parent_pid: int = msgspec.field(default_factory=os.getpid)
    device: str = "cpu"
    interval_s: float = 1.0
    patience_s: float = 10.0
    pace: PaceData | None = None
    relay: str = ""
    """Address of the relay of weights; it knows the same token."""
    timeout_s: float = 60.0
    """How long a replica waits for weights that are still pushed."""


@dataclass(kw_only=True)
class _Launched:
    spec: ReplicaSpec
    process: subprocess.Popen[bytes]
    log: IO[bytes]


class ReplicaLauncher:
    """Runs one process per replica, each its own session; all die with this process. Any thread may call `launch`."""

    def __init__(self, orders: ReplicaOrders, *, num_threads: int = 1, log_folder: Path | None = None) -> None:
        """`num_threads` are torch's, per process. Each process gets `orders` with its own spec: ids and ranks count up
        from the id in `orders`.

        Output goes to `replica-<id>.log` in `log_folder`; without one, to unnamed files, of which only the end is read,
        when a process has ended.
        """
        self._orders = orders
        self._num_threads = num_threads
        self._log_folder = log_folder
        self._next_id = orders.spec.id
        self._launched: dict[int, _Launched] = {}
        # The kernel kills a child when the *thread* that made it ends: this thread ends with the launcher.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="replica-launcher")

    def launch(self) -> ReplicaSpec:
        """Starts a replica with an id that no other has had; it joins, and announces itself, some time later."""
        return self._spawner.submit(self._launch).result()

    def number(self) -> ReplicaSpec:
        """Returns a spec as `launch`, for a replica in a process that runs already. Any thread may call it."""
        return self._spawner.submit(self._number).result()

    def _number(self) -> ReplicaSpec:
        spec = ReplicaSpec(id=self._next_id, ranks=(self._next_id,))
        self._next_id += 1
        return spec

    def _launch(self) -> ReplicaSpec:
        spec = self._number()
        log: IO[bytes] = (
            open(self._log_folder / f"replica-{spec.id}.log", "w+b")  # noqa: SIM115 - kept until it has died
            if self._log_folder is not None
            else tempfile.TemporaryFile()  # noqa: SIM115
        )
        orders = msgspec.structs.replace(self._orders, spec=spec)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "engines.fleet.outside"],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"OMP_NUM_THREADS": str(self._num_threads)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            log.close()
            raise
        self._launched[spec.id] = _Launched(spec=spec, process=process, log=log)
        # Through a pipe: every user of the machine can read a command line, all code of this user an environment.
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended already: `poll` will report it
            process.stdin.write(msgspec.json.encode(orders) + b"\n")
        return spec

    def pids(self) -> dict[int, int]:
        """Returns the process id of each replica that `poll` has not reported as ended."""
        return {id_: one.process.pid for id_, one in self._launched.items()}

    def kill(self, replica_id: int) -> None:
        """Kills a replica's process at once, even a stopped one; `poll` will report it. No effect if it has ended."""
        launched = self._launched.get(replica_id)
        if launched is not None and launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGKILL)

    def poll(self) -> list[Exit]:
        """Returns the processes that have ended since the last call, each once."""
        exits = []
        for replica_id, one in list(self._launched.items()):
            if (code := one.process.poll()) is not None:
                exits.append(Exit(replica_id=replica_id, code=code, log_tail=_tail(one.log)))
                one.log.close()
                del self._launched[replica_id]
        return exits

    def close(self, grace_s: float = 0.0) -> None:
        """Waits `grace_s` seconds for all processes to end by themselves, then kills the rest and waits for their end.

        Raises RuntimeError that names the processes which outlived SIGKILL. May be called twice.
        """
        _wait_for(list(self._launched.values()), grace_s)
        for replica_id in list(self._launched):
            self.kill(replica_id)
        left = _wait_for(list(self._launched.values()), _KILL_S)
        self.poll()
        self._spawner.shutdown(wait=True)
        if left:
            names = ", ".join(f"replica {one.spec.id} (pid {one.process.pid})" for one in left)
            raise RuntimeError(f"launcher: {names} outlived SIGKILL for {_KILL_S:g} s; look for a stuck device or disk")


def _wait_for(launched: list[_Launched], seconds: float) -> list[_Launched]:
    """Returns the processes that still run after that time."""
    deadline = time.monotonic() + seconds
    while left := [one for one in launched if one.process.poll() is None]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return left


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
