"""Which KV goes where when replicas regroup and sequences stay in the ranks' caches. Torch-free.

A paused sequence's blocks stay in its replica's cache, known by their contents. The replica that continues it finds
those contents in its own prefix cache, to which they have been moved. So KV that does not arrive is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engines.kvcache.block_manager import BlockManager
from engines.sequence import SequenceId

KEY_BYTES = 16


class KeptKV(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A paused sequence's KV in its replica's cache."""

    replica_id: int
    keys: bytes
    """The contents of its blocks, one after the other: see `block_manager.content_key`."""
    blocks: list[int]

    def contents(self) -> Iterable[tuple[bytes, int]]:
        """Yields (content, block)."""
        for place, block in enumerate(self.blocks):
            yield self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES], block


def kept_kv(kept: Mapping[SequenceId, list[bytes]], blocks: BlockManager, replica_id: int) -> dict[SequenceId, KeptKV]:
    """Returns what a replica keeps (`Replica.kept`), as far as its blocks still have these contents."""
    found = {}
    for sequence_id, keys in kept.items():
        table = blocks.find(keys)
        found[sequence_id] = KeptKV(replica_id=replica_id, keys=b"".join(keys[: len(table)]), blocks=table)
    return found


Source = tuple[int, int]
"""(replica, block) before the regroup."""


def arrivals(
    kept: Mapping[SequenceId, KeptKV], places: Mapping[SequenceId, int], room: Mapping[int, int]
) -> dict[int, dict[bytes, Source]]:
    """Returns for each replica of `room` the contents that it gets, each once, with their sources.

    `places` names the replica that continues a sequence, and `room` how many blocks a replica has. Sequences are served
    in the order of `places`; for the first one that does not fit, and the others after it, the beginning may arrive.
    """
    found: dict[int, dict[bytes, Source]] = {replica_id: {} for replica_id in room}
    for sequence_id, replica_id in places.items():
        if sequence_id not in kept or replica_id not in room:
            continue
        one, coming = kept[sequence_id], found[replica_id]
        for key, block in one.contents():
            if len(coming) == room[replica_id] and key not in coming:
                break
            coming.setdefault(key, (one.replica_id, block))
    return found
