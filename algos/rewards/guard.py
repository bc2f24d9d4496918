"""The parent of the process that runs a reward function: it ends all that the function has started.

It runs no user code. A process whose parent has ended, a daemon in a session of its own too, becomes the guard's child,
since the guard is their "child subreaper" (prctl(2)). What has another user's rights, or was started by another service
(a container's, systemd), stays. User code may stop or kill the guard, too: then the run, if it still lives, kills what
has the worker's mark in its environment (`process.py`); what was started with an environment of its own stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def fork_worker() -> int:
    """Returns 0 in the worker, which leads a process group of its own and dies with its guard; its id in the guard."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
    return worker


def guard(worker: int, lifeline: int) -> NoReturn:
    """Waits until the worker ends, the pipe `lifeline` has something to read or is closed, or the parent is gone; then
    kills what is left. Exits with the worker's status; 128 + signal when it was killed, as a shell has it."""
    parent = os.getppid()  # the pipe stays open where another process that the run forked holds it
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
    os._exit(code if code >= 0 else 128 - code)


def _reap_orphans(worker: int) -> None:
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != worker:
        os.waitpid(ended.si_pid, 0)


def _end_orphans() -> None:
    """Kills this process's children, then those that are its children since, until none is left that it may kill."""
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


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
