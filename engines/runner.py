"""The model runner: turns what the scheduler chose into one flat batch, runs it, and samples."""

from __future__ import annotations

import numpy as np
import torch

from engines.batch import ForwardBatch
from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.paged import PagedKVCache
from engines.models.decoder import Decoder
from engines.sampler import make_sampling_batch, sample
from engines.scheduler import Scheduled, Sequence


class _SlotTable:
    """One row per running sequence, filled when it is admitted: what a batch then picks by slot number.

    Keeps a step's Python work in proportion to its batch: block tables grow by the block, and sampling parameters
    are written once.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.keys = np.zeros(num_slots, dtype=np.int64)
        self.temperature = np.ones(num_slots)
        self.top_k = np.full(num_slots, -1, dtype=np.int64)
        self.top_p = np.ones(num_slots)
        self.min_p = np.zeros(num_slots)

    def follow(self, sequence: Sequence, table: list[int]) -> None:
        """Brings the sequence's row up to date with its block table."""
        known = sequence.num_table_blocks
        if known == 0:
            self._enter(sequence)
        if known < len(table):
            self.block_table[sequence.slot, known : len(table)] = table[known:]
            sequence.num_table_blocks = len(table)

    def _enter(self, sequence: Sequence) -> None:
        slot, params = sequence.slot, sequence.state.params
        self.keys[slot] = sequence.state.key.noise_key(params.seed)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p


class ModelRunner:
    """Runs scheduled sequences on one decoder and its KV cache."""

    def __init__(
        self, decoder: Decoder, kv: PagedKVCache, blocks: BlockManager, config: EngineConfig, max_model_len: int
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._blocks = blocks
        self._slots = _SlotTable(config.max_num_seqs, blocks.blocks_for(max_model_len))

    def run(self, scheduled: list[Scheduled]) -> tuple[list[int], list[float]]:
        """One forward pass. Returns a token and its log-prob for each item that samples, in order.

        Raises FloatingPointError when the weights give logits that are not finite; the KV cache is empty then.
        """
        batch, slots, positions = self._build(scheduled)
        logits = self._decoder.forward(batch, self._kv)
        if not len(slots):
            return [], []
        table = self._slots
        sampled = sample(
            logits,
            make_sampling_batch(
                keys=table.keys[slots],
                positions=positions,
                temperature=table.temperature[slots],
                top_k=table.top_k[slots],
                top_p=table.top_p[slots],
                min_p=table.min_p[slots],
                device=logits.device,
            ),
        )
        logprobs = sampled.logprobs.tolist()
        if not np.isfinite(logprobs).all():
            self._kv.clear()  # NaN in a block would reach every later holder of it: masked, but 0 * NaN is NaN
            raise FloatingPointError("the model's logits are not finite; its weights hold NaN or infinity")
        return sampled.tokens.tolist(), logprobs

    def _build(self, scheduled: list[Scheduled]) -> tuple[ForwardBatch, np.ndarray, np.ndarray]:
        """The batch, and the slots and token positions of the rows that sample."""
        num_seqs = len(scheduled)
        slots = np.empty(num_seqs, dtype=np.int64)
        starts = np.empty(num_seqs, dtype=np.int64)
        lengths = np.empty(num_seqs, dtype=np.int64)
        samples = np.empty(num_seqs, dtype=bool)
        tokens: list[int] = []
        for row, item in enumerate(scheduled):
            sequence = item.sequence
            start = sequence.num_computed
            self._slots.follow(sequence, self._blocks.table(sequence))
            slots[row], starts[row], lengths[row] = sequence.slot, start, item.num_tokens
            samples[row] = item.samples
            if item.num_tokens == 1:
                tokens.append(sequence.state.tokens[start])
            else:
                tokens += sequence.state.tokens[start : start + item.num_tokens]
        ends = np.cumsum(lengths)
        row_of_token = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(len(tokens)) - (ends - lengths - starts)[row_of_token]
        contexts = starts + lengths
        max_context = int(contexts.max())
        block_size = self._blocks.block_size
        block_table = self._slots.block_table[slots, : self._blocks.blocks_for(max_context)]
        slot_mapping = block_table[row_of_token, positions // block_size] * np.int64(block_size)
        slot_mapping += positions % block_size
        device = self._decoder.device

        def move(array: np.ndarray, dtype: np.typing.DTypeLike) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device, non_blocking=True)

        batch = ForwardBatch(
            tokens=move(np.asarray(tokens), np.int64),
            positions=move(positions, np.int64),
            cu_seqlens_q=move(np.concatenate(([0], ends)), np.int32),
            context_lens=move(contexts, np.int32),
            block_table=move(block_table, np.int32),
            slot_mapping=move(slot_mapping, np.int64),
            logit_rows=move(ends[samples] - 1, np.int64),
            seqlens_q=lengths.tolist(),
        )
        return batch, slots[samples], contexts[samples]
