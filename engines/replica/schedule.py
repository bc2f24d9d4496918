"""A step's schedule, and sequences while a replica has them. Plain values; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engines.replica.stop_strings import StopSearch
from engines.sequence import KVHandle, Ranked, SequenceState

Drawn = tuple[int, float, *tuple[list[Ranked], ...]]
"""A token and its log-prob; then, where the sequence asks for them, the most likely tokens."""


class CachedKV(NamedTuple):
    """The KV of the first `num_tokens` tokens of a sequence, and the blocks of the replica's cache that hold it."""

    tokens: list[int]
    num_tokens: int
    blocks: list[int]
    num_common: int = 0
    """Leading tokens whose KV other sequences hold, too: it is found again while they stay. Set on preemption."""
    stored: KVHandle | None = None
    """What is stored already of it."""

    @property
    def num_stored(self) -> int:
        """Leading tokens whose KV is stored already."""
        return 0 if self.stored is None else self.stored.num_tokens


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A sequence while a replica has it: its state, and how far this replica's KV cache follows it."""

    state: SequenceState
    max_len: int
    """Length at which it is finished."""
    release_len: int
    """Length at which this replica releases it; `max_len` when it may finish here."""
    is_bounded: bool = False
    """Whether its stay here has a bound of its own, so that it is not preempted."""
    kv: KVHandle | None = None
    """Stored KV of its first tokens. What the cache lacks of it is loaded when the sequence is admitted."""
    priority: float = 0.0
    """See `Work.priority`."""
    num_pooled: int | None = None
    """How many tokens of `kv` had been stored before its KV was swapped out; None unless it waits swapped out."""
    blocks: list[int] = field(default_factory=list)
    """Its block table while running. It belongs to the block manager and must not be modified."""
    num_computed: int = 0
    """Tokens whose KV is in the cache."""
    slot: int = -1
    """Row in the runner's per-sequence tables while running."""
    num_table_blocks: int = 0
    """Blocks that the runner has copied into that row; 0 when the row is not this sequence's yet."""
    content_keys: list[bytes] = field(default_factory=list)
    """Content keys of its first full blocks, as far as they have been needed."""
    num_published: int = 0
    """Leading blocks that have been published since the sequence was admitted."""
    num_kept_free: int = 0
    """Free blocks that no other sequence is admitted to, while it is running."""
    num_returning: int = 0
    """Tokens that a trajectory, which has observed something and waits for its first admission since, had computed."""
    turn: str | None = None
    """The text of its turn, where that has ended, so that it leaves."""
    stop_search: StopSearch | None = None
    """State of the search for stop strings since the sequence was admitted."""

    @property
    def cached(self) -> CachedKV:
        return CachedKV(self.state.tokens, self.num_computed, self.blocks, stored=self.kv)

    @property
    def is_swapped_out(self) -> bool:
        """Whether a part of `kv` was taken from this replica's own blocks when the sequence was preempted."""
        return self.num_pooled is not None

    def leave_slot(self) -> None:
        """Resets all fields that are valid only while the sequence is running."""
        self.slot, self.blocks = -1, []
        self.num_computed = self.num_table_blocks = self.num_published = self.num_kept_free = 0
        self.stop_search = None


@dataclass(eq=False, kw_only=True)
class Fork:
    """Another path of a sequence's draft: blocks of its own behind the first blocks of the sequence's table.

    They begin where the sequence's last block does, or behind it. Where draft tokens that it shares with the first path
    lie in a shared block, the rows of that path compute them, and draw behind them.
    """

    draft: tuple[int, ...]
    """The whole path."""
    num_common: int
    """Leading tokens of `draft` that the first path has, too."""
    num_shared: int
    """Leading blocks of the sequence's table that come before its own ones."""
    start: int
    """Position of the first token that is computed over this table: the sequence's last one, or one of the draft."""
    blocks: list[int] = field(default_factory=list)
    """Its own blocks. They belong to the block manager and must not be modified."""


class Scheduled(NamedTuple):
    """A sequence's next `num_tokens` tokens to compute, from `sequence.num_computed` on."""

    sequence: Sequence
    num_tokens: int
    draft: tuple[int, ...] = ()
    """Guessed tokens behind the sequence's end, counted in `num_tokens`. After each of them a token is drawn, too."""
    forks: tuple[Fork, ...] = ()
    """Other paths, not counted in `num_tokens`. A token is drawn after each token that is computed for one of them."""

    @property
    def samples(self) -> bool:
        """Whether these tokens reach the sequence's end, so that a next token is drawn."""
        return self.sequence.num_computed + self.num_tokens >= len(self.sequence.state.tokens)


@dataclass(kw_only=True)
class Schedule:
    """A step's plan: store the KV of `preempted`, load that of `arriving`, call `add_loaded`, then run `batch`."""

    batch: list[Scheduled]
    """Single tokens first, then drafts and prefill chunks. After `add_loaded` it is empty only without work."""
    preempted: list[tuple[Sequence, CachedKV]]
    """Preempted sequences. Their KV stays in the blocks that they lost until the next pass or load."""
    arriving: list[Sequence]
    """Admitted sequences with stored KV. Their blocks are allocated; the first `num_computed` tokens are filled."""
    admitted: list[Sequence]
    """Sequences that have left the queue for this batch."""
    returning: list[Sequence]
    """Admitted trajectories whose next turn begins."""
    budget: int
    """Tokens that may still join the batch."""
