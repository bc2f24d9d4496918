"""A run's folder: metrics, samples, and resume points that are published whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from algos.publish import flush_to_disk
from engines.parallel.collectives import Communicator

POINTER = "latest"


class RunFolder:
    """`runs/<name>/`. All ranks hold one; only rank 0 of the group writes what is not a rank's own.

    metrics.jsonl    one object per step, verl's names
    lengths.jsonl    response lengths of every step
    samples.jsonl    some completions of every step, with rewards
    config.json      the configuration
    journal/         rank-<R>.jsonl: completions sampled since the last published resume point
    checkpoints/     step-<N>/ and `latest`, the name of the last published one
    """

    def __init__(self, path: Path, group: Communicator) -> None:
        self.path = path
        self._group = group

    @property
    def is_writer(self) -> bool:
        return self._group.rank == 0

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Adds a line to a JSONL file, handed to the system at once."""
        if self.is_writer:
            with open(self.path / name, "a") as file:
                file.write(json.dumps(record) + "\n")

    def truncate(self, last_step: int, names: Iterable[str]) -> None:
        """Drops lines of later steps, and a line that a kill tore, before a resumed run writes them again."""
        if not self.is_writer:
            return
        for name in names:
            path = self.path / name
            if path.is_file():
                kept = [line for line in path.read_text().splitlines() if _step_of(line) <= last_step]
                replace_text(path, "".join(line + "\n" for line in kept))

    # -- resume points

    def publish(self, step: int, write: Callable[[Path], None], keep: int) -> None:
        """All ranks write into a folder not yet named; when all are done it is renamed, then pointed at."""
        folder = self.path / "checkpoints"
        partial = folder / f".step-{step}.partial"
        if self.is_writer:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._group.barrier()
        write(partial)
        self._group.barrier()
        if self.is_writer:
            target = folder / f"step-{step}"
            for path in (partial, *partial.rglob("*")):
                flush_to_disk(path)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            replace_text(folder / POINTER, target.name)
            self._sweep(keep)
        self._group.barrier()

    def latest(self) -> Path | None:
        """The last published resume point."""
        pointer = self.path / "checkpoints" / POINTER
        return pointer.parent / pointer.read_text().strip() if pointer.is_file() else None

    def _sweep(self, keep: int) -> None:
        folder = self.path / "checkpoints"
        ours = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)]  # not a user's copies
        published = sorted(ours, key=_number)
        newest = self.latest()
        # After a resume, folders of later steps than the newest are of a course that was given up.
        current = [path for path in published if newest and _number(path) <= _number(newest)]
        for path in {*published} - {*current[-keep:]} | {*folder.glob(".step-*.partial")}:
            shutil.rmtree(path, ignore_errors=True)


def check_run_folder(runs: Path, name: str | None, *, resume: bool) -> None:
    """Raises ValueError when the name is taken, there is nothing to resume, or `runs` cannot be written. Cheap."""
    if name is not None:
        path = runs / name
        if resume and not (path / "checkpoints" / POINTER).is_file():
            raise ValueError(
                f"resume: {path} has no published checkpoint to go on with; start anew under another --name"
            )
        if not resume and path.exists():
            fix = "give another --name"
            if (path / "checkpoints" / POINTER).is_file():
                fix += ", or --resume to go on with it"
            raise ValueError(f"name={name!r}: {path} exists; {fix}")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise ValueError(f"runs={str(runs)!r}: cannot be written ({error}); give a writable --runs") from None


def make_run_folder(runs: Path, name: str | None, stem: str, *, resume: bool) -> Path:
    """`runs`/`name`, or a new `runs`/`stem`-<number> without a name. For one process to call.

    Raises ValueError when another run has taken the name since it was checked.
    """
    if name is None:
        return _make_unused(runs, stem)
    try:
        (runs / name).mkdir(parents=True, exist_ok=resume)
    except FileExistsError:
        raise ValueError(f"name={name!r}: another run has just taken it; give another --name") from None
    return runs / name


def newest_run(runs: Path, stem: str) -> str:
    """The name of the last run made without one; ValueError where there is none."""
    found = {path.name: re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", path.name) for path in runs.glob(f"{stem}*")}
    numbers = {int(match[1] or 1): name for name, match in found.items() if match}
    if not numbers:
        raise ValueError(f"resume: {runs} has no run {stem}; give the --name of the run, or leave --resume out")
    return numbers[max(numbers)]


def _make_unused(runs: Path, stem: str) -> Path:
    for number in itertools.count(1):
        path = runs / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a kill, finds the old text or the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["training/global_step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
