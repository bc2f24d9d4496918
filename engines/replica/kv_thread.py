"""Reads or writes the stored KV of sequences in a thread, while the replica steps (Seer, §4.2)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from engines.parallel.collectives import Communicator
from engines.replica.schedule import Sequence

MOST_BYTES = 256 << 20
"""Most bytes of jobs that wait, run, or have a result that was not taken, by all shards; a single job may have more."""
PATIENCE_S = 20.0
"""Longest wait for a job, shorter than the ranks wait for each other."""

Result = TypeVar("Result")


@dataclass(eq=False, kw_only=True)
class _Job(Generic[Result]):
    future: Future[Result]
    num_bytes: int
    is_ready: bool = False
    """Whether all ranks know that all ranks have done their part."""


class KVThread(Generic[Result]):
    """Jobs of one kind, at most one for each sequence, in the order of `start`. All ranks of the replica make the same
    calls in the same order, and agree on which jobs are ready."""

    def __init__(self, what: str, tensor_parallel: Communicator, undo: Callable[[Result], object]) -> None:
        """`what` the jobs do to a sequence's KV, for warnings. `undo` is called in the thread with the result of a job
        that nobody takes."""
        self._what, self._group, self._undo = what, tensor_parallel, undo
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kv-{what}")
        self._jobs: dict[Sequence, _Job[Result]] = {}

    def has_room(self, num_bytes: int) -> bool:
        """Whether there are not too many bytes of jobs for another one."""
        pending = sum(job.num_bytes for job in self._jobs.values())
        return not pending or pending + num_bytes <= MOST_BYTES

    def start(self, sequence: Sequence, work: Callable[[], Result], *, num_bytes: int, least_s: float = 0.0) -> None:
        """Queues a job, which takes at least `least_s` seconds."""

        def run() -> Result:
            end = time.monotonic() + least_s
            result = work()
            time.sleep(max(0.0, end - time.monotonic()))
            return result

        self._jobs[sequence] = _Job(future=self._thread.submit(run), num_bytes=num_bytes)

    def hand_over(self, sequence: Sequence, other: Sequence) -> None:
        """Makes a sequence's job that of another one."""
        self._jobs[other] = self._jobs.pop(sequence)

    def ready(self, *, waits: bool) -> tuple[list[Sequence], float]:
        """Returns the sequences whose jobs have become ready on all ranks, and the seconds that this took.

        With `waits` it waits for the first one, but at most `PATIENCE_S`: it is then given up, with all behind it.
        """
        start = time.monotonic()
        pending = {one: job for one, job in self._jobs.items() if not job.is_ready}
        if not pending:
            return [], 0.0
        first, job = next(iter(pending.items()))
        if waits and not wait([job.future], PATIENCE_S).done:
            warnings.warn(
                f"KV of sequence {first.state.sequence_id}: {self._what} took longer than {PATIENCE_S:g} s on rank "
                f"{self._group.rank} of its replica; it is computed again, as is that of {len(pending) - 1} behind it",
                stacklevel=2,
            )
            for job in pending.values():
                self._abandon(job)
                job.future = Future()
                job.future.cancel()
        done = self._group.all_gather_bytes(bytes(job.future.done() for job in pending.values()))
        ready = [one for one, flags in zip(pending, zip(*done, strict=True), strict=True) if all(flags)]
        for one in ready:
            pending[one].is_ready = True
        return ready, time.monotonic() - start if waits else 0.0

    def has(self, sequence: Sequence) -> bool:
        """Whether the sequence has a job, ready or not."""
        return sequence in self._jobs

    def take(self, sequence: Sequence, given_up: Result) -> Result | None:
        """Returns the result of a sequence's ready job, `given_up` if it was given up; None if it has none. Raises what
        the job raised."""
        job = self._jobs.pop(sequence, None)
        if job is None:
            return None
        if not job.is_ready:
            self._abandon(job)
            return None
        return given_up if job.future.cancelled() else job.future.result()

    def forget(self, sequence: Sequence | None = None) -> None:
        """Drops the job of a sequence that leaves, or all jobs."""
        jobs = list(self._jobs.values()) if sequence is None else [self._jobs.pop(sequence, None)]
        if sequence is None:
            self._jobs.clear()
        for job in jobs:
            if job is not None:
                self._abandon(job)

    def close(self, *, waits: bool = True) -> None:
        """Drops all jobs, and ends the thread; with `waits`, after waiting for the job that is under way."""
        self.forget()
        self._thread.shutdown(waits, cancel_futures=True)

    def _abandon(self, job: _Job[Result]) -> None:
        if not job.future.cancel():
            job.future.add_done_callback(partial(_undo, self._what, self._undo))


def _undo(what: str, undo: Callable[[Result], object], future: Future[Result]) -> None:
    if future.cancelled():
        return
    if (error := future.exception()) is not None:
        warnings.warn(f"{what} stored KV in the background failed: {error!r}", stacklevel=2)
    else:
        undo(future.result())
