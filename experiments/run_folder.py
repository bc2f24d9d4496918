"""A run's folder: metrics, samples, and resume points that are published whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from algos.publish import flush_to_disk, lock, plain
from engines.json_files import read_json
from engines.parallel.collectives import Communicator, together

POINTER = "latest"
DIGESTS = "digests.json"
"""The file with the digests that all other files of a resume point had when it was published."""
AFRESH = "give another --name, or delete the folder if no run is writing in it"
"""How to start a named run again that has published nothing."""
LOCK = "lock"
TO_LOOK_AT = ("samples.jsonl", "rollout_steps.jsonl", "decisions.jsonl", "timeline.json", "figures")
"""Files that a run writes only for its reader; the run goes on if they cannot be written."""


class RunFolder:
    """`runs/<name>/`. Every rank holds a `RunFolder`; rank 0 of the group writes all files that are not one rank's own.

    metrics.jsonl    one object per step, verl's names
    lengths.jsonl    response lengths of every step, and why each response ended
    samples.jsonl    some completions of every step, with rewards
    rollout_steps.jsonl, decisions.jsonl    steps of replicas; decisions of PAT, and of schedule policies that are given
                     by name; times since the rollout's start
    timeline.json    the last rollout as a Chrome trace
    config.json      the configuration
    code/            copies of the user's own files: reward, task, algorithm, dispatch
    lock             locked while a run writes in the folder; names the process
    journal/         rank-<R>.jsonl: completions sampled since the last published resume point
    checkpoints/     step-<N>/ and `latest`, the name of the last published one
    """

    def __init__(self, path: Path, group: Communicator, lock_file: IO[str] | None = None) -> None:
        """`lock_file`, on rank 0, is the result of `lock_folder`; it stays open as long as this object lives."""
        self.path = path
        self._group = group
        self._lock = lock_file
        self._has_warned = False

    @property
    def is_writer(self) -> bool:
        return self._group.rank == 0

    def append(self, name: str, *records: dict[str, Any]) -> None:
        """Appends a line for each to a JSONL file and hands them to the operating system. Files in TO_LOOK_AT may have
        values that JSON cannot hold (see `plain`). For errors see `writing`."""
        if self.is_writer:
            default = plain if name in TO_LOOK_AT else None
            with self.writing(name), open(self.path / name, "a") as file:
                file.writelines(json.dumps(record, default=default) + "\n" for record in records)

    def replace(self, name: str, text: str) -> None:
        """Writes a file completely or not at all. For errors see `writing`."""
        if self.is_writer:
            with self.writing(name):
                replace_text(self.path / name, text)

    def copy(self, file: Path, name: str) -> None:
        """Copies a file into the folder. For errors see `writing`."""
        if self.is_writer:
            with self.writing(name):
                (self.path / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, self.path / name)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Surrounds the writing of a file. An OSError becomes a ValueError, or one warning for files in TO_LOOK_AT."""
        try:
            yield
        except OSError as error:
            problem = f"{self.path / name}: cannot be written ({error}); mend the disk, or make room on it"
            if name not in TO_LOOK_AT:
                raise ValueError(f"{problem}, before the run goes on from its last published checkpoint") from None
            if not self._has_warned:
                warnings.warn(f"{problem}; the run goes on without {', '.join(TO_LOOK_AT)}", stacklevel=2)
            self._has_warned = True

    def truncate(self, last_step: int, names: Iterable[str]) -> None:
        """Drops lines after `last_step`, and a line cut short by a kill, before a resumed run writes them again."""
        if not self.is_writer:
            return
        for name in names:
            path = self.path / name
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()
                kept = [line for line in lines if _step_of(line) <= last_step]
                self.replace(name, "".join(line + "\n" for line in kept))

    # -- resume points

    def publish(self, step: int, writes: Sequence[Callable[[Path], None]], keep: int) -> None:
        """Publishes a resume point: all ranks write into a temporary folder; it is renamed, then named in `latest`.

        Each of `writes` must complete its collectives on every rank, even on a rank where it fails. After a failure all
        ranks raise ValueError, and the resume point published before stays the last one.
        """
        partial = self.path / "checkpoints" / f".step-{step}.partial"
        try:
            for act in (self._begin, *writes, self._write_digests, self._name):
                with together(self._group, f"checkpoint of step {step}"):
                    act(partial)
        except (OSError, RuntimeError) as error:
            if self.is_writer:
                shutil.rmtree(partial, ignore_errors=True)
            raise ValueError(
                f"{partial.parent}: the checkpoint of step {step} could not be written ({error}); those published "
                "before are as they were: mend the disk, or make room on it, and go on with --resume"
            ) from error
        if self.is_writer:
            self._sweep(keep)
        self._group.barrier()

    def _begin(self, partial: Path) -> None:
        if self.is_writer:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    def _write_digests(self, partial: Path) -> None:
        names = [str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()]
        digests = self._digests(partial, names)
        if unread := [name for name, digest in digests.items() if not digest]:
            raise OSError(f"{unread[0]} cannot be read again")
        if self.is_writer:
            (partial / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")

    def _name(self, partial: Path) -> None:
        if self.is_writer:
            target = partial.with_name(partial.stem.removeprefix("."))
            for path in (partial, *partial.rglob("*")):
                flush_to_disk(path)
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            replace_text(target.with_name(POINTER), target.name)

    def _digests(self, folder: Path, names: Iterable[str]) -> dict[str, str]:
        """Digests of all the files, on every rank; each rank reads its share of the files."""
        mine = {name: _digest(folder / name) for name in sorted(names)[self._group.rank :: self._group.size]}
        everyone = self._group.all_gather_bytes(json.dumps(mine).encode())
        return {name: digest for part in everyone for name, digest in json.loads(part).items()}

    def check(self) -> None:
        """Raises ValueError, on every rank, if the last published resume point is not as it was published.

        This finds damage, not manipulation: a user who can write in the folder can also write matching digests.
        """
        folder = last_published(self.path)
        if not (folder / DIGESTS).is_file():
            raise ValueError(
                f"{folder}: has no {DIGESTS}, which earlier versions did not write, so damage could not be found; "
                f"start anew with --model {folder / 'huggingface'} under another --name"
            )
        published = read_json(folder / DIGESTS, dict[str, str])
        there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        if strange := sorted(there - {DIGESTS, *published}):
            raise ValueError(
                f"{folder / strange[0]}: has no digest in {DIGESTS}, so damage could not be found; move it away if it "
                f"was not published with the others, or restore {DIGESTS}"
            )
        found = self._digests(folder, published)
        if damaged := sorted(name for name in published if found[name] != published[name]):
            raise ValueError(
                f"{folder / damaged[0]}: is missing, or not as it was published ({len(damaged)} of {len(published)} "
                f"files); restore it, or name an older checkpoint in {folder.parent / POINTER}"
            )

    def latest(self) -> Path | None:
        """The last published resume point; None if there is none."""
        return last_published(self.path) if (self.path / "checkpoints" / POINTER).is_file() else None

    def _sweep(self, keep: int) -> None:
        folder = self.path / "checkpoints"
        ours = [path for path in folder.iterdir() if re.fullmatch(r"step-\d+", path.name)]  # not a user's copies
        published = sorted(ours, key=_number)
        newest = self.latest()
        # Folders of steps later than the newest are from before a resume from an earlier step, and not used any more.
        current = [path for path in published if newest and _number(path) <= _number(newest)]
        for path in {*published} - {*current[-keep:]} | {*folder.glob(".step-*.partial")}:
            shutil.rmtree(path, ignore_errors=True)


def last_published(path: Path) -> Path:
    """The resume point that `latest` of the run in `path` names. Raises ValueError if the run has no such point."""
    pointer = path / "checkpoints" / POINTER
    if not pointer.is_file():
        raise ValueError(f"resume: {path} has no published checkpoint to go on with; {AFRESH}")
    name = pointer.read_text(errors="replace").strip()
    if not re.fullmatch(r"step-\d+", name) or not pointer.with_name(name).is_dir():
        raise ValueError(f"{pointer}: {name[:80]!r} is no checkpoint beside it; write the name of one there: step-<N>")
    return pointer.with_name(name)


def lock_folder(path: Path) -> IO[str]:
    """Locks a run's folder as long as the returned file is open. Raises ValueError if another process has locked it."""
    file = open(path / LOCK, "a+", errors="replace")  # noqa: SIM115 - open as long as the run
    file.seek(0)
    if not lock(file.fileno(), path):
        raise ValueError(
            f"{path}: another run is writing in it ({file.read() or 'not known which'}); wait for its end, or give "
            "another --name"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def check_run_folder(runs: Path, name: str | None, *, resume: bool) -> None:
    """Raises ValueError when the name is taken, there is nothing to resume, or `runs` cannot be written. Cheap."""
    if name is not None:
        path = runs / name
        if resume:
            last_published(path)
        if not resume and path.exists():
            is_published = (path / "checkpoints" / POINTER).is_file()
            fix = "give another --name, or --resume to go on with it" if is_published else AFRESH
            raise ValueError(f"name={name!r}: {path} exists; {fix}")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs):
            pass
    except OSError as error:
        raise ValueError(f"runs={str(runs)!r}: cannot be written ({error}); give a writable --runs") from None


def make_run_folder(runs: Path, name: str | None, stem: str, *, resume: bool) -> Path:
    """Makes and returns `runs`/`name`, or without a name a new `runs`/`stem`-<number>. Only one process calls it.

    Raises ValueError when another run has taken the name since it was checked.
    """
    for number in itertools.count(1):
        path = runs / (name or (stem if number == 1 else f"{stem}-{number}"))
        try:
            path.mkdir(parents=True, exist_ok=resume)
            break
        except FileExistsError:
            if name is not None:
                raise ValueError(f"name={name!r}: another run has just taken it; give another --name") from None
    return path


def newest_run(runs: Path, stem: str) -> str:
    """The folder name of the newest unnamed run with a resume point. Raises ValueError if there is none."""
    numbers = {
        int(match[1] or 1): path.name
        for path in runs.glob(f"{stem}*")
        if (match := re.fullmatch(rf"{re.escape(stem)}(?:-(\d+))?", path.name))
        and (path / "checkpoints" / POINTER).is_file()
    }
    if not numbers:
        raise ValueError(
            f"resume: {runs} has no run {stem} with a published checkpoint; give the --name of the run, or leave "
            "--resume out"
        )
    return numbers[max(numbers)]


def replace_text(path: Path, text: str) -> None:
    """Replaces a file's text in one step: a reader finds the old text or the new, even after a kill."""
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


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hex; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file():  # not a pipe, which would never end
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["training/global_step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
