"""What Ctrl-C and SIGTERM do to a process that keeps what it has made."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

from experiments import launch


class Interrupts:
    """SIGINT and SIGTERM end the process: one line on rank 0's stderr, no traceback, exit code 130 or 143.

    A thread does it, since the main one may wait for other ranks in C++, where Python runs no handler. What the main
    one runs into meanwhile, because other ranks have ended, is not told.
    """

    def __init__(self) -> None:
        self.tell: Callable[[], str] = lambda: "nothing was generated"
        """What is where."""
        self.clean: Callable[[], None] = lambda: None
        self._has_come = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as a shell leaves it to what runs in its background
                signal.signal(number, lambda *_: self._has_come.set())
        threading.Thread(target=self._wait, daemon=True).start()

    def __enter__(self) -> Interrupts:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_come.is_set():
            threading.Event().wait()  # until the process ends

    def _wait(self) -> None:
        number = self._reader.recv(1)[0]
        try:
            message = self.tell()
            if launch.rank() == 0:
                print(f"\ninterrupted: {message}", file=sys.stderr, flush=True)
            elif number == signal.SIGINT:  # the terminal sends it to all; rank 0 tells before torchrun ends them
                select.select([self._reader], [], [], 3)
            self.clean()
        finally:
            os._exit(128 + number)
