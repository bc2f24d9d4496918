"""The processes of a relay's schedule, as the schedule sees them: they are given commands, killed and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.faults.relay_process import Close, Model, Reply
from tests.worlds import Python

START_S = 30.0
_CODE = "from tests.faults.relay_process import main; main()"


class End:
    """A process that has its orders. `reply` is how it answers each of them, and each command, in order."""

    def __init__(self, process: Python, connection: Connection) -> None:
        self.process, self._connection = process, connection
        self.is_alive = True
        self.num_due = 1

    def send(self, command: Any) -> None:
        """Commands to a process that has been killed are lost."""
        with contextlib.suppress(OSError):
            self._connection.send(command)
            self.num_due += 1

    def reply(self, timeout_s: float) -> Reply | None:
        """None if none came; then it may have died."""
        try:
            if self._connection.poll(timeout_s):
                reply: Reply = self._connection.recv()
                self.num_due -= 1
                return reply
        except (EOFError, OSError):
            self.is_alive = False
        return None

    def kill(self) -> None:
        """Returns once it has ended."""
        self.is_alive = False
        self.process.__exit__()
        self._connection.close()

    def stop(self, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(self.process.pid, signal.SIGCONT)

    def close(self, timeout_s: float) -> None:
        """Raises AssertionError unless it ends by itself, with no thread left."""
        self.send(Close())
        deadline, reply = time.monotonic() + timeout_s, None
        while self.num_due and self.is_alive:
            assert time.monotonic() < deadline, f"close(): no answer for {timeout_s:g} s"
            reply = self.reply(0.1) or reply
        assert reply is not None and not reply.threads, f"close(): {reply}"
        assert self.process.wait(max(0.0, deadline - time.monotonic())) == 0, self.process.stderr
        self.kill()


class Ends:
    """All processes that a schedule has started."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "socket"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen()
        self._socket.settimeout(START_S)
        self.started: list[End] = []

    def start(self, orders: list[Any]) -> list[End]:
        """Returns once all have their orders, which they have yet to answer."""
        processes = [Python(["-c", _CODE, str(self._path)]) for _ in orders]
        by_pid: dict[int, Connection] = {}
        for _ in orders:
            accepted, _ = self._socket.accept()
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            by_pid[struct.unpack("3i", credentials)[0]] = Connection(accepted.detach())
        ends = [End(process, by_pid[process.pid]) for process in processes]
        self.started += ends
        for end, order in zip(ends, orders, strict=True):
            end._connection.send((self._model, order))
        return ends

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.started:
            end.kill()
        self._socket.close()
        self._folder.cleanup()
