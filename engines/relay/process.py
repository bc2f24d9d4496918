"""Starts a relay's process, and starts it again when it has died. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Annotated

import msgspec
import numpy as np
from msgspec import Meta

from engines.constraints import Count, Seconds, check_value
from engines.relay.client import Relay
from engines.relay.message import BIT_TYPES, DType
from engines.relay.server import RelayOrders

_START_S = 30.0
_LEAST_LIFE_S = 5.0
_MOST_FAILURES = 3
_TAIL_BYTES = 2000
Port = Annotated[int, Meta(ge=0, le=65535, description="an integer from 0 to 65535")]


def room_for(num_elements: int, dtype: DType) -> int:
    """Returns the bytes that a relay of a model needs at most: dense messages of two versions, and what stands on the
    older ones: up to half as large, and one message more; and headers."""
    return 7 * num_elements * np.dtype(BIT_TYPES[dtype]).itemsize // 2 + (64 << 20)


class RelayProcess:
    """A relay at one address as long as this object is open. What it kept is gone when it had to be started again;
    trainers then push all weights once more."""

    def __init__(
        self,
        token: bytes,
        *,
        max_bytes: int,
        model: tuple[str, str, int] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        patience_s: float = 10.0,
        timeout_s: float = 600.0,
    ) -> None:
        """`host`: the address of this machine at which clients reach it; `port` 0: any free one; `model`: see
        `RelayStore`; the times are those of `Relay`. Raises ValueError for an invalid number, RuntimeError with the
        process's last words if it cannot be started."""
        for name, value, hint in (
            ("max_bytes", max_bytes, Count),
            ("port", port, Port),
            ("patience_s", patience_s, Seconds),
            ("timeout_s", timeout_s, Seconds),
        ):
            check_value(f"RelayProcess.{name}", value, hint)
        self._orders = RelayOrders(
            token=token, host=host, port=port, max_bytes=max_bytes, patience_s=patience_s, model=model
        )
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._address, self._problem = "", ""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept until `close`
        self._is_closing = False
        self._started = threading.Event()
        # The kernel kills the process when the thread that has made it ends: this one lives as long as the relay.
        self._thread = threading.Thread(target=self._keep_alive, name="relay-process", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_S) or not self._address:
            self.close()
            raise RuntimeError(f"relay: did not start at {host}:{port} ({self._problem or f'in {_START_S:g} s'})")
        self.relay = Relay(self._address, token, patience_s=patience_s, timeout_s=timeout_s)

    def _keep_alive(self) -> None:
        failures = 0
        while not self._is_closing and failures < _MOST_FAILURES:
            began = time.monotonic()
            self._start()
            self._started.set()
            assert self.process is not None
            if self._is_closing:  # since before this one was there
                self.process.kill()
            code = self.process.wait()
            if not self._is_closing:
                self._tell(f"has ended with code {code} ({self._last_words()}); trainers push all weights again")
            failures = 0 if time.monotonic() - began > _LEAST_LIFE_S else failures + 1
        if not self._is_closing:
            self._tell(f"has died {_MOST_FAILURES} times; it is not started again")

    @staticmethod
    def _tell(what: str) -> None:
        print(f"relay: {what}", file=sys.stderr, flush=True)

    def _last_words(self) -> str:
        """Returns the last line that the process has printed as an error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip().rpartition("\n")[2] or "it printed nothing"

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engines.relay.server"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for its parent, with which it dies
        )
        self.num_starts += 1
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            with self.process.stdin as stdin:
                stdin.write(msgspec.json.encode(self._orders) + b"\n")
        except BrokenPipeError:
            pass
        with self.process.stdout as stdout:
            address = stdout.readline().decode().strip()
        if not address and not self._address:
            self.process.wait()
            self._problem, self._is_closing = self._last_words(), True
        if address and not self._address:
            self._address = address
            self._orders = msgspec.structs.replace(self._orders, port=int(address.rpartition(":")[2]))

    def close(self) -> None:
        """Ends the process. May be called twice."""
        self._is_closing = True
        if self.process is not None:
            self.process.kill()
        self._thread.join(_START_S)
        self._log.close()
