"""What processes may leave behind: themselves, threads, open files, shared memory, temporary files."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from tests.proc import open_files
from tests.worlds import FORKED

FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
GONE_S = 10.0


def assert_nothing_left(pids: Iterable[int], paths: Iterable[Path] = ()) -> None:
    """Within `GONE_S` seconds none of the processes runs, none of their shared files is there, and no path exists."""
    deadline = time.monotonic() + GONE_S
    pids, paths = set(pids), list(paths)
    while left := [pid for pid in pids if is_alive(pid)] + files_of(pids) + [path for path in paths if path.exists()]:
        assert time.monotonic() < deadline, f"left behind after {GONE_S:g} s, process ids and files: {left}"
        time.sleep(0.05)


def all_held() -> set[object]:
    """This process's threads and open files. What is there after a call and was not before was left by the call, unlike
    a difference of the counts: what other tests have left may go at any moment."""
    return {*threading.enumerate(), *open_files().items()}


def files_of(pids: set[int]) -> list[Path]:
    """Shared files whose name tells that one of these processes made them."""
    ours = [path for folder in FOLDERS for path in folder.glob("curtail-*")]
    return [path for path in ours if pids & {int(word) for word in path.name.split("-") if word.isdecimal()}]


def is_alive(pid: int) -> bool:
    """Whether a replica's process still runs, started or forked; a zombie, or another program's under its number, does
    not count."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    is_ours = name.endswith(f"({FORKED}") or b"engines.fleet.outside" in command
    return rest.split()[0] != "Z" and is_ours
