"""Stored KV as files of a host: in its memory (/dev/shm), or in a folder on a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engines.kvcache.store import HEADER_BYTES, KVContent, Tier, encode_header, entry_memory, layers_in
from engines.memory.host_memory import free_host_bytes
from engines.parallel.owned_files import DEV_SHM, check_is_going_on, has_label, new_name
from engines.sequence import KVPart

_FEWEST_FILES = 64
_REMEDIES = {
    "host": "the machine a larger /dev/shm (docker run --shm-size)",
    "disk": "a kv_disk_folder that exists and can be written to",
}


class FileKVStore:
    """Keeps each entry as a file, readable by the processes of this host and user that know the run's token.

    A part's location is the file's name, which contains its creator and its run, and cannot be guessed. Files are read
    and written by system calls, never mapped: where a disk is full, fails or disappears, a call returns an error,
    whereas a mapping would kill the process. Files are not flushed, since they need not outlive the machine.
    """

    def __init__(self, name: Literal["host", "disk"], token: str, capacity_bytes: int, folders: Items[Path]) -> None:
        """The existing files that this process has made have at most `capacity_bytes` bytes together at any time.

        A file is written to the first folder that has room; the first failure is reported as a warning. Missing
        folders of a disk are created. All processes of a run have the same secret `token`. Raises ValueError when it
        is not 16 to 64 letters and digits, or the capacity is negative.
        """
        if not re.fullmatch(r"[0-9a-zA-Z]{16,64}", token):
            raise ValueError(f"FileKVStore.token={token!r}: use 16 to 64 letters and digits (secrets.token_hex(16))")
        if capacity_bytes < 0:
            raise ValueError(f"FileKVStore.capacity_bytes={capacity_bytes}: must be at least 0")
        self.name = name
        self.token = token
        self.folders = tuple(folders)
        self.files = FileLedger(capacity_bytes)
        self._has_warned = False
        self._exporting = threading.Lock()
        self._memory = _FreeMemory()

    @property
    def num_bytes(self) -> int:
        """Bytes of the existing files that this process has made."""
        return self.files.num_bytes

    def tier_for(self, num_bytes: int) -> Tier | None:
        return Tier(self.name, self) if self.files.has_room(HEADER_BYTES + num_bytes) else None

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        num_bytes = HEADER_BYTES + content.num_bytes

        def write(descriptor: int) -> None:
            place, checksum = HEADER_BYTES, 0
            for layer in layers:
                data = layer.contiguous().view(torch.uint8).flatten().numpy().data
                checksum = zlib.crc32(data, checksum)
                _write(descriptor, data, place)
                place += len(data)
            assert place == num_bytes, f"{place} bytes of layers, {num_bytes} wanted"
            # The header comes last: without it no reader accepts the file.
            _write(descriptor, memoryview(encode_header(content, checksum)), 0)

        name = new_name(self.token)
        with self._exporting:  # else two threads could take the same room
            return content.part(name) if self._make(name, num_bytes, write) else None

    def adopt(self, source: Path) -> bool:
        """Copies a file of another tier under the same name; False when there is no room, or the file is missing."""
        with contextlib.suppress(OSError), open(source, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size

            def write(descriptor: int) -> None:
                place = 0
                while count := os.sendfile(descriptor, file.fileno(), place, num_bytes - place):
                    place += count
                if place < num_bytes:
                    raise OSError(errno.EIO, f"{source} has become shorter")

            self._remove(source.name)  # left by a move that was interrupted before it removed the source
            return self._make(source.name, num_bytes, write)
        return False

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        path = self.find(part.location)
        if path is None:
            raise ValueError(
                f"KVPart.location={part.location!r}: is no file of this run in "
                f"{' or '.join(map(str, self.folders))}: it is gone, or the run's processes have other folders; "
                f"recompute the KV"
            )
        try:
            memory = _read_whole(path, HEADER_BYTES + content.num_bytes)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}); recompute the KV") from None
        layers = layers_in(memory, content, str(path))
        self.files.touch(path)
        return layers

    def find(self, location: str) -> Path | None:
        """Returns the entry's path; None when the file is missing, or not of this run."""
        if not has_label(location, self.token):
            return None
        return next((path for folder in self.folders if os.path.lexists(path := folder / location)), None)

    def drop(self, part: KVPart) -> None:
        if has_label(part.location, self.token):
            self._remove(part.location)

    def close(self) -> None:
        """Removes all files that this process has made, also those whose owner is another process; folders stay."""
        self.files.clear()

    def check(self) -> None:
        """Warns when nothing can be written, or less is free than the capacity."""
        name = new_name(self.token)
        if self._make(name, HEADER_BYTES, lambda file: _write(file, memoryview(bytes(HEADER_BYTES)), 0)):
            self._remove(name)
            free = shutil.disk_usage(self.folders[0]).free
            if free < self.files.capacity_bytes:
                self._warn(f"{self.folders[0]} has {_mib(free)} free, not the {_mib(self.files.capacity_bytes)} wanted")

    def _remove(self, name: str) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):  # on a disk that fails
                self.files.remove(folder / name)

    def _make(self, name: str, num_bytes: int, write: Callable[[int], None]) -> bool:
        """Makes a whole file and returns True, or makes none and returns False. `write` receives its descriptor."""
        if not self.files.has_room(num_bytes):
            return False
        for folder in self.folders:
            path, descriptor = folder / name, -1
            try:
                with self.files.making(path, num_bytes):
                    if self.name == "disk":
                        folder.mkdir(exist_ok=True)
                    descriptor = self._create(path, num_bytes)
                    try:
                        write(descriptor)
                    finally:
                        os.close(descriptor)
                return True
            except OSError as error:
                self._report(folder, num_bytes, error)
                if descriptor >= 0:
                    break  # `write` has used up its layers
        return False

    def _create(self, path: Path, num_bytes: int) -> int:
        """Creates a file, reserves its bytes, and returns its descriptor. Raises OSError when there is no room."""
        if path.parent == DEV_SHM and not self._memory.take(num_bytes):
            raise OSError(errno.ENOMEM, "the machine's memory is in use")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _report(self, folder: Path, num_bytes: int, error: OSError) -> None:
        free = ""
        with contextlib.suppress(OSError):
            free = f", {_mib(shutil.disk_usage(folder).free)} are free"
        if not self._has_warned:
            self._warn(f"cannot write {num_bytes} bytes in {folder} ({error.strerror}{free})")
        self._has_warned = True

    def _warn(self, problem: str) -> None:
        warnings.warn(
            f"KV {self.name} tier: {problem}; KV that finds no room is recomputed. Give {_REMEDIES[self.name]}, or a "
            f"smaller kv_{self.name}_bytes than {self.files.capacity_bytes}",
            stacklevel=5,
        )


class FileLedger:
    """The files that this process has made, least recently used first: at most `capacity_bytes` bytes exist.

    A file is counted from before it exists until after it is removed, even after an interrupt. Files that other
    processes have removed are forgotten when room is needed, and when the ledger has doubled. Thread-safe.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._pid = os.getpid()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._total = 0
        """Bytes of these files; after an interrupt it may be too high until `_look` counts again."""
        self._next_look = _FEWEST_FILES
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that exist."""
        with self._lock:
            self._look()
            return self._total

    def has_room(self, num_bytes: int) -> bool:
        with self._lock:
            if self._total + num_bytes > self.capacity_bytes or len(self._sizes) >= self._next_look:
                self._look()
            return self._total + num_bytes <= self.capacity_bytes

    def _look(self) -> None:
        self._sizes = OrderedDict((path, size) for path, size in self._sizes.items() if os.path.exists(path))
        self._total = sum(self._sizes.values())
        self._next_look = max(_FEWEST_FILES, 2 * len(self._sizes))

    @contextlib.contextmanager
    def making(self, path: Path, num_bytes: int) -> Iterator[None]:
        """A context for making the file: after an error or an interrupt in it the file is removed."""
        try:
            self._count(path, num_bytes)
            yield
            self._count(path, num_bytes)  # another thread may have run `_look` before the file existed
        except BaseException:
            with contextlib.suppress(OSError):  # where nothing can be written no file exists
                self.remove(path)
            raise

    def _count(self, path: Path, num_bytes: int) -> None:
        with self._lock:
            check_is_going_on()
            if path not in self._sizes:
                self._total += num_bytes
                self._sizes[path] = num_bytes

    def touch(self, path: Path) -> None:
        """Marks the file as used just now; a file that is not in the ledger is no error."""
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def remove(self, path: Path) -> None:
        """Removes the file, also when another process made it; a missing file is no error."""
        path.unlink(missing_ok=True)
        with self._lock:
            self._total -= self._sizes.pop(path, 0)

    def oldest(self) -> Path | None:
        """Returns the least recently used file, None when there is none."""
        with self._lock:
            return next(iter(self._sizes), None)

    def clear(self) -> None:
        """Removes all files that this process has made; in a forked child, whose ledger is its parent's, none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for path in self._sizes:
                with contextlib.suppress(OSError):  # missing, or on a disk that fails
                    path.unlink()
            self._sizes.clear()
            self._total = 0


class _FreeMemory:
    """What `free_memory_bytes` has returned at most 0.1 s ago, less what was taken since then: a call takes 0.3 ms."""

    def __init__(self) -> None:
        self._num_bytes, self._until = 0, 0.0

    def take(self, num_bytes: int) -> bool:
        """Returns whether as many bytes are free, and takes them if so."""
        now = time.monotonic()
        if now >= self._until or num_bytes > self._num_bytes:
            self._num_bytes, self._until = free_memory_bytes(), now + 0.1
        if num_bytes > self._num_bytes:
            return False
        self._num_bytes -= num_bytes
        return True


def free_memory_bytes() -> int:
    """Returns the bytes that fit in /dev/shm without displacing others: what it, machine and container all have free.

    0 where there is no /dev/shm.
    """
    try:
        shm = os.statvfs(DEV_SHM)
    except OSError:
        return 0
    there = shm.f_bavail * shm.f_frsize
    host = free_host_bytes()
    return there if host is None else min(there, host)


def _write(descriptor: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], place + done)


def _read_whole(path: Path, num_bytes: int) -> memoryview:
    """Returns a file's bytes. Raises OSError, or ValueError when the file has another length."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found, done = os.fstat(descriptor).st_size, 0
        memory = entry_memory(num_bytes) if found == num_bytes else None
        while memory is not None and done < num_bytes:
            count = os.preadv(descriptor, [memory[done:]], done)
            if not count:  # it has just become shorter
                found, memory = done, None
            done += count
    finally:
        os.close(descriptor)
    if memory is None:
        raise ValueError(f"{path}: has {found} bytes, {num_bytes} wanted; it is damaged, recompute the KV")
    return memory


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
