"""The runner's tables with one row per slot: written when a sequence changes, indexed by row in every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from engines.replica.schedule import Sequence
from engines.sampling.edits import Counts
from engines.sampling.sampler import SamplingBatch, make_sampling_batch


class SlotTable:
    """One row per slot. Only new blocks are copied into a row; sampling parameters are written once per sequence."""

    def __init__(self, num_slots: int, max_blocks: int, physical: Callable[[list[int]], list[int]]) -> None:
        """`physical`: see `PagedKVCache`. The table has these numbers of blocks."""
        self._physical = physical
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._keys = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.ones(num_slots)
        self._top_k = np.full(num_slots, -1, dtype=np.int64)
        self._top_p = np.ones(num_slots)
        self._min_p = np.zeros(num_slots)
        self._is_special = np.zeros(num_slots, dtype=bool)
        self.counts: dict[int, Counts] = {}
        """Of the slots whose sequences are penalised."""
        self._is_penalised = np.zeros(num_slots, dtype=bool)
        self.scores_prompt = np.zeros(num_slots, dtype=bool)
        """Per slot: whether its sequence came without the log-probs of its prompt that it asks for."""
        self._changed: dict[int, tuple[int, int]] = {}
        self._kept: tuple[np.ndarray, SamplingBatch] | None = None
        self.any_special = False
        """Whether, in the last sampling batch, a row's logits are edited, or its most likely tokens are asked for."""

    def follow(self, sequence: Sequence) -> None:
        """Updates the sequence's row from its block table."""
        table, known, slot = sequence.blocks, sequence.num_table_blocks, sequence.slot
        if known == 0:
            self._enter(sequence)
        if known < len(table):
            self.block_table[slot, known : len(table)] = self._physical(table[known:])
            sequence.num_table_blocks = len(table)
            first, last = self._changed.get(slot, (known, known))
            self._changed[slot] = (min(first, known), max(last, len(table)))

    def _enter(self, sequence: Sequence) -> None:
        slot, params = sequence.slot, sequence.state.params
        self._keys[slot] = sequence.state.key.noise_key(params.seed)
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._is_special[slot] = params.edits_logits or params.logprobs is not None
        self._is_penalised[slot] = params.is_penalised
        self.counts.pop(slot, None)
        self.scores_prompt[slot] = sequence.state.lacks_prompt_logprobs
        self._kept = None

    def count(self, sequences: list[Sequence], slots: np.ndarray, num_computed: np.ndarray) -> None:
        """Counts the tokens that a pass computes, for the penalties."""
        for row in np.flatnonzero(self._is_penalised[slots]).tolist():
            self.counts.setdefault(int(slots[row]), Counts()).follow(sequences[row].state, int(num_computed[row]))

    def take_changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block table's changes since the last call: flat indices, int64, and values, int32."""
        width = self.block_table.shape[1]
        ranges = [np.arange(slot * width + lo, slot * width + hi) for slot, (lo, hi) in self._changed.items()]
        self._changed.clear()
        flat = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        return flat, self.block_table.reshape(-1)[flat]

    def sampling_batch(self, slots: np.ndarray, positions: Tensor) -> SamplingBatch:
        """Returns the batch of N rows of the slots, int64 [N], whose tokens are drawn at `positions`, int64 [N]."""
        if self._kept is None or not np.array_equal(self._kept[0], slots):
            batch = make_sampling_batch(
                keys=self._keys[slots],
                positions=np.empty(0, dtype=np.int64),
                temperature=self._temperature[slots],
                top_k=self._top_k[slots],
                top_p=self._top_p[slots],
                min_p=self._min_p[slots],
                device=positions.device,
            )
            self._kept = (slots, batch)
            self.any_special = bool(self._is_special[slots].any())
        return replace(self._kept[1], positions=positions)
