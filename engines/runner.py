"""The model runner: turns what the scheduler chose into one flat batch, runs it, and samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engines.batch import ForwardBatch
from engines.config import EngineConfig
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.paged import PagedKVCache
from engines.kvcache.transfer import KVContent, KVStore, fill_kv, load_heads, read_kv, to_host, tokens_digest
from engines.models.decoder import Decoder
from engines.parallel.sharding import kv_heads
from engines.sampler import make_sampling_batch, sample
from engines.scheduler import Scheduled, Sequence
from engines.sequence import KVPart


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

    @property
    def num_shards(self) -> int:
        return self._decoder.shard.count

    @property
    def kv_dtype(self) -> str:
        return str(self._decoder.dtype).removeprefix("torch.")

    def export_kv(self, sequence: Sequence, policy_version: int, store: KVStore) -> tuple[KVPart, ...] | None:
        """Stores this shard's KV heads of the tokens computed so far; none where an earlier shard holds the same.

        Returns None when the store has no room.
        """
        shard = self._decoder.shard
        heads = kv_heads(self._decoder.config, shard)
        if shard.index and kv_heads(self._decoder.config, replace(shard, index=shard.index - 1)) == heads:
            return ()
        layers = to_host(read_kv(self._kv, self._blocks.table(sequence), sequence.num_computed))
        part = store.export(self._kv_content(sequence, sequence.num_computed, policy_version), layers)
        return None if part is None else (part,)

    def load_kv(self, sequence: Sequence, policy_version: int, store: KVStore) -> int:
        """Writes the KV that an admitted sequence brings to its blocks, after those tokens whose KV is there already.

        Returns for how many tokens it is there then, 0 when what it brings is unusable. The last token is left to be
        computed: its logits are wanted.
        """
        handle = sequence.kv
        assert handle is not None
        num_tokens = min(handle.num_tokens, len(sequence.state.tokens) - 1)
        if num_tokens < 1 or handle.policy_version != policy_version or handle.dtype != self.kv_dtype:
            return 0
        if num_tokens <= sequence.num_computed:
            return sequence.num_computed  # all that it brings was found in the prefix cache
        try:
            layers = load_heads(store, handle.parts, self._kv_content(sequence, handle.num_tokens, policy_version))
        except ValueError:  # gone or damaged: recomputing is always right
            return 0
        fill_kv(self._kv, self._blocks.table(sequence), num_tokens, layers, first=sequence.num_computed)
        return num_tokens

    def _kv_content(self, sequence: Sequence, num_tokens: int, policy_version: int) -> KVContent:
        """This shard's KV heads of the sequence's first tokens."""
        config = self._decoder.config
        heads = kv_heads(config, self._decoder.shard)
        return KVContent(
            policy_version=policy_version,
            tokens_digest=tokens_digest(sequence.state.tokens[:num_tokens]),
            dtype=self.kv_dtype,
            num_layers=config.num_layers,
            num_tokens=num_tokens,
            first_head=heads.start,
            num_heads=heads.stop - heads.start,
            head_dim=config.head_dim,
        )

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
