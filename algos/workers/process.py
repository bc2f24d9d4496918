"""The run's side of a process that runs user code: starts it, connects to it, kills it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from algos.workers.messages import receive
from engines.decoding import DecodeError

_END_S = 10.0
"""Most seconds that a guard may take to kill the remaining processes."""


class WorkerError(Exception):
    """The worker could not be started; the message says why."""


class Loaded(Protocol):
    """A worker's first message."""

    @property
    def error(self) -> str:
        """Why user code could not be loaded, or nothing."""
        ...


Ready = TypeVar("Ready", bound=Loaded)


class WorkerProcess(Generic[Ready]):
    """The worker and its guard, the connection to the worker, and the guard's lifeline, a pipe on its stdin (guard.py).

    All processes that they start inherit a random mark in their environment. If user code has killed or stopped the
    guard, `kill` ends the processes that carry the mark.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        ready: type[Ready],
        timeout_s: float,
        *,
        environ: Mapping[str, str] = os.environ,
        folder: str = "",
    ) -> None:
        """Runs `python -m module`, which calls `start_worker` (user_code.py) and sends a `ready`. `folder`: where it
        works, removed at its end.

        Raises `WorkerError` when the process is not ready after `timeout_s` or cannot load the user's code.
        """
        self._mark = secrets.token_hex(16)
        deadline = time.monotonic() + timeout_s
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        sys_path = json.dumps([*map(os.path.abspath, sys.path)])  # the worker uses the run's import path
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), sys_path, folder, *arguments],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**environ, "PYTHONPATH": path, "CURTAIL_WORKER": self._mark},
                cwd=folder or None,
            )
        try:
            self.ready = receive(self.sock, ready, deadline=deadline)
        except TimeoutError:
            self.kill()
            raise WorkerError(f"its imports took more than start_timeout_s={timeout_s:g} s") from None
        except (EOFError, ConnectionError, DecodeError):
            raise WorkerError(f"the process {self.kill()} while importing it; see stderr") from None
        except BaseException:
            self.kill()
            raise
        if self.ready.error:
            self.kill()
            raise WorkerError(self.ready.error)

    def has_ended(self) -> bool:
        """Whether the process has exited or closed the connection, so that it cannot answer requests."""
        poller = select.poll()
        poller.register(self.sock, 0)  # poll reports a closed connection even with an empty event mask
        return self.process.poll() is not None or bool(poller.poll(0))

    def kill(self) -> str:
        """Kills the process and all processes it has started, frees its descriptors, and returns how it had ended."""
        self.process.send_signal(signal.SIGCONT)  # user code may have stopped the guard
        try:  # sends a message, since closing the lifeline has no effect while another process holds it open
            self.process.communicate(b"end", timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.sock.close()
        code = self.process.returncode
        if code < 0:  # the guard itself was killed before it had finished
            self._kill_marked()
        name = next((one.name for one in signal.Signals if one in (code - 128, -code)), None)
        return f"was killed by {name}" if name else f"exited with status {code}"

    def _kill_marked(self) -> None:
        """Kills all processes with the mark in their environment, until none is left or `_END_S` have passed."""
        deadline, is_left = time.monotonic() + _END_S, True
        while is_left and time.monotonic() < deadline:
            is_left = False
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # another user's, or gone
                    environ = environment(process)
                    if environ is None:
                        is_left = True
                    elif self._mark.encode() in environ:
                        os.kill(int(process.name), signal.SIGKILL)
                        is_left = True


def environment(process: Path) -> bytes | None:
    """Returns the environment of a process in /proc, None while it starts another program, as Linux shows none then.
    Raises OSError for a process that has ended, or that may not be read."""
    for _ in range(5):  # it may have started the program between the two reads
        if environ := (process / "environ").read_bytes():
            return environ
        os.readlink(process / "exe")  # raises OSError for a kernel's thread and a zombie, which have none either
        if not (process / "cmdline").read_bytes():
            return None
    return b""
