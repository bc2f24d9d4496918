"""Independent calls on all cores: simulations, each of which uses one. Torch-free."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
R = TypeVar("R")


def call_each(call: Callable[[T], R], items: Items[T], *, processes: int | None, unit: str) -> list[R]:
    """Returns the result of `call` for each item, in order, and shows a bar of these units.

    At most `processes` calls run at a time, by default one per core; each in a process of its own, unless it is one
    alone. What `call` raises is raised here. Raises RuntimeError when a process is killed.
    """
    processes = min(processes or len(os.sched_getaffinity(0)), len(items))
    if processes == 1:
        return [call(item) for item in tqdm(items, unit=unit)]
    with tqdm(total=len(items), unit=unit) as bar:
        pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
        try:
            calls = [pool.submit(call, item) for item in items]
            for one in calls:
                one.add_done_callback(lambda _: bar.update())
            return [one.result() for one in calls]
        except BrokenProcessPool as error:
            raise RuntimeError(f"processes={processes}: one was killed; give fewer if memory ran out") from error
        finally:
            pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Makes a process end with the one that has started it, whatever has ended that one."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end, name="end with parent", daemon=True).start()
