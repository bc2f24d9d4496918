"""The same drafts on all shards of a replica, for drafters whose drafts depend on time, or on rounding.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec

from engines.decoding import from_msgpack
from engines.speculation.drafter import NO_DRAFT, Ask, Draft, Drafter, DraftPass, News, share_of

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


class SplitDrafter:
    """A drafter on each shard, which drafts for its share of the sequences; all shards get all drafts. A small model
    is not cut into shards. The shards call alike."""

    def __init__(self, drafter: Drafter, shards: Communicator) -> None:
        self._drafter, self._shards = drafter, shards
        self.passes: Items[DraftPass] = ()

    def propose(self, asks: list[Ask], num_tokens: int, num_draws: int) -> list[Draft]:
        """Raises what this shard's drafter raises; on the other shards RuntimeError."""
        places = [
            place for place, ask in enumerate(asks) if share_of(ask.state, self._shards.size) == self._shards.rank
        ]
        proposed: tuple[list[int], list[Draft], Items[DraftPass]] | None = None
        try:
            drafts = self._drafter.propose([asks[place] for place in places], num_tokens, num_draws) if places else []
            proposed = places, drafts, self._drafter.passes if places else ()
        finally:  # also after an error: the others wait
            parts = self._shards.all_gather_bytes(_encode(proposed))
        kind = tuple[list[int], list[Draft], tuple[DraftPass, ...]] | None
        shares = [from_msgpack(part, kind) for part in parts]
        all_drafts, all_passes = [NO_DRAFT] * len(asks), []
        for rank, share in enumerate(shares):
            if share is None:
                raise RuntimeError(f"the drafter on rank {rank} of the replica has failed")
            for place, draft in zip(share[0], share[1], strict=True):
                all_drafts[place] = draft
            all_passes.append(share[2])
        # Those at the same time count as one, whose rows a `Pace` spreads over the ranks again.
        self.passes = [
            DraftPass(sum(one.num_rows for one in some), sum(one.num_context_tokens for one in some))
            for some in zip_longest(*all_passes, fillvalue=DraftPass(0))
        ]
        return all_drafts

    def follow(self, news: News) -> None:
        self._drafter.follow(news)
