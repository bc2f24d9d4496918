"""The first shard's drafts on all shards of a replica, for a drafter whose drafts depend on time, or on rounding.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import msgspec

from engines.decoding import from_msgpack
from engines.speculation.drafter import Ask, Draft, Drafter, DraftPass, News

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator

_encode = msgspec.msgpack.Encoder().encode


class SharedDrafter:
    """Each `propose` is a broadcast from the first shard, the only one that has a drafter. The shards call alike."""

    def __init__(self, drafter: Drafter | None, shards: Communicator) -> None:
        self._drafter, self._shards = drafter, shards
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        """Raises what the drafter raises; on the other shards RuntimeError."""
        proposed: tuple[list[Draft], Items[DraftPass]] | None = None
        if self._drafter is None:
            kind = tuple[list[Draft], tuple[DraftPass, ...]] | None
            proposed = from_msgpack(self._shards.broadcast_bytes(None), kind)
            if proposed is None:
                raise RuntimeError("the drafter on the replica's first rank has failed")
            drafts, self.passes = proposed
            return drafts
        try:
            drafts = self._drafter.propose(asks, num_tokens, num_draws)
            proposed = drafts, self._drafter.passes
            self.passes = proposed[1]
            return drafts
        finally:  # also after an error: the others wait
            self._shards.broadcast_bytes(_encode(proposed))

    def follow(self, news: News) -> None:
        if self._drafter is not None:
            self._drafter.follow(news)
