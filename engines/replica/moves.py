"""The interfaces by which a replica computes tokens and moves KV: a model or the simulator answers them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from engines.replica.scheduler import CachedKV, Scheduled, Sequence
from engines.sequence import KVHandle


@dataclass(kw_only=True)
class KVMoves:
    """Counts of KV moves since the replica was made."""

    num_exported: int = 0
    """Sequences that left with KV."""
    num_refused: int = 0
    """Sequences that left without KV because a store had no room for it."""
    num_imported: int = 0
    """Sequences that were submitted with stored KV, which was loaded."""
    num_recomputed: int = 0
    """Sequences that were submitted with unusable KV: missing, damaged, or of other weights or dtype."""
    num_swapped_out: int = 0
    """Preempted sequences whose KV was stored."""
    num_swapped_in: int = 0
    """Preempted sequences whose stored KV was loaded again; the others were recomputed, or left."""
    swapped_out_bytes: int = 0
    """Bytes stored for preempted sequences by all shards; `swapped_in_bytes`: bytes that were loaded again."""
    swapped_in_bytes: int = 0
    moved_tokens: int = 0
    """Tokens whose KV was stored or loaded, for whatever reason."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """What a regroup took on one rank, with its waits for the other ranks."""

    weights_s: float
    """Seconds to bring the weights into their new shapes."""
    kv_s: float
    """The same of the KV cache."""
    prepare_s: float
    """To make the copies of the weights from which products are computed."""
    weight_bytes: int
    """Bytes that the rank lacked, and that other ranks sent."""
    kv_bytes: int
    num_kv_tokens: int
    """`kv_bytes` in tokens of all heads."""


class Runner(Protocol):
    """`ModelRunner` is one."""

    def run(self, scheduled: list[Scheduled]) -> list[tuple[int, float]]:
        """One forward pass; returns the drawn tokens with their log-probs: see `ModelRunner.run`."""
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
