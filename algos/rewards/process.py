"""The runner's end of the process that runs a reward function: started, spoken to, killed."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from algos.rewards.protocol import Hello, Ready, receive, send


class WorkerError(Exception):
    """The worker could not be started; the message says why."""


class WorkerProcess:
    """The process and its guard, its connection, and the guard's lifeline: a pipe on its stdin (see `guard.py`)."""

    def __init__(self, target: str, timeout_s: float) -> None:
        """Raises `WorkerError` when the process is not ready after `timeout_s` or cannot load the function."""
        deadline = time.monotonic() + timeout_s
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "algos.rewards.worker", target, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            send(self.sock, Hello(sys_path=[entry or os.getcwd() for entry in sys.path]), deadline=deadline)
            self.ready = receive(self.sock, Ready, deadline=deadline)
        except TimeoutError:
            self.kill()
            raise WorkerError(f"its imports took more than start_timeout_s={timeout_s:g} s") from None
        except (EOFError, ConnectionError):
            raise WorkerError(f"the process {self.kill()} while importing it; see stderr") from None
        except BaseException:
            self.kill()
            raise
        if self.ready.error:
            self.kill()
            raise WorkerError(self.ready.error)

    def has_ended(self) -> bool:
        """Whether no request can be answered any more."""
        poller = select.poll()
        poller.register(self.sock, 0)  # a connection that the other end has closed is reported all the same
        return self.process.poll() is not None or bool(poller.poll(0))

    def kill(self) -> str:
        """Kill the process and all that it has started, and free its descriptors. Returns how it had ended."""
        self.process.communicate(b"end")  # also where another process holds the lifeline, so that closing is no sign
        self.sock.close()
        code = self.process.returncode
        name = next((one.name for one in signal.Signals if one in (code - 128, -code)), None)
        return f"was killed by {name}" if name else f"exited with status {code}"
