"""Memory that processes of one host map together: files that no kill leaves behind. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
import warnings
from pathlib import Path

DEV_SHM = Path("/dev/shm")


class Segment:
    """A file of memory that processes of one host and user map; its name tells whose it is, and cannot be guessed.

    The creator calls `unlink()` as soon as everyone has attached: from then on nothing is left of it when the processes
    end, however they end. What a kill before that leaves is found by `reclaim()`.
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
        for folder in dict.fromkeys((DEV_SHM, Path(tempfile.gettempdir()))):
            path = folder / f"{_prefix()}{secrets.token_hex(8)}"
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


def reclaim() -> list[Path]:
    """Removes segments of this user whose creators are dead, never those of living ones; returns which."""
    removed = []
    for folder in dict.fromkeys((DEV_SHM, Path(tempfile.gettempdir()))):
        for path in sorted(folder.glob(f"curtail-{os.getuid()}-*")):
            with contextlib.suppress(OSError):  # somebody else removes it at the same time
                if _is_left_over(path):
                    path.unlink()
                    removed.append(path)
    return removed


def _prefix() -> str:
    return f"curtail-{os.getuid()}-{os.getpid()}-{start_time(os.getpid())}-"


def start_time(pid: int) -> int | None:
    """Of a living process, in clock ticks since boot: a pid comes again, the pair does not. None when it is gone."""
    try:
        # The name, field 2, is in parentheses and may hold anything; the start time is field 22.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_left_over(path: Path) -> bool:
    pid, _, rest = path.name.removeprefix(f"curtail-{os.getuid()}-").partition("-")
    started = rest.partition("-")[0]
    if not (pid.isdigit() and started.isdigit()):
        return False  # not a name of ours
    if start_time(int(pid)) == int(started):
        return False
    # A process of another container is not seen in /proc, but its lock is.
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _problem(folder: Path, num_bytes: int, error: OSError) -> str:
    needs = f"shared memory needs {num_bytes / 2**20:.1f} MiB in {folder}"
    if error.errno == errno.ENOSPC:
        return f"{needs}, which has {shutil.disk_usage(folder).free / 2**20:.1f} MiB free"
    return f"{needs}, which cannot be used ({error.strerror})"
