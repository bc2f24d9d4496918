"""What Linux says of a process. Torch-free."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def state_of(pid: int) -> str:
    """Returns the letter that ps shows, such as T for stopped or Z for ended; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """One that has ended, and that its parent has not asked for yet, does not count."""
    return state_of(pid) not in ("", "Z")


def open_files() -> dict[int, str]:
    """What this process has open, by descriptor. Left out is what another thread closes meanwhile."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return files
