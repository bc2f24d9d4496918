"""The parent of a process that runs user code: it kills all processes that the code has started.

The guard runs no user code. It is the "child subreaper" (prctl(2)) of its descendants: a process whose parent has ended
becomes the guard's child, even a daemon in its own session. Processes with another user's rights, or started by another
service (a container's, systemd), survive. User code may also stop or kill the guard, where the kernel lets it
(`sandbox.py`). Then the run, if it is still alive, kills the processes that have the worker's mark in their environment
(`process.py`); processes that were started with another environment survive.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from engines.lifetime import adopt_orphans, die_with


def fork_worker() -> int:
    """Returns 0 in the worker, its id in the guard. The worker leads its own process group and dies with its guard."""
    adopt_orphans()
    guard_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with(guard_pid)
        os.setsid()
    return worker


def guard(worker: int, lifeline: int) -> int:
    """Waits until the worker ends, the pipe `lifeline` is readable or closed, or the parent is gone. Then kills all
    remaining processes, and returns the worker's status, or 128 + signal if it was killed, as a shell does."""
    parent = os.getppid()  # checked because another process that the run forked may hold the pipe open
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    poller.register(os.pidfd_open(worker), select.POLLIN)
    while os.getppid() == parent and not poller.poll(500):
        _reap_orphans(worker)
    with contextlib.suppress(ProcessLookupError):  # it may not lead its group yet
        os.killpg(worker, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    _end_orphans()
    return code if code >= 0 else 128 - code


def _reap_orphans(worker: int) -> None:
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)


def _end_orphans() -> None:
    """Kills this process's children, and the orphans that become its children then, as far as it is permitted to."""
    refused: set[int] = set()
    while left := _children() - refused:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                refused.add(pid)
        for pid in left - refused:
            os.waitpid(pid, 0)


def _children() -> set[int]:
    try:
        return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: only the worker's process group ends
        return set()
