"""A directory that is either whole or absent, whatever kills its writer."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.json_files import read_json

RECORD_FILE = "made_with.json"
"""Lies in every published directory: what made it. It also marks the directory as one that may be replaced."""


def publish_directory(target: Path, record: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Calls `write` with a new hidden directory beside `target`, then renames it to `target` in one step.

    An older published `target` is replaced; a reader sees the old one, for an instant none, or the new one, never a
    mixture. What an attempt that was killed left behind is swept first, so callers hold `only_writer(target)`.
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
    """ValueError where `target` holds something that nobody published: it must not be deleted for a model."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())) or read_record(target) is not None:
        return
    raise ValueError(f"directory={str(target)!r}: holds other files (no {RECORD_FILE}); choose another, or remove it")


def read_record(directory: Path) -> dict[str, Any] | None:
    """What made the published `directory`; None when it is absent, or something else."""
    try:
        return read_json(directory / RECORD_FILE, dict[str, Any])
    except (OSError, ValueError):
        return None


@contextmanager
def only_writer(target: Path) -> Iterator[None]:
    """Waits until no other process of this host is inside for the same `target`. A killed one's turn ends with it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as file:
        lock(file.fileno(), target, wait=True)
        yield


def lock(descriptor: int, what: Path, *, wait: bool = False) -> bool:
    """Locks an open file until it is closed, or its process ends, however that ends. False where another process has
    it. On a file system without locks it warns, and returns True."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(f"{what}: cannot be locked ({error}): see to it that nothing else writes it", stacklevel=3)
    return True


def save_tensors(state_dict: Any, path: str | Path) -> None:
    """`torch.save`; where the disk is why it fails, raises the disk's OSError, which torch's own does not name."""
    import torch  # here, and not above: help and a typo need not wait for it

    try:
        with open(path, "wb") as file:
            torch.save(state_dict, file)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def flush_to_disk(path: Path) -> None:
    """Without it a power cut after the rename can leave a whole directory of empty files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
