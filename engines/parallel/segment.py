"""Memory that processes of one host map together: files that no kill leaves behind. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import warnings
from pathlib import Path

from engines.parallel.owned_files import LOCKED, memory_folders, new_name


class Segment:
    """A file of memory that processes of one host and user map; its name tells whose it is, and cannot be guessed.

    The creator calls `unlink()` as soon as everyone has attached: from then on nothing is left of it when the processes
    end, however they end. What a kill before that leaves is found by `owned_files.reclaim`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.memory = memoryview(self._map)
        """[bytes]; zero where nobody has written."""

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """In /dev/shm; with a warning in a file of the temporary folder where that is missing or too small.

        Raises RuntimeError when neither has room.
        """
        problems = []
        for folder in memory_folders():
            path = folder / new_name(LOCKED)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                problems.append(_problem(folder, num_bytes, error))
                continue
            try:
                # Held until the end of this process: what tells the living from the dead across containers.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Takes the pages now: a file that were only truncated to size would kill a later writer by SIGBUS.
                os.posix_fallocate(descriptor, 0, num_bytes)
                segment = cls(path, descriptor)
            except OSError as error:
                os.close(descriptor)
                path.unlink(missing_ok=True)
                problems.append(_problem(folder, num_bytes, error))
                continue
            if problems:
                warnings.warn(
                    f"{problems[0]}; using a file in {folder}, which is slower where that is a disk. Give the machine a"
                    f" larger /dev/shm (docker run --shm-size)",
                    stacklevel=2,
                )
            return segment
        raise RuntimeError("; ".join(problems))

    @classmethod
    def attach(cls, path: Path) -> Segment:
        """Maps what another process of this host has created. Raises OSError when it is not there."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))

    def unlink(self) -> None:
        """Takes the name away; those who have mapped it keep it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up this process's mapping, unless someone still holds a view of it: then it goes with the last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


def _problem(folder: Path, num_bytes: int, error: OSError) -> str:
    needs = f"shared memory needs {num_bytes / 2**20:.1f} MiB in {folder}"
    if error.errno == errno.ENOSPC:
        return f"{needs}, which has {shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return f"{needs}, which cannot be used ({error.strerror})"
