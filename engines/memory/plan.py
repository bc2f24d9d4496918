"""The memory of its device that one rank's engine needs, known before anything is allocated. Torch-free.

Weights and the KV cache are exact. The memory of a forward pass is a bound, not a measurement: it must be known before
the weights are loaded, for every layout that the run may have, and on a CPU a pass of the most tokens takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.config import EngineConfig, ModelConfig
from engines.parallel.sharding import Shard, shard_config

MIB = 2**20
PIECE_TOKENS = 2**15
"""Context tokens, padding included, that attention gathers at once; a longer sequence is gathered whole."""
PIECE_BYTES = 64 * MIB
"""Memory of one piece of work that is done in pieces: attention masks, and the sampler's copies of logits."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

_LIBRARY_BYTES = {"cpu": 48 * MIB, "cuda": 256 * MIB}
"""Memory of threads, matrix libraries and the allocator: measured on a CPU, assumed on CUDA."""
_SAMPLED_BYTES = {"cpu": 256, "cuda": 64}
"""Most bytes of sampling per logit of a piece: noise for all, and on a CPU lists of the tokens that may still win."""
_TOKEN_BYTES = 256
"""Bytes per token of a pass: ids, positions, slots and the rows of padded buckets."""
_BLOCK_BYTES = 400
"""Bytes per KV block: Python objects for its owners and the digest of its content."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Memory of one rank, in bytes."""

    weights: int
    copies: int
    """Copies of weights: matrices in the form of the CPU's library."""
    loading: int
    """Extra memory while weights are loaded: one parameter of the whole model."""
    layers: int
    """Most memory of the layers for the tokens of a pass."""
    logits: int
    """Logits of the most rows that a pass may sample, and the sampler's copies of them."""
    tables: int
    """Cosines and sines of every position, block tables, the owners of each block, and a scratch block."""
    libraries: int
    kv_cache: int
    num_kv_tokens: int
    """Tokens that the KV cache holds."""
    max_model_len: int
    max_num_seqs: int
    drafter: MemoryPlan | None = None
    """Memory of the draft model, without the libraries."""

    @property
    def passing(self) -> int:
        """Temporary memory; its kinds are not in use at the same time."""
        return max(self.layers, self.logits, self.loading, 0 if self.drafter is None else self.drafter.passing)

    @property
    def kept(self) -> int:
        """Memory that the engine keeps between two passes."""
        own = self.weights + self.copies + self.tables + self.libraries + self.kv_cache
        return own if self.drafter is None else own + self.drafter.kept

    @property
    def total(self) -> int:
        return self.kept + self.passing

    def parts(self) -> str:
        """Returns the parts of the total, in MiB, in one line."""
        drafter = self.drafter
        draft_model = f", draft model {mib(drafter.kept)} (its KV cache {mib(drafter.kv_cache)})" if drafter else ""
        return (
            f"weights {mib(self.weights + self.copies)}, KV cache {mib(self.kv_cache)}, a pass {mib(self.passing)} "
            f"(the most of layers {mib(self.layers)}, logits {mib(self.logits)}, loading {mib(self.loading)}), other "
            f"{mib(self.tables + self.libraries)}{draft_model}"
        )

    def what_to_lower(self) -> str:
        """Returns the options on which the parts depend, the option of the largest part first."""
        drafter = self.drafter
        sizes = {
            "kv_cache_bytes": self.kv_cache + (drafter.kv_cache if drafter else 0),
            "max_num_batched_tokens": self.layers if self.layers >= self.logits else 0,
            "max_num_seqs": max(self.tables, self.logits if self.layers < self.logits else 0),
            "dtype (bfloat16 takes half of float32; or raise tensor_parallel_size)": self.weights + self.copies,
            "max_model_len": self.tables,
        }
        if drafter:
            sizes["draft_model (a smaller one)"] = drafter.weights + drafter.copies
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def summary(self) -> str:
        """Returns one line for a log: the memory in use, and what the KV cache holds."""
        full = self.num_kv_tokens // self.max_model_len
        crowded = "" if full >= self.max_num_seqs else f"; beyond {full} such, the latest wait or are recomputed"
        return (
            f"memory: {mib(self.total)} MiB per rank ({self.parts()}); KV cache of {self.num_kv_tokens} tokens: {full} "
            f"sequences of max_model_len={self.max_model_len}, max_num_seqs={self.max_num_seqs}{crowded}"
        )


def mib(num_bytes: int) -> int:
    """Returns MiB, rounded up."""
    return -(-num_bytes // MIB)


def kv_block_bytes(model: ModelConfig, config: EngineConfig, tp_size: int) -> int:
    """Returns a KV block's bytes on each of a replica's `tp_size` ranks; ValueError if the model cannot be cut so."""
    local = shard_config(model, Shard(count=tp_size, max_count=tp_size))
    return config.block_size * local.kv_bytes_per_token(ITEM_BYTES[config.dtype])


def draft_kv_blocks(config: EngineConfig, num_blocks: int, max_model_len: int) -> int:
    """Returns the KV blocks of the draft model: as many as the model's, but no more than its sequences can fill, and
    those of its guesses for each sequence."""
    num_blocks = min(num_blocks, config.max_num_seqs * -(-max_model_len // config.block_size))
    return num_blocks + config.max_num_seqs * (1 + -(-config.max_draft_tokens // config.block_size))


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
    """Plans the memory of a rank whose part of `model` has the sizes `local` and known bytes of weights.

    `kv_cache_bytes` replaces the config's. `wide`: bytes of an element if products are computed in a wider dtype than
    the model's, so that their inputs and outputs exist in both dtypes; else 0.
    """
    item, kind = ITEM_BYTES[config.dtype], "cuda" if device_type == "cuda" else "cpu"
    block_bytes = config.block_size * local.kv_bytes_per_token(item)
    num_blocks = kv_cache_bytes // block_bytes
    num_kv_tokens = num_blocks * config.block_size
    longest = min(max_model_len, num_kv_tokens)
    # Every new token of a pass needs a place in the KV cache.
    tokens = min(config.max_num_batched_tokens, num_kv_tokens, config.max_num_seqs * longest)
    seqs, rows = min(config.max_num_seqs * config.draft_paths, tokens), min(config.most_draws, tokens)
    logits = rows * model.vocab_size * item * (1 if local.num_heads == model.num_heads else 3)  # a part, all, in order
    logits += rows * (local.vocab_size + local.hidden_size) * wide + (2 * tokens + rows) * local.hidden_size * item
    sampled = min(rows, rows_sampled_at_once(model.vocab_size, kind)) * model.vocab_size * _SAMPLED_BYTES[kind]
    return MemoryPlan(
        weights=weights,
        copies=copies,
        loading=loading,
        layers=tokens * _token_bytes(local, item, wide) + _context_bytes(local, item, tokens, seqs, longest),
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
    """Returns the bytes per token of a pass in the larger half of a layer: the MLP, or attention, in which less than
    half of the queries are padding. Norms and rotation may work in float32."""
    hidden, inner = local.hidden_size, local.intermediate_size
    query, key_value = local.num_heads * local.head_dim, 2 * local.num_kv_heads * local.head_dim
    elements = 4 * hidden + 2 * local.head_dim + max(4 * inner, 13 * query + key_value)
    widened = 2 * inner + hidden + query + key_value
    return elements * item + widened * wide + 8 * (hidden + query) + _TOKEN_BYTES


def _context_bytes(local: ModelConfig, item: int, tokens: int, seqs: int, longest: int) -> int:
    """Returns the bytes of gathered keys and values, and of masks: see `engines/attention/sdpa.py`."""
    gathered = min(max(PIECE_TOKENS, longest), seqs * longest) * 2 * local.num_kv_heads * local.head_dim * item
    of_row = local.num_heads // local.num_kv_heads * longest * (1 + max(4, item))
    return gathered + min(max(PIECE_BYTES, of_row), 2 * tokens * of_row)


def rows_sampled_at_once(vocab_size: int, device_type: str) -> int:
    """Returns the rows of each piece into which the sampler cuts a batch whose logits it copies."""
    piece = PIECE_BYTES if device_type == "cpu" else 16 * PIECE_BYTES  # on CUDA, each piece costs launches
    return max(1, piece // (_SAMPLED_BYTES[device_type] * vocab_size))
