"""Files of KV: how they are named, so that a run knows its own and the dead's are found, and how many bytes they have.

Torch-free.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from engines.memory.host_memory import free_host_bytes
from engines.parallel.segment import DEV_SHM, start_time

_FEWEST_FILES = 64


def family() -> str:
    """How names of this user in this container begin: a process id means something within its namespace only."""
    return f"curtail-kv-{os.getuid()}-{os.stat('/proc/self/ns/pid').st_ino}"


class FileNames:
    """The names of a run's files. They tell the creator and the run, whose `token` nobody else can guess."""

    def __init__(self, owner: str, token: str) -> None:
        """Raises ValueError naming `owner` for a token that could be guessed."""
        if not re.fullmatch(r"[0-9a-zA-Z]{16,64}", token):
            raise ValueError(f"{owner}.token={token!r}: use 16 to 64 letters and digits (secrets.token_hex(16))")
        self._prefix = f"{family()}-{os.getpid()}-{start_time(os.getpid())}-{token}-"
        self._pattern = re.compile(rf"{family()}-\d+-\d+-{token}-[0-9a-f]+")

    def new(self) -> str:
        return f"{self._prefix}{secrets.token_hex(8)}"

    def has(self, name: str) -> bool:
        """Whether it is a name of this run, by whichever process."""
        return self._pattern.fullmatch(name) is not None


class FileLedger:
    """The files that this process has made, the least recently used first: at most `capacity_bytes` bytes exist.

    A file is counted from before it exists until after it is gone, wherever an interrupt comes. Those that others have
    removed are forgotten when it matters, and often enough. For several threads.
    """

    def __init__(self, owner: str, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"{owner}.capacity_bytes={capacity_bytes}: must be at least 0")
        self.capacity_bytes = capacity_bytes
        self._pid = os.getpid()
        self._sizes: dict[Path, int] = {}
        self._next_look = _FEWEST_FILES
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Of those that exist."""
        with self._lock:
            self._look()
            return sum(self._sizes.values())

    def has_room(self, num_bytes: int) -> bool:
        with self._lock:
            if sum(self._sizes.values()) + num_bytes > self.capacity_bytes or len(self._sizes) >= self._next_look:
                self._look()
            return sum(self._sizes.values()) + num_bytes <= self.capacity_bytes

    def _look(self) -> None:
        self._sizes = {path: size for path, size in self._sizes.items() if os.path.exists(path)}
        self._next_look = max(_FEWEST_FILES, 2 * len(self._sizes))

    @contextlib.contextmanager
    def making(self, path: Path, num_bytes: int) -> Iterator[None]:
        """Around what makes the file: it is there as a whole, or, after an error or an interrupt, not at all."""
        try:
            with self._lock:
                self._sizes[path] = num_bytes
            yield
            with self._lock:  # another thread may have looked before there was a file
                self._sizes[path] = num_bytes
        except BaseException:
            with contextlib.suppress(OSError):  # where nothing can be written nothing is there
                self.remove(path)
            raise

    def touch(self, path: Path) -> None:
        """It was used just now; one that is not in the ledger is no error."""
        with self._lock:
            if path in self._sizes:
                self._sizes[path] = self._sizes.pop(path)

    def remove(self, path: Path) -> None:
        """Removes the file, whoever has made it; one that is gone is no error."""
        path.unlink(missing_ok=True)
        with self._lock:
            self._sizes.pop(path, None)

    def oldest(self) -> Path | None:
        """The least recently used one."""
        with self._lock:
            return next(iter(self._sizes), None)

    def clear(self) -> None:
        """Removes all files that this process has made: in a forked child, which knows its parent's, none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for path in self._sizes:
                with contextlib.suppress(OSError):  # gone, or on a disk that fails
                    path.unlink()
            self._sizes.clear()


def free_memory_bytes() -> int:
    """What this process can take in /dev/shm without pushing anybody out: of the machine, its container and /dev/shm.

    0 where there is no /dev/shm.
    """
    try:
        shm = os.statvfs(DEV_SHM)
    except OSError:
        return 0
    there = shm.f_bavail * shm.f_frsize
    host = free_host_bytes()
    return there if host is None else min(there, host)
