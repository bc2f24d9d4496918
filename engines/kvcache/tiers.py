"""KV in tiers: a bounded pool in host memory, below it a bounded one on disk. Either tier may refuse an entry."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path

from torch import Tensor

from engines.kvcache.files import FileKVStore, free_memory_bytes
from engines.kvcache.store import HEADER_BYTES, KVContent, Tier
from engines.parallel.owned_files import memory_folders, reclaim
from engines.sequence import KVPart

DEFAULT_HOST_BYTES = 2**30


class TieredKVStore:
    """Stores new entries in the host pool; to make room, the least recently used entries move to the disk.

    An entry moves as a whole and keeps its name, and all processes of the host find it in either tier. When the disk
    is full, too, a new entry is refused: stored entries, whose storing had a cost, are not dropped for it.
    """

    def __init__(self, host: FileKVStore, disk: FileKVStore) -> None:
        """Both stores must have the same token."""
        self.host = host
        self.disk = disk
        self.token = host.token
        self._exporting = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self.host.num_bytes + self.disk.num_bytes

    def tier_for(self, num_bytes: int) -> Tier | None:
        """Returns the disk also when an older entry must first move there: then a new entry costs a disk write."""
        return self.host.tier_for(num_bytes) or self.disk.tier_for(num_bytes)

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        num_bytes = HEADER_BYTES + content.num_bytes
        with self._exporting:  # else two threads could move the same entry down, or one that is being written
            if num_bytes <= self.host.files.capacity_bytes and self._make_room(num_bytes):
                part = self.host.export(content, layers)
                if part is not None:
                    return part
            return self.disk.export(content, layers)

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        try:
            return self.host.load(part, content)
        except ValueError:
            if self.disk.find(part.location) is None:
                raise
        return self.disk.load(part, content)

    def find(self, location: str) -> Path | None:
        return self.host.find(location) or self.disk.find(location)

    def drop(self, part: KVPart) -> None:
        # In this order: a process that is just moving the entry down finds it missing above, and removes its copy.
        self.host.drop(part)
        self.disk.drop(part)

    def close(self) -> None:
        """Removes all files that this process has made, also those whose owner is another process."""
        self.host.close()
        self.disk.close()

    def _make_room(self, num_bytes: int) -> bool:
        while not self.host.files.has_room(num_bytes):
            oldest = self.host.files.oldest()
            if oldest is None or not self._move_down(oldest):
                return False
        return True

    def _move_down(self, path: Path) -> bool:
        if not self.disk.adopt(path):
            return False
        if not os.path.exists(path):  # dropped by another process or thread meanwhile
            self.disk.files.remove(self.disk.folders[0] / path.name)
        self.host.files.remove(path)
        return True


def host_pool_bytes(asked: int | None, *, num_ranks: int, free_bytes: int | None = None) -> int:
    """Returns the bytes of a rank's host pool: `asked`, or 1 GiB but at most a quarter of its share of free memory.

    Raises ValueError when the `num_ranks` ranks of a host ask for more than is free: the kernel would kill processes.
    """
    if free_bytes is None:
        free_bytes = free_memory_bytes()
    if asked is None:
        return min(DEFAULT_HOST_BYTES, free_bytes // (4 * num_ranks))
    if asked * num_ranks > free_bytes:
        raise ValueError(
            f"EngineConfig.kv_host_bytes={asked}: for {num_ranks} ranks of this host, of whose memory in /dev/shm "
            f"{free_bytes} bytes are free; give less, or a larger /dev/shm (docker run --shm-size)"
        )
    return asked


def disk_folder(parent: Path) -> Path:
    """Returns this host's own folder in the user's folder, which several hosts may share: files are named by process
    ids, which are valid on one host only."""
    return parent / f"curtail-kv-{socket.gethostname()}"


def reclaim_tiers(disk_parent: str | None, *, keep_token: str | None = None) -> None:
    """`reclaim` in all tiers."""
    folders = memory_folders() + ([] if disk_parent is None else [disk_folder(Path(disk_parent))])
    reclaim(folders, keep_label=keep_token)


def make_disk_store(token: str, capacity_bytes: int, parent: Path) -> FileKVStore:
    """Makes the disk's store; warns at once when `parent` cannot be written to, or has less room than the capacity."""
    store = FileKVStore("disk", token, capacity_bytes, [disk_folder(parent)])
    if capacity_bytes:
        store.check()
    return store


def make_kv_store(
    token: str, *, host_bytes: int, disk_bytes: int, disk_parent: str | None
) -> FileKVStore | TieredKVStore:
    """Makes the tiers of a process, with the sizes of `EngineConfig`; all processes of a run have the same `token`.

    Files that killed runs have left are removed first.
    """
    reclaim_tiers(disk_parent, keep_token=token)
    host = FileKVStore("host", token, host_bytes, memory_folders())
    return host if disk_parent is None else TieredKVStore(host, make_disk_store(token, disk_bytes, Path(disk_parent)))
