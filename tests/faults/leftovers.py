"""What a run may leave behind: processes, shared memory, temporary files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
GONE_S = 10.0


def what_is_there() -> set[Path]:
    """Files of ours that lie around."""
    return {path for folder in FOLDERS for path in folder.glob("curtail-*")}


def assert_nothing_left(before: set[Path], pids: set[int]) -> None:
    """No file but those of `before`, and none of the processes, within `GONE_S` seconds."""
    deadline = time.monotonic() + GONE_S
    while left := sorted(what_is_there() - before) + [pid for pid in sorted(pids) if is_alive(pid)]:
        assert time.monotonic() < deadline, f"left behind, files and process ids: {left}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process of ours still runs; a zombie, or another's under its number, does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status != "Z" and b"engines.rollout.outside" in command
