"""Memory that processes of one host share: files that do not remain when the processes are killed. Torch-free."""

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
    """A memory file that processes of one host and user map; its name identifies its owner and cannot be guessed.

    The creator calls `unlink()` as soon as all processes have attached: from then on nothing remains of it when they
    end, in whatever way. `owned_files.reclaim` removes the file of a creator that was killed before that.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.memory = memoryview(self._map)
        """[bytes]; initially zero."""

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Creates it in /dev/shm, or, with a warning, in the temporary folder if /dev/shm is missing or too small.

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
                # Held until this process ends: other containers see by the lock whether it is alive.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Allocates the pages now: if the file only had its size set, SIGBUS could kill a later writer.
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
        """Maps a segment that another process of this host has created. Raises OSError if it does not exist."""
        return cls(path, os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))

    def unlink(self) -> None:
        """Removes the file's name; processes that have mapped the memory keep it."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Releases this process's mapping; while a view of it exists, the mapping remains until the last view ends."""
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
