"""What a simulated `Replica` has in place of a model: passes that only count, and KV that is only counted. Torch-free.

The tokens that are drawn stand for a response of a known length. Each sequence has a token of its own, so that the
prefix cache tells sequences apart as it does in a live run.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from engines.config import Preemption
from engines.kvcache.cost import SwapCost
from engines.replica.moves import KVMoves
from engines.replica.scheduler import CachedKV, Scheduled, Sequence
from engines.sequence import KVHandle, KVPart, SequenceKey

VOCAB_SIZE = 2**62
DTYPE = "bfloat16"


def token_of(key: SequenceKey) -> int:
    """The token that stands for all that a sequence generates; prompts have smaller ones."""
    return 2**32 + (key.prompt_uid * 2**16 + key.sample_index) % 2**61


class SimulatedRunner:
    """Draws for each sequence the token that stands for it."""

    def run(self, scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        for sequence, _ in scheduled:
            sequence.num_table_blocks = len(sequence.blocks)
        return [(token_of(item.sequence.state.key), 0.0) for item in scheduled if item.samples]


@dataclass(kw_only=True)
class KVPool:
    """The stored KV of a run: which entries there are, and how many tokens they have."""

    capacity_tokens: int
    num_tokens: int = 0
    num_made: int = 0
    _entries: dict[str, int] = field(default_factory=dict)

    def add(self, num_tokens: int) -> str | None:
        """The location of a new entry; None when there is no room."""
        if self.num_tokens + num_tokens > self.capacity_tokens:
            return None
        self.num_made += 1
        self.num_tokens += num_tokens
        location = str(self.num_made)
        self._entries[location] = num_tokens
        return location

    def has(self, handle: KVHandle) -> bool:
        return all(part.location in self._entries for part in handle.parts)

    def drop(self, handle: KVHandle) -> None:
        """An entry that is gone already is no error."""
        for part in handle.parts:
            self.num_tokens -= self._entries.pop(part.location, 0)

    def check_integrity(self) -> None:
        """Asserts that the tokens of all entries add up."""
        assert self.num_tokens == sum(self._entries.values()) <= self.capacity_tokens


class SimulatedMover:
    """Answers `engines.replica.mover.Mover`: the rules of `KVMover`, with entries that hold no bytes."""

    def __init__(self, pool: KVPool, preemption: Preemption, swap_cost: SwapCost | None) -> None:
        """Without a cost model, preempted sequences are recomputed when `preemption` is "auto"."""
        self.moves = KVMoves()
        self._pool = pool
        self._preemption = preemption
        self._swap_cost = swap_cost

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        handles = [self._store(cached, policy_version) for cached in leaving]
        self.moves.num_exported += sum(handle is not None for handle in handles)
        self.moves.num_refused += handles.count(None)
        return handles

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        way: str = self._preemption
        if way == "auto" and self._swap_cost is not None:
            way = self._swap_cost.cheaper(cached.num_tokens, cached.num_common)
        if way != "swap" or not cached.num_tokens:
            return None
        handle = self._store(cached, policy_version)
        self.moves.num_swapped_out += handle is not None
        return handle

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[int]:
        return [self._load(one, policy_version) for one in arriving]

    def drop(self, handle: KVHandle | None) -> None:
        if handle is not None:
            self._pool.drop(handle)

    def _store(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        location = self._pool.add(cached.num_tokens)
        if location is None:
            return None
        self.moves.moved_tokens += cached.num_tokens
        part = KVPart(first_head=0, num_heads=1, location=location, num_bytes=0)
        return KVHandle(num_tokens=cached.num_tokens, policy_version=policy_version, dtype=DTYPE, parts=(part,))

    def _load(self, one: Sequence, policy_version: int) -> int:
        handle, num_there = one.kv, one.num_computed
        assert handle is not None
        num_tokens = min(handle.num_tokens, len(one.state.tokens) - 1)
        usable = num_tokens >= 1 and handle.policy_version == policy_version and self._pool.has(handle)
        if one.is_swapped_out:
            self.moves.num_swapped_in += usable
        else:
            self.moves.num_imported += usable
            self.moves.num_recomputed += not usable
        self._pool.drop(handle)
        if not usable or num_tokens <= num_there:
            return num_there
        self.moves.moved_tokens += num_tokens - num_there
        return num_tokens
