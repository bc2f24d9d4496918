"""Continuous batching: which sequences run in the next forward pass, and with how many tokens each. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager
from engines.sequence import KVHandle, SequenceState


@dataclass(eq=False, kw_only=True)
class Sequence:
    """A sequence while a replica has it: its state, and how far this replica's KV cache follows it."""

    state: SequenceState
    max_len: int
    """Length at which it is finished."""
    release_len: int
    """Length at which this replica gives it back; `max_len` when it may finish here."""
    kv: KVHandle | None = None
    """Stored KV to begin with when it is admitted; None from then on."""
    num_computed: int = 0
    """Tokens whose KV is in the cache."""
    slot: int = -1
    """Row in the runner's per-sequence tables while running."""
    num_table_blocks: int = 0
    """Blocks that the runner has copied into that row; 0 when the row is not this sequence's yet."""


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """The next `num_tokens` of a sequence, from `sequence.num_computed` on."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether these reach the sequence's end, so that a next token is drawn."""
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.state.tokens)


class Scheduler:
    """Running sequences first, then waiting ones while slots, blocks and the token budget last.

    A waiting sequence is admitted when the blocks for all its tokens are free, plus one for each running sequence
    to grow into. When a running one cannot grow, the latest admitted is preempted: its blocks are freed, and its
    tokens are recomputed when it is admitted again.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self._config = config
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a finished, paused or aborted sequence at once."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence)

    def schedule(self, load_kv: Callable[[list[Sequence]], None] | None = None) -> list[Scheduled]:
        """The next forward pass: decodes first, then prefill chunks. Empty only when there is no work.

        `load_kv` gets those newly admitted that bring KV, their blocks reserved, and sets `num_computed` of each to
        what it has loaded, less than its tokens; all is computed without. The caller advances `num_computed` when the
        pass has run.
        """
        budget = self._config.max_num_batched_tokens
        decodes: list[Scheduled] = []
        prefills: list[Scheduled] = []
        preempted_before = self.num_preemptions
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if not self._make_room(sequence):
                break  # it was the last one, and is preempted itself
            index += 1
            remaining = len(sequence.state.tokens) - sequence.num_computed
            if remaining == 1:
                decodes.append(Scheduled(sequence=sequence, num_tokens=1))
                budget -= 1
            else:
                prefills.append(Scheduled(sequence=sequence, num_tokens=remaining))
        if self.num_preemptions == preempted_before:
            prefills += self._admit(load_kv)
        return decodes + self._chunk(prefills, budget)

    def _admit(self, load_kv: Callable[[list[Sequence]], None] | None) -> list[Scheduled]:
        admitted = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            num_tokens = len(sequence.state.tokens)
            if self.blocks.blocks_for(num_tokens) + len(self.running) > self.blocks.num_free_blocks:
                break
            self.waiting.popleft()
            self.blocks.grow(sequence, num_tokens)
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
        bringing = [sequence for sequence in admitted if sequence.kv is not None]
        if load_kv is not None and bringing:
            load_kv(bringing)
        return [Scheduled(sequence=s, num_tokens=len(s.state.tokens) - s.num_computed) for s in admitted]

    def _chunk(self, prefills: list[Scheduled], budget: int) -> list[Scheduled]:
        """Cuts prefills to the chunk size and the token budget, first come first served."""
        limit = self._config.prefill_chunk_size or budget
        chunks = []
        for item in prefills:
            num_tokens = min(item.num_tokens, limit, budget)
            if num_tokens <= 0:
                break
            chunks.append(Scheduled(sequence=item.sequence, num_tokens=num_tokens))
            budget -= num_tokens
        # A last chunk of one token, or all that loaded KV leaves, runs with the decodes, which come first in a batch.
        return sorted(chunks, key=lambda item: item.num_tokens > 1)

    def _make_room(self, sequence: Sequence) -> bool:
        """Gives the sequence blocks for all its tokens, preempting the latest admitted while there are too few."""
        while not self.blocks.can_grow(sequence, len(sequence.state.tokens)):
            if self._preempt_latest() is sequence:
                return False
        self.blocks.grow(sequence, len(sequence.state.tokens))
        return True

    def preempt_all(self) -> None:
        """Sends every running sequence back to wait, in order, to be recomputed."""
        while self.running:
            self._preempt_latest()

    def _preempt_latest(self) -> Sequence:
        victim = self.running.pop()
        self._vacate(victim)
        victim.num_computed = 0
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _vacate(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_table_blocks = 0
