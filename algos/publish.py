"""Publishes directories that are either complete or absent, even if their writer is killed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.json_files import read_json

RECORD_FILE = "made_with.json"
"""The file in every published directory that records what made it. It also marks the directory as replaceable."""


def publish_directory(target: Path, record: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Calls `write` with a new hidden directory beside `target`, then renames it to `target` in one step.

    An older published `target` is replaced; a reader sees the old one, for an instant none, or the new one, never a
    mixture. Leftovers of a killed attempt are removed first, so callers must hold `only_writer(target)`.
    """
    check_replaceable(target)
    partial, outdated = (target.parent / f".{target.name}.{state}" for state in ("partial", "outdated"))
    for leftover in (partial, outdated):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    for path in partial.iterdir():
        flush_to_disk(path)
    # A directory that is not empty cannot be renamed over.
    if target.exists():
        target.rename(outdated)
    partial.rename(target)
    shutil.rmtree(outdated, ignore_errors=True)


def check_replaceable(target: Path) -> None:
    """Raises ValueError if `target` holds files that were not published, which must not be deleted for a model."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())) or read_record(target) is not None:
        return
    raise ValueError(f"directory={str(target)!r}: holds other files (no {RECORD_FILE}); choose another, or remove it")


def read_record(directory: Path) -> dict[str, Any] | None:
    """Returns the record of the published `directory`; None if it is absent or was not published."""
    try:
        return read_json(directory / RECORD_FILE, dict[str, Any])
    except (OSError, ValueError):
        return None


def as_recorded(options: Any) -> dict[str, Any]:
    """Returns a dataclass's fields as they are read back from a JSON file: tuples as lists; others as by `plain`."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(options), default=plain))
    return fields


def plain(value: object) -> Any:
    """For `default` of `json.dumps`: a set as a sorted list, another object that JSON cannot hold as its text."""
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """Waits for, and holds, this host's lock on writing `target`. A process that is killed releases the lock."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as file:
        lock(file.fileno(), target, wait=True)
        yield


def lock(descriptor: int, what: Path, *, wait: bool = False) -> bool:
    """Locks an open file until it is closed or its process ends, even if killed. Returns False if another process holds
    the lock. On a file system without locks it warns and returns True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(f"{what}: cannot be locked ({error}): see to it that nothing else writes it", stacklevel=3)
    return True


def save_tensors(state_dict: Any, path: str | Path) -> None:
    """`torch.save`. If a write to disk fails, raises its OSError, which torch's RuntimeError does not name."""
    import torch  # not at the top, so that `--help` and option errors are fast

    try:
        with open(path, "wb") as file:
            torch.save(state_dict, file)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def flush_to_disk(path: Path) -> None:
    """Flushes a file. Without this, a power cut after the rename can leave a whole directory of empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
