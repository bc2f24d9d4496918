"""What a replica asks of those who compute for it and move its KV: a model, or a simulation. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from engines.replica.scheduler import CachedKV, Scheduled, Sequence
from engines.sequence import KVHandle


@dataclass(kw_only=True)
class KVMoves:
    """How sequences came and went, counted since the replica was made."""

    num_exported: int = 0
    """Sequences that left with KV."""
    num_refused: int = 0
    """Sequences that were to leave with KV, for which a store had no room."""
    num_imported: int = 0
    """Sequences whose KV was taken on."""
    num_recomputed: int = 0
    """Sequences that brought KV which could not be used: gone, damaged, or of other weights or dtype."""
    num_swapped_out: int = 0
    """Preempted sequences whose KV was stored."""
    num_swapped_in: int = 0
    """Those of them that came back with it; the others were recomputed, or left."""
    swapped_out_bytes: int = 0
    """Of all shards; so are the others."""
    swapped_in_bytes: int = 0
    moved_tokens: int = 0
    """Tokens whose KV was stored, or taken on, for whatever reason."""


class Runner(Protocol):
    """`ModelRunner` is one."""

    def run(self, scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        """One forward pass; a token and its log-prob for each item that samples, in order."""
        ...


class Mover(Protocol):
    """`KVMover` is one; its module has the contract."""

    moves: KVMoves

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        """Stores the KV of sequences that leave; None for those that find no room."""
        ...

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        """Stores the KV of a sequence that has lost its blocks, where that pays and there is room."""
        ...

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[int]:
        """Takes on the KV that admitted sequences bring, and frees its entries; how many tokens each has now."""
        ...

    def drop(self, handle: KVHandle | None) -> None:
        """Frees the entries of a handle that nobody will ask for."""
        ...
