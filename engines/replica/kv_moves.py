"""What moves the KV of a replica's sequences, as a protocol, and counts of what was moved. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from engines.replica.schedule import CachedKV, Sequence
from engines.sequence import KVHandle, KVPart


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
    stored_tokens: int = 0
    """Tokens whose KV was stored, for whatever reason; `stored_bytes`: their bytes, by all shards."""
    stored_bytes: int = 0
    loaded_tokens: int = 0
    """Tokens whose KV was loaded, for whatever reason."""
    fetched_tokens: int = 0
    """Of the loaded tokens, those that were read before their sequence was admitted."""
    returning_tokens: int = 0
    """Tokens of full blocks behind the prompt that trajectories had computed in earlier turns when the next one began;
    `reused_tokens`: those that were not computed again, since the cache or a store had their KV."""
    reused_tokens: int = 0
    waited_s: float = 0.0
    """Seconds that steps have waited for such reads, when nothing could run."""

    @property
    def moved_tokens(self) -> int:
        """Tokens whose KV was moved while the replica waited."""
        return self.stored_tokens + self.loaded_tokens - self.fetched_tokens

    def returned(self, one: Sequence, block_size: int) -> None:
        """Counts an admitted trajectory whose next turn begins."""
        first = one.state.num_prompt_tokens // block_size * block_size  # a prompt's blocks are its group's
        last = max(first, one.num_returning // block_size * block_size)
        self.returning_tokens += last - first
        self.reused_tokens += max(0, min(one.num_computed, last) - first)
        one.num_returning = 0

    def left(self, handles: Items[KVHandle | None], before: Iterable[KVHandle | None]) -> list[KVHandle | None]:
        """Counts sequences that leave: `handles` name all that is stored of each, None where the new part found no
        room. Returns what each leaves with: there, what was stored of it `before`."""
        self.num_exported += sum(handle is not None for handle in handles)
        self.num_refused += handles.count(None)
        return [new or old for new, old in zip(handles, before, strict=True)]

    def taken_on(
        self, one: Sequence, num_usable: int, *, was_fetched: bool
    ) -> tuple[int, KVHandle | None, list[KVPart]]:
        """Counts the load of an admitted sequence's KV, of which every shard can use the first `num_usable` tokens.

        Returns how many tokens' KV the cache then has, what of the sequence's KV stays stored, and the parts to free:
        unusable ones, and those of a swapped out sequence that have been stored for the swap. The last token is never
        loaded, since its logits are needed.
        """
        assert one.kv is not None
        num_tokens = max(one.num_computed, min(num_usable, len(one.state.tokens) - 1))
        most = num_usable if one.num_pooled is None else min(num_usable, one.num_pooled)
        kept = one.kv.first(most)
        freed = [part for part in one.kv.parts if part.first_token + part.num_tokens > most]
        if one.num_pooled is None:
            self.num_imported += num_usable > 0
            self.num_recomputed += num_usable == 0
        elif num_usable > one.num_pooled:
            self.num_swapped_in += 1
            self.swapped_in_bytes += sum(part.num_bytes for part in freed)
        self.loaded_tokens += num_tokens - one.num_computed
        self.fetched_tokens += was_fetched * (num_tokens - one.num_computed)
        return num_tokens, kept, freed


class Mover(Protocol):
    """`KVMover` is one; its module has the contract."""

    moves: KVMoves

    def export(self, leaving: Items[CachedKV], policy_version: int) -> list[KVHandle | None]:
        """Stores the KV of sequences that leave, as far as it is not stored yet; returns all that is stored then."""
        ...

    def swap_out(self, cached: CachedKV, policy_version: int) -> KVHandle | None:
        """Stores the KV of a sequence that has lost its blocks, where that pays and there is room."""
        ...

    def fetch(self, sequence: Sequence, num_known: int, policy_version: int) -> bool:
        """Starts to read the KV that a sequence brings, behind its first `num_known` tokens, while others step.

        Returns False when there is nothing to read, or too much is being read already.
        """
        ...

    def fetched(self, *, waits: bool) -> list[Sequence]:
        """Returns the sequences whose reads have ended since the last call; with `waits`, waits for the first one."""
        ...

    def hand_over(self, expected: Sequence, sequence: Sequence) -> None:
        """What `fetch` reads or has read for the first is for the second, which has come in its place."""
        ...

    def store_later(self, sequence: Sequence, policy_version: int) -> bool:
        """Starts to store the KV of a running sequence that is about to leave, while others step; its blocks are free
        then. Returns False when there is nothing to store, or too much is being stored already."""
        ...

    def stored(self, *, waits: bool) -> list[tuple[Sequence, KVHandle | None]]:
        """Returns the sequences whose KV has been stored since the last call, with all that is stored of each; with
        `waits`, waits for the first one."""
        ...

    def is_storing(self, sequence: Sequence) -> bool:
        """Whether `stored` will return the sequence."""
        ...

    def forget(self, sequence: Sequence | None = None) -> None:
        """Gives up the read and the write of a sequence that leaves, or of all."""
        ...

    def load(self, arriving: Items[Sequence], policy_version: int) -> list[tuple[int, KVHandle | None]]:
        """Takes on the KV that admitted sequences bring; how many tokens each has now, and what stays stored of it."""
        ...

    def drop(self, handle: KVHandle | None) -> None:
        """Frees the entries of a handle that nobody will ask for."""
        ...
