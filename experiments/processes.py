"""Independent calls on all cores: simulations, each of which uses one. Torch-free."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import TypeVar

from engines.progress import Bar

T = TypeVar("T")
R = TypeVar("R")


def call_each(call: Callable[[T], R], items: Items[T], *, processes: int | None, unit: str) -> list[R]:
    """Returns the result of `call` for each item, in order, and shows a bar of these units.

    At most `processes` calls run at a time, by default one per core; each in a process of its own, unless it is one
    alone. What `call` raises is raised here. Raises RuntimeError when a process is killed. An error or an interrupt
    (Ctrl-C) kills the calls in flight.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(items))
    if processes == 1:
        return [call(item) for item in Bar(items, unit=unit)]
    theirs, ours = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    with Bar(total=len(items), unit=unit) as bar, theirs:
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(theirs,))
        try:
            calls = _submit(pool, call, items)
            waiting = set(calls)
            while waiting:
                # Not for ever: after a stop, another thread may get a Ctrl-C, and that does not wake this one.
                done, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
                    bar.update()
            return [one.result() for one in calls]
        except BrokenProcessPool as error:
            raise RuntimeError(f"processes={processes}: one was killed; give fewer if memory ran out") from error
        finally:
            ours.close()
            pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, call: Callable[[T], R], items: Items[T]) -> list[Future[R]]:
    """Starts the processes, too. They block SIGINT, as this thread does meanwhile: a Ctrl-C is for this process alone,
    and a failed call would be followed by the next one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(call, item) for item in items]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(lifeline: Connection) -> None:
    """Makes a process end when the one that has started it closes the other end of `lifeline`, or has ended."""

    def end() -> None:
        lifeline.poll(None)
        os._exit(1)

    threading.Thread(target=end, name="end with parent", daemon=True).start()
