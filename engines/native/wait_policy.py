"""How the threads of OpenMP wait for each other: actively while cores are free, passively while others use them.

torch, its matrix libraries and our kernels share one OpenMP runtime, GCC's libgomp. A thread that has done its part of
a parallel region spins for some milliseconds, since the next region comes soon: a wake-up by the system would take half
of a small product's time. But when another process uses one of the cores, a spinning thread occupies a core that a
working thread needs, until the system preempts it, in every region. OMP_WAIT_POLICY cannot be changed once libgomp is
loaded. But libgomp spins only briefly while it manages more threads than there are cores. So a team of idle threads,
made here, turns spinning off, and its end turns spinning on again. Results do not change: the number of threads that
share the work stays the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import time
from pathlib import Path

import torch

INTERVAL_S = 0.25
PASSIVE_ABOVE, ACTIVE_BELOW = 0.1, 0.03
"""Thresholds of the seconds per second that this process's threads wait for a core: 0.01 when cores are free, 0.5 and
more when one of two is in use."""


def watch_cores() -> None:
    """Starts a thread that decides four times a second how this process's OpenMP threads wait.

    Does nothing when torch has only one thread, when the OpenMP runtime is not libgomp, or when the system does not
    report how long threads wait for a core.
    """
    if torch.get_num_threads() > 1:
        _start_watch()


@functools.cache
def _start_watch() -> None:
    if waited_s() is not None and loaded_runtimes():
        threading.Thread(target=_watch, name="watch-cores", daemon=True).start()


def waits_passively(passive: bool, waited: float) -> bool:
    """Returns whether threads should wait passively, given how they wait now (`passive`) and the seconds per second
    that they `waited` for a core. Passive threads wait less, so the threshold for becoming active is lower."""
    return waited > (ACTIVE_BELOW if passive else PASSIVE_ABOVE)


def waited_s() -> float | None:
    """Returns the seconds that this process's threads were ready to run without a core; None if Linux has no count."""
    waited_ns: list[int] = []
    try:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # this thread has ended
                waited_ns.append(int((task / "schedstat").read_bytes().split()[1]))
    except (OSError, IndexError):
        return None
    return sum(waited_ns) * 1e-9 if waited_ns else None


def loaded_runtimes() -> list[ctypes.CDLL]:
    """Returns each libgomp that this process has loaded."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    runtimes = []
    for path in sorted({line[5] for line in lines if len(line) == 6 and "/libgomp" in line[5]}):
        with contextlib.suppress(OSError):  # its file has been deleted since
            runtimes.append(ctypes.CDLL(path))
    return runtimes


def can_start(num_threads: int) -> bool:
    """Whether this process can start `num_threads` more threads: libgomp ends the process when it cannot."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(num_threads):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        over.set()
        for thread in started:
            thread.join()
    return True


class PassiveWaits:
    """While an object exists, this process's OpenMP threads sleep when they wait. Soon after `end` they spin again."""

    def __init__(self) -> None:
        self._made, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_teams, name="passive-waits", daemon=True)
        self._thread.start()
        self._made.wait()

    def _keep_teams(self) -> None:
        try:
            nothing = ctypes.CDLL(None).sched_yield  # what the team runs once
            for runtime in loaded_runtimes():
                num_threads = runtime.omp_get_num_procs() + 1
                if can_start(num_threads):
                    runtime.GOMP_parallel(nothing, None, num_threads, 0)
        finally:
            self._made.set()
        self._over.wait()  # the teams last as long as the thread that made them

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _watch() -> None:
    passive: PassiveWaits | None = None
    before, then = waited_s() or 0.0, time.monotonic()
    while True:
        time.sleep(INTERVAL_S)
        waited, now = waited_s() or 0.0, time.monotonic()
        # The difference is below 0 when threads have ended, since their seconds are no longer counted.
        wanted = waits_passively(passive is not None, (waited - before) / (now - then))
        before, then = waited, now
        if wanted and passive is None:
            with contextlib.suppress(RuntimeError):  # the system allows no more threads
                passive = PassiveWaits()
        elif not wanted and passive is not None:
            passive.end()
            passive = None
