"""Files that a process shares with others of its host: their names identify the owner, so that files of a killed owner
are found. One scheme for shared memory, stored KV and folders of weights. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

DEV_SHM = Path("/dev/shm")
LOCKED = "segment"
"""The label of files that their creator keeps locked as long as it lives."""

_NAME = re.compile(
    r"curtail-(?P<user>\d+)-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-(?P<label>[0-9a-zA-Z]+)-[0-9a-f]{16}"
)
_finalizers: list[weakref.finalize[[], object]] = []
_is_ending = False


def at_end(owner: object, remove: Callable[[], object]) -> None:
    """Calls `remove` when `owner` is collected or this process ends, by itself or after `remove_all`."""
    _finalizers.append(weakref.finalize(owner, remove))


def remove_all() -> None:
    """Removes the files that were given to `at_end`, for a process that ends by `os._exit`; may be called in a thread
    of its own. No more are made then."""
    global _is_ending
    _is_ending = True
    for finalizer in _finalizers:
        finalizer()


def check_is_going_on() -> None:
    """Raises OSError after `remove_all`."""
    if _is_ending:
        raise OSError(errno.ESHUTDOWN, "the process ends")


def memory_folders() -> list[Path]:
    """Returns /dev/shm, and the temporary folder for when /dev/shm is missing or too small."""
    return list(dict.fromkeys((DEV_SHM, Path(tempfile.gettempdir()))))


def new_name(label: str) -> str:
    """Returns an unguessable name for a file of this process. `label` is the run's token, or the kind of file."""
    pid = os.getpid()
    return f"curtail-{os.getuid()}-{_pid_space()}-{pid}-{start_time(pid)}-{label}-{secrets.token_hex(8)}"


def has_label(name: str, label: str) -> bool:
    """Whether a process of this user and container made the name, with this label."""
    named = _NAME.fullmatch(name)
    return named is not None and (named["user"], named["space"], named["label"]) == (
        str(os.getuid()), str(_pid_space()), label,
    )  # fmt: skip


def reclaim(folders: Iterable[Path] | None = None, *, keep_label: str | None = None) -> list[Path]:
    """Removes files that this user's dead processes left in the folders, never those of living ones; returns them.

    Keeps files labelled `keep_label`, those of a run, because sequences may need them after their creator has ended.
    Processes of other containers cannot be seen: of their files, only locked kinds are checked, by the lock.
    """
    removed = []
    for folder in memory_folders() if folders is None else folders:
        for path in sorted(folder.glob(f"curtail-{os.getuid()}-*")):
            named = _NAME.fullmatch(path.name)
            with contextlib.suppress(OSError):  # another process removes it at the same time
                if named and named["label"] != keep_label and _is_left(path, named):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    removed.append(path)
    return removed


def start_time(pid: int) -> int | None:
    """Returns a process's start in clock ticks since boot; None if it has ended. A pid is reused, the pair is not."""
    try:
        # The name, field 2, is in parentheses and may hold anything; the start time is field 22.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pid_space() -> int:
    """Identifies the container by its process-id namespace; a process id is valid only within it."""
    return os.stat("/proc/self/ns/pid").st_ino


def _is_left(path: Path, named: re.Match[str]) -> bool:
    if int(named["space"]) == _pid_space():
        return start_time(int(named["pid"])) != int(named["start"])
    return named["label"] == LOCKED and not _is_locked(path)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
