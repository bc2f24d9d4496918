"""The first shard's drafts on all shards of a replica, for a drafter whose drafts depend on time, or on rounding.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import msgspec

from engines.decoding import from_msgpack
from engines.sequence import SequenceState
from engines.speculation.drafter import Draft, Drafter

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator

_encode = msgspec.msgpack.Encoder().encode


class SharedDrafter:
    """Each `propose` is a broadcast from the first shard, the only one that has a drafter. The shards call alike."""

    def __init__(self, drafter: Drafter | None, shards: Communicator) -> None:
        self._drafter, self._shards = drafter, shards

    def propose(self, states: list[SequenceState], limits: list[int], num_tokens: int, num_draws: int) -> list[Draft]:
        """Raises what the drafter raises; on the other shards RuntimeError."""
        drafts: list[Draft] | None = None
        if self._drafter is None:
            drafts = from_msgpack(self._shards.broadcast_bytes(None), list[Draft] | None)
            if drafts is None:
                raise RuntimeError("the drafter on the replica's first rank has failed")
            return drafts
        try:
            drafts = self._drafter.propose(states, limits, num_tokens, num_draws)
            return drafts
        finally:  # also after an error: the others wait
            self._shards.broadcast_bytes(_encode(drafts))

    def observe(self, states: list[SequenceState], drafts: Items[Items[int]], num_accepted: list[int]) -> None:
        if self._drafter is not None:
            self._drafter.observe(states, drafts, num_accepted)

    def finish(self, state: SequenceState) -> None:
        if self._drafter is not None:
            self._drafter.finish(state)
