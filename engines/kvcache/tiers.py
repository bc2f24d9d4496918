"""KV in tiers: a bounded pool in the host's memory, below it a bounded one on disk. KV is a cache: each may refuse."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from engines.kvcache.disk import DiskKVStore, disk_folder
from engines.kvcache.files import free_memory_bytes
from engines.kvcache.transfer import HEADER_BYTES, HostKVStore, KVContent, Tier, reclaim
from engines.sequence import KVPart

DEFAULT_HOST_BYTES = 2**30


class TieredKVStore:
    """New parts go to the host pool; those that were not used for longest make room, by moving down to the disk.

    A part moves whole, keeps its location, and is found wherever it lies, by all processes of the host. When the disk
    is full, too, a new part is refused: one that was kept at a cost is not thrown away for it.
    """

    def __init__(self, host: HostKVStore, disk: DiskKVStore) -> None:
        """Both with the same token."""
        self.host = host
        self.disk = disk

    @property
    def capacity_bytes(self) -> int:
        return self.host.capacity_bytes + self.disk.files.capacity_bytes

    @property
    def num_bytes(self) -> int:
        return self.host.num_bytes + self.disk.files.num_bytes

    def tier_for(self, num_bytes: int) -> Tier | None:
        """The disk, too, where a part has to move there first: that is what keeping one more costs then."""
        return self.host.tier_for(num_bytes) or self.disk.tier_for(num_bytes)

    def export(self, content: KVContent, layers: Iterable[Tensor]) -> KVPart | None:
        num_bytes = HEADER_BYTES + content.num_bytes
        if num_bytes <= self.host.capacity_bytes and self._make_room(num_bytes):
            part = self.host.export(content, layers)
            if part is not None:
                return part
        return self.disk.export(content, layers)

    def load(self, part: KVPart, content: KVContent) -> Items[Tensor]:
        on_disk = self._on_disk(part)
        if on_disk.location != part.location:
            try:
                return self.host.load(part, content)
            except ValueError:
                if not os.path.exists(on_disk.location):
                    raise
        return self.disk.load(on_disk, content)

    def drop(self, part: KVPart) -> None:
        # In this order: whoever moves the part down at this moment finds it gone above, and removes what it has made.
        self.host.drop(part)
        self.disk.drop(self._on_disk(part))

    def close(self) -> None:
        """Removes the files that this process has made, handed over or not."""
        self.host.close()
        self.disk.close()

    def path_of(self, location: str) -> Path:
        """Where the part lies now. Raises ValueError for a location that is not a file of this run."""
        with contextlib.suppress(ValueError):
            path = self.host.path_of(location)
            if os.path.exists(path):
                return path
        return self.disk.path_of(str(self.disk.folder / Path(location).name))

    def _on_disk(self, part: KVPart) -> KVPart:
        return replace(part, location=str(self.disk.folder / Path(part.location).name))

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
            self.disk.files.remove(self.disk.folder / path.name)
        self.host.files.remove(path)
        return True


def host_pool_bytes(asked: int | None, *, num_ranks: int, free_bytes: int | None = None) -> int:
    """Bytes of the host pool of each of a host's `num_ranks` ranks; by default 1 GiB, or what is safely there.

    Raises ValueError where more is asked for than is free: memory that is not there ends in the kernel's killing.
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


def reclaim_tiers(disk_parent: str | None, *, keep_token: str | None = None) -> None:
    """`reclaim` in all tiers."""
    reclaim(keep_token=keep_token)
    if disk_parent is not None:
        reclaim([disk_folder(Path(disk_parent))], keep_token=keep_token)


def make_kv_store(
    token: str, *, host_bytes: int, disk_bytes: int, disk_parent: str | None
) -> HostKVStore | TieredKVStore:
    """The tiers of a process, as `EngineConfig` has them; all processes of a run have the same `token`.

    What killed runs have left is removed first.
    """
    reclaim_tiers(disk_parent, keep_token=token)
    host = HostKVStore(token, host_bytes)
    if disk_parent is None:
        return host
    return TieredKVStore(host, DiskKVStore(token, disk_bytes, Path(disk_parent)))
