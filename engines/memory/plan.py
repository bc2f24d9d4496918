"""What one rank's engine takes of its device's memory, known before anything is taken. Torch-free.

Weights and the KV cache are exact. What a pass takes is one bound and not a measurement: it must be known before the
weights are there, for every layout that the run may have, and on a CPU a pass of the most tokens takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.config import EngineConfig, ModelConfig
from engines.parallel.sharding import Shard, shard_config

MIB = 2**20
PIECE_TOKENS = 2**15
"""Context tokens, padding included, that attention gathers at once; one sequence is gathered whole."""
PIECE_BYTES = 64 * MIB
"""What work that can be cut into pieces takes at once: attention masks, and the sampler's copies of logits."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

_LIBRARY_BYTES = {"cpu": 48 * MIB, "cuda": 256 * MIB}
"""What threads, matrix libraries and the allocator keep for themselves: measured on a CPU, assumed on CUDA."""
_SAMPLED_BYTES = {"cpu": 256, "cuda": 64}
"""The most that sampling takes per logit of a piece: noise for all, and on a CPU lists of who may still win."""
_TOKEN_BYTES = 256
"""Per token of a pass: ids, positions, slots and the rows of padded buckets."""
_BLOCK_BYTES = 400
"""Per KV block: whose it is, and the digest of its content, in Python's objects."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank."""

    weights: int
    copies: int
    """Of weights: matrices as the CPU's library wants them, and this rank's part of the host's copy."""
    loading: int
    """Beside the weights while they come: one parameter of the whole model."""
    layers: int
    """The most that layers take for the tokens of a pass."""
    logits: int
    """Of the most rows that a pass may sample, and what the sampler makes of them."""
    tables: int
    """Cosines and sines of every position, block tables, whose each block is, and a scratch block."""
    libraries: int
    kv_cache: int
    num_kv_tokens: int
    """What the KV cache holds."""
    max_model_len: int
    max_num_seqs: int

    @property
    def passing(self) -> int:
        """What comes and goes; its three kinds do not overlap."""
        return max(self.layers, self.logits, self.loading)

    @property
    def total(self) -> int:
        return self.weights + self.copies + self.tables + self.libraries + self.passing + self.kv_cache

    def parts(self) -> str:
        """What the total is made of, in MiB, in one line."""
        return (
            f"weights {mib(self.weights + self.copies)}, KV cache {mib(self.kv_cache)}, a pass {mib(self.passing)} "
            f"(the most of layers {mib(self.layers)}, logits {mib(self.logits)}, loading {mib(self.loading)}), other "
            f"{mib(self.tables + self.libraries)}"
        )

    def what_to_lower(self) -> str:
        """The options on which the parts depend, that of the largest part first."""
        sizes = {
            "kv_cache_bytes": self.kv_cache,
            "max_num_batched_tokens": self.layers if self.layers >= self.logits else 0,
            "max_num_seqs": max(self.tables, self.logits if self.layers < self.logits else 0),
            "dtype (bfloat16 takes half of float32; or raise tensor_parallel_size)": self.weights + self.copies,
            "max_model_len": self.tables,
        }
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def summary(self) -> str:
        """One line for a log: what is taken, and what the KV cache holds."""
        full = self.num_kv_tokens // self.max_model_len
        crowded = "" if full >= self.max_num_seqs else f"; beyond {full} such, the latest wait or are recomputed"
        return (
            f"memory: {mib(self.total)} MiB per rank ({self.parts()}); KV cache of {self.num_kv_tokens} tokens: {full} "
            f"sequences of max_model_len={self.max_model_len}, max_num_seqs={self.max_num_seqs}{crowded}"
        )


def mib(num_bytes: int) -> int:
    """Rounded up."""
    return -(-num_bytes // MIB)


def kv_block_bytes(model: ModelConfig, config: EngineConfig, tp_size: int) -> int:
    """One block of KV on each rank of a replica of `tp_size`. Raises ValueError when the model cannot be cut so."""
    local = shard_config(model, Shard(count=tp_size, max_count=tp_size))
    return config.block_size * local.kv_bytes_per_token(ITEM_BYTES[config.dtype])


def plan_memory(
    model: ModelConfig,
    local: ModelConfig,
    config: EngineConfig,
    *,
    weights: int,
    copies: int,
    loading: int,
    max_model_len: int,
    kv_cache_bytes: int,
    device_type: str,
    wide: int,
) -> MemoryPlan:
    """Of a rank with the sizes `local` of the whole `model`, whose bytes of weights are known.

    `kv_cache_bytes` stands in for the config's. `wide`: bytes of an element where products are computed in a wider type
    than the model's, so that what goes in and comes out is there in both; else 0.
    """
    item, kind = ITEM_BYTES[config.dtype], "cuda" if device_type == "cuda" else "cpu"
    block_bytes = config.block_size * local.kv_bytes_per_token(item)
    num_blocks = kv_cache_bytes // block_bytes
    num_kv_tokens = num_blocks * config.block_size
    longest = min(max_model_len, num_kv_tokens)
    # Every new token of a pass needs a place in the KV cache.
    tokens = min(config.max_num_batched_tokens, num_kv_tokens, config.max_num_seqs * longest)
    rows = min(config.max_num_seqs, tokens)
    logits = rows * model.vocab_size * item * (1 if local.num_heads == model.num_heads else 3)  # a part, all, in order
    logits += rows * (local.vocab_size + local.hidden_size) * wide + (2 * tokens + rows) * local.hidden_size * item
    sampled = min(rows, rows_sampled_at_once(model.vocab_size, kind)) * model.vocab_size * _SAMPLED_BYTES[kind]
    return MemoryPlan(
        weights=weights,
        copies=copies,
        loading=loading,
        layers=tokens * _token_bytes(local, item, wide) + _context_bytes(local, item, tokens, rows, longest),
        logits=logits + sampled,
        tables=2 * max_model_len * model.head_dim * item
        + config.max_num_seqs * (4 * -(-max_model_len // config.block_size) + 96)
        + num_blocks * _BLOCK_BYTES
        + block_bytes,
        libraries=_LIBRARY_BYTES[kind],
        kv_cache=num_blocks * block_bytes,
        num_kv_tokens=num_kv_tokens,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )


def _token_bytes(local: ModelConfig, item: int, wide: int) -> int:
    """Per token of a pass, in the wider half of a layer: attention, where less than half of the queries are padding, or
    the MLP. Norms and rotation may work in float32."""
    hidden, inner = local.hidden_size, local.intermediate_size
    query, key_value = local.num_heads * local.head_dim, 2 * local.num_kv_heads * local.head_dim
    elements = 4 * hidden + 2 * local.head_dim + max(4 * inner, 13 * query + key_value)
    widened = 2 * inner + hidden + query + key_value
    return elements * item + widened * wide + 8 * (hidden + query) + _TOKEN_BYTES


def _context_bytes(local: ModelConfig, item: int, tokens: int, rows: int, longest: int) -> int:
    """Gathered keys and values, and masks: see `engines/attention/sdpa.py`."""
    gathered = min(max(PIECE_TOKENS, longest), rows * longest) * 2 * local.num_kv_heads * local.head_dim * item
    of_row = local.num_heads // local.num_kv_heads * longest * (1 + max(4, item))
    return gathered + min(max(PIECE_BYTES, of_row), 2 * tokens * of_row)


def rows_sampled_at_once(vocab_size: int, device_type: str) -> int:
    """Rows of each piece into which the sampler cuts a batch whose logits it copies."""
    piece = PIECE_BYTES if device_type == "cpu" else 16 * PIECE_BYTES  # there pieces cost launches
    return max(1, piece // (_SAMPLED_BYTES[device_type] * vocab_size))
