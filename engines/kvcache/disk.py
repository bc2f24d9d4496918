"""The disk tier: parts as files in a folder that the user names.

It reads and writes by calls and maps nothing: where a disk is full, fails or goes away, a call says so, whereas a
mapping would kill the process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import socket
import warnings
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from pathlib import Path

import torch
from torch import Tensor

from engines.kvcache.files import FileLedger, FileNames
from engines.kvcache.transfer import HEADER_BYTES, KVContent, Tier, encode_header, layers_in, opened, part_of
from engines.sequence import KVPart

_Writer = Callable[[int], None]
"""Writes a file's bytes to a descriptor; raises OSError."""


class DiskKVStore:
    """Parts as files on a disk. An error of the disk is reported once, and from then on no KV is kept there.

    Files are not flushed: they need not outlive the machine.
    """

    name = "disk"

    def __init__(self, token: str, capacity_bytes: int, folder: Path) -> None:
        """Of all files that this process has made at most `capacity_bytes` bytes exist at any time.

        `folder` must exist. In it each host has a folder of its own, since a process id means something on its host
        only. Warns at once where nothing can be written there, or there is less room than that.
        """
        self._names = FileNames("DiskKVStore", token)
        self.files = FileLedger("DiskKVStore", capacity_bytes)
        self._parent = folder
        self.folder = disk_folder(folder)
        self._has_warned = False
        if capacity_bytes:
            self._try()

    def _try(self) -> None:
        try:
            header = memoryview(bytes(HEADER_BYTES))
            self.files.remove(self._make(self._names.new(), HEADER_BYTES, lambda file: _write(file, header, 0)))
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            self._warn(HEADER_BYTES, error)
            return
        if free < self.files.capacity_bytes:
            warnings.warn(
                f"KV disk tier: {self._parent} has {_mib(free)} free, kv_disk_bytes={self.files.capacity_bytes} is "
                f"{_mib(self.files.capacity_bytes)}; what finds no room is recomputed. Give less, or make room",
                stacklevel=4,
            )

    def tier_for(self, num_bytes: int) -> Tier | None:
        return self if self.files.has_room(HEADER_BYTES + num_bytes) else None

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        num_bytes = HEADER_BYTES + content.num_bytes
        if not self.files.has_room(num_bytes):
            return None

        def write(descriptor: int) -> None:
            place, checksum = HEADER_BYTES, 0
            for layer in layers:
                data = layer.cpu().contiguous().view(torch.uint8).flatten().numpy().data
                checksum = zlib.crc32(data, checksum)
                _write(descriptor, data, place)
                place += len(data)
            assert place == num_bytes, f"{place} bytes of layers, {num_bytes} wanted"
            # Last: without it nobody takes the file.
            _write(descriptor, memoryview(encode_header(content, checksum)), 0)

        path = self._new_file(self._names.new(), num_bytes, write)
        return None if path is None else part_of(content, path)

    def adopt(self, source: Path) -> bool:
        """Copies a file of another tier, under its name; False where there is no room, or the file is gone."""
        try:
            opened_source = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            num_bytes = os.fstat(opened_source).st_size
            if not self.files.has_room(num_bytes):
                return False

            def write(descriptor: int) -> None:
                done = 0
                while done < num_bytes:
                    count = os.sendfile(descriptor, opened_source, done, num_bytes - done)
                    if not count:
                        raise OSError(errno.EIO, f"{source} has become shorter")
                    done += count

            return self._new_file(source.name, num_bytes, write) is not None
        finally:
            os.close(opened_source)

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        path = self.path_of(part.location)
        memory = mmap.mmap(-1, HEADER_BYTES + content.num_bytes)
        with opened(path, content) as descriptor, memoryview(memory) as view:
            done = 0
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], done)
                if not count:
                    raise ValueError(f"{path}: ends at {done} of {len(view)} bytes; recompute the KV")
                done += count
        layers = layers_in(memory, content, str(path))
        self.files.touch(path)
        return layers

    def drop(self, part: KVPart) -> None:
        with contextlib.suppress(ValueError, OSError):
            self.files.remove(self.path_of(part.location))

    def close(self) -> None:
        """Removes the files that this process has made. The host's folder stays: other runs may be writing there."""
        self.files.clear()

    def path_of(self, location: str) -> Path:
        """Raises ValueError for a location that is not a file of this run here."""
        path = Path(location)
        if path.parent != self.folder or not self._names.has(path.name):
            raise ValueError(
                f"KVPart.location={location!r}: is no file of this run in {self.folder}; give all processes of a run "
                f"the same token and kv_disk_folder"
            )
        return path

    def _new_file(self, name: str, num_bytes: int, write: _Writer) -> Path | None:
        """A file that is whole, or none."""
        try:
            return self._make(name, num_bytes, write)
        except OSError as error:
            self._warn(num_bytes, error)
            return None

    def _make(self, name: str, num_bytes: int, write: _Writer) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / name
        self.files.remove(path)  # of a move that was interrupted before the source was gone
        with self.files.making(path, num_bytes):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)  # a full disk is found before anything is copied
                write(descriptor)
            finally:
                os.close(descriptor)
        return path

    def _warn(self, num_bytes: int, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        free = ""
        with contextlib.suppress(OSError):
            free = f", {_mib(shutil.disk_usage(self._parent).free)} are free"
        warnings.warn(
            f"KV disk tier: cannot write {num_bytes} bytes in {self._parent} ({error.strerror}{free}); KV that finds "
            f"no room is recomputed. Give a kv_disk_folder that exists and can be written to, or a smaller "
            f"kv_disk_bytes than {self.files.capacity_bytes}",
            stacklevel=4,
        )


def disk_folder(folder: Path) -> Path:
    """Where this host's files lie in the folder that the user names, which several hosts may share."""
    return folder / f"curtail-kv-{socket.gethostname()}"


def _write(descriptor: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], place + done)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
