"""Stops a process for as long as a test wants."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Somebody else may continue the process, as a debugger does: then it is stopped again. At the end it goes on."""

    process = os.pidfd_open(pid)

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)

    def stop() -> None:
        while not has_ended.wait(0.002):
            send(signal.SIGSTOP)

    has_ended, thread = threading.Event(), threading.Thread(target=stop)
    send(signal.SIGSTOP)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        send(signal.SIGCONT)
        os.close(process)
