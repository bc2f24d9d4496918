"""Reads the stored KV of sequences that wait in a thread, while the replica steps (Seer, §4.2: prefetch)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from engines.parallel.collectives import Communicator
from engines.replica.scheduler import Sequence

MOST_BYTES = 256 << 20
"""Most bytes that are read ahead of their sequences' admission, by all shards; a single sequence may have more."""
PATIENCE_S = 20.0
"""Longest wait for a read, shorter than the ranks wait for each other."""

Read = TypeVar("Read")


@dataclass(eq=False, kw_only=True)
class _Fetch(Generic[Read]):
    future: Future[Read]
    num_bytes: int
    num_known: int
    is_ready: bool = False
    """Whether all ranks know that all ranks have read their part."""


class Fetcher(Generic[Read]):
    """One read per sequence, in the order of `start`. All ranks of the replica make the same calls in the same order,
    and agree on which reads are ready."""

    def __init__(self, tensor_parallel: Communicator) -> None:
        self._group = tensor_parallel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-fetcher")
        self._fetches: dict[Sequence, _Fetch[Read]] = {}

    def start(
        self, sequence: Sequence, read: Callable[[], Read], *, num_bytes: int, num_known: int, least_s: float
    ) -> bool:
        """Queues a read of what lies behind the first `num_known` tokens. It takes at least `least_s` seconds.

        Returns False when too much has been read ahead already.
        """
        pending = sum(fetch.num_bytes for fetch in self._fetches.values())
        if pending and pending + num_bytes > MOST_BYTES:
            return False

        def run() -> Read:
            end = time.monotonic() + least_s
            result = read()
            time.sleep(max(0.0, end - time.monotonic()))
            return result

        self._fetches[sequence] = _Fetch(future=self._thread.submit(run), num_bytes=num_bytes, num_known=num_known)
        return True

    def ready(self, *, waits: bool) -> tuple[list[Sequence], float]:
        """Returns the sequences whose reads have become ready on all ranks, and the seconds that this took.

        With `waits` it waits for the first one, but at most `PATIENCE_S`: its KV is then computed again.
        """
        start = time.monotonic()
        pending = {one: fetch for one, fetch in self._fetches.items() if not fetch.is_ready}
        if not pending:
            return [], 0.0
        first, fetch = next(iter(pending.items()))
        if waits and not wait([fetch.future], PATIENCE_S).done:
            warnings.warn(
                f"KV of sequence {first.state.sequence_id}: was not read within {PATIENCE_S:g} s by rank "
                f"{self._group.rank} of its replica; it is computed again",
                stacklevel=2,
            )
            fetch.future = Future()
            fetch.future.cancel()
        told = self._group.all_gather_bytes(bytes(fetch.future.done() for fetch in pending.values()))
        ready = [one for one, flags in zip(pending, zip(*told, strict=True), strict=True) if all(flags)]
        for one in ready:
            pending[one].is_ready = True
        return ready, time.monotonic() - start if waits else 0.0

    def take(self, sequence: Sequence, num_known: int, lost: Read) -> Read | None:
        """Returns what was read for a sequence of which the cache has the first `num_known` tokens; `lost` when the
        read was given up, None when too little or nothing was read. Raises what the read raised."""
        fetch = self._fetches.pop(sequence, None)
        if fetch is None or not fetch.is_ready:
            return None
        if fetch.future.cancelled():
            return lost
        return fetch.future.result() if fetch.num_known <= num_known else None

    def forget(self, sequence: Sequence | None = None) -> None:
        """Drops the read of a sequence that leaves, or all reads."""
        fetches = list(self._fetches.values()) if sequence is None else [self._fetches.pop(sequence, None)]
        if sequence is None:
            self._fetches.clear()
        for fetch in fetches:
            if fetch is not None and not fetch.future.cancel():
                fetch.future.add_done_callback(_report)

    def close(self) -> None:
        """Waits for the read that is under way; the others are dropped."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)


def _report(future: Future[Read]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        warnings.warn(f"reading stored KV ahead failed: {error!r}", stacklevel=2)
