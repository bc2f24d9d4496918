"""What one rank's engine takes of its device's memory, known before anything is taken. Pure functions, torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.config import EngineConfig, ModelConfig
from engines.parallel.sharding import Shard, padded_vocab_size, shard_config

MIB = 2**20
PIECE_TOKENS = 2**15
"""Context tokens, padding included, that attention gathers at once; one sequence is gathered whole."""
PIECE_BYTES = 64 * MIB
"""What work that can be cut into pieces takes at once: attention masks, and the sampler's copies of logits."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

_SMALLEST_PACKED = 2**17
"""Elements of a float32 matrix that is packed: see `engines/models/projection.py`."""
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
    """Bytes of one rank, each the most that it can be."""

    weights: int
    packed: int
    """Copies of matrices as the CPU's library wants them."""
    host_weights: int
    """This rank's part of the host's copy, from which a CPU's ranks are regrouped."""
    tables: int
    """Cosines and sines of every position, block tables, whose each block is, and a scratch block."""
    libraries: int
    loading: int
    """Beside the weights while they come: one parameter of the whole model."""
    activations: int
    """Of the most tokens that a pass may have, where a layer is widest."""
    attention: int
    """Those beside gathered keys and values, masks and padded queries of a prefill."""
    logits: int
    """Of the most rows that a pass may sample, and what the sampler makes of them."""
    kv_cache: int
    num_kv_tokens: int
    """What the KV cache holds."""
    max_model_len: int
    max_num_seqs: int

    @property
    def working(self) -> int:
        """What comes and goes; its four kinds do not overlap."""
        return max(self.activations, self.attention, self.logits, self.loading)

    @property
    def total(self) -> int:
        lasting = self.weights + self.packed + self.host_weights + self.tables + self.libraries
        return lasting + self.working + self.kv_cache

    @property
    def num_full_sequences(self) -> int:
        """Sequences of `max_model_len` tokens that the KV cache holds at once."""
        return self.num_kv_tokens // self.max_model_len

    def parts(self) -> str:
        """What the total is made of, in MiB, in one line."""
        return (
            f"weights {mib(self.weights + self.packed + self.host_weights)}, KV cache {mib(self.kv_cache)}, a pass "
            f"{mib(self.working)} (the most of activations {mib(self.activations)}, attention {mib(self.attention)}, "
            f"logits {mib(self.logits)}, loading {mib(self.loading)}), other {mib(self.tables + self.libraries)}"
        )

    def what_to_lower(self) -> str:
        """The options that the parts go by, that of the largest part first."""
        layers = max(self.activations, self.attention)
        sizes = {
            "kv_cache_bytes": self.kv_cache,
            "max_num_batched_tokens": layers if layers >= self.logits else 0,
            "max_num_seqs": max(self.tables, self.logits if layers < self.logits else 0),
            "dtype (bfloat16 takes half of float32; or raise tensor_parallel_size)": self.weights + self.packed,
            "max_model_len": self.tables,
        }
        return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

    def summary(self) -> str:
        """One line for a log: what is taken, and what the KV cache holds."""
        full = self.num_full_sequences
        crowded = "" if full >= self.max_num_seqs else f"; beyond {full} such, the latest wait or are recomputed"
        return (
            f"memory: {mib(self.total)} MiB per rank ({self.parts()}); KV cache of {self.num_kv_tokens} tokens: {full} "
            f"sequences of max_model_len={self.max_model_len}, max_num_seqs={self.max_num_seqs}{crowded}"
        )

    def describe(self) -> str:
        """A small table, in MiB, and what the KV cache holds."""
        rows = {
            "weights": self.weights,
            "packed copies": self.packed,
            "host copy": self.host_weights,
            "tables": self.tables,
            "libraries": self.libraries,
            "KV cache": self.kv_cache,
            "most of activations": self.activations,
            "   or attention": self.attention,
            "   or logits": self.logits,
            "   or loading": self.loading,
            "total": self.total,
        }
        lines = [f"{name:<20}{num_bytes / MIB:>12,.1f} MiB" for name, num_bytes in rows.items()]
        holds = f"{self.num_kv_tokens} tokens of KV: {self.num_full_sequences} sequences of {self.max_model_len}"
        return "\n".join([*lines, holds])


def mib(num_bytes: int) -> int:
    """Rounded up."""
    return -(-num_bytes // MIB)


def kv_block_bytes(model: ModelConfig, config: EngineConfig, tp_size: int) -> int:
    """One block of KV on each rank of a replica of `tp_size`. Raises ValueError when the model cannot be cut so."""
    local = shard_config(model, Shard(count=tp_size, max_count=tp_size))
    return config.block_size * local.kv_bytes_per_token(ITEM_BYTES[config.dtype])


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    tp_size: int,
    max_tp_size: int,
    max_model_len: int,
    kv_cache_bytes: int,
    device_type: str,
    copy_dtype: str | None,
    num_host_ranks: int | None = None,
) -> MemoryPlan:
    """What a rank of a replica of `tp_size` takes. `copy_dtype`: see `projection`; `max_tp_size`: see `Shard`.

    `kv_cache_bytes` stands in for the config's. `num_host_ranks` share a copy of the weights, where there is one.
    Raises ValueError when the model cannot be cut so.
    """
    local = shard_config(model, Shard(count=tp_size, max_count=max_tp_size))
    whole = replace(model, vocab_size=padded_vocab_size(model, max_tp_size))
    item = ITEM_BYTES[config.dtype]
    # Where products are computed in a wider type, what goes in and comes out is there in both.
    wide = ITEM_BYTES[copy_dtype] if copy_dtype not in (None, config.dtype) else 0
    block_bytes = kv_block_bytes(model, config, tp_size)
    num_blocks = kv_cache_bytes // block_bytes
    num_kv_tokens = num_blocks * config.block_size
    longest = min(max_model_len, num_kv_tokens)
    # Every new token of a pass needs a place in the KV cache.
    tokens = min(config.max_num_batched_tokens, num_kv_tokens, config.max_num_seqs * longest)
    rows = min(config.max_num_seqs, tokens)
    copied = num_host_ranks is not None and device_type == "cpu"
    return MemoryPlan(
        weights=_num_parameters(local) * item,
        packed=_packed_bytes(local, config.dtype, copy_dtype) if copy_dtype is not None else 0,
        host_weights=-(-_num_parameters(whole) * item // num_host_ranks) if copied and num_host_ranks else 0,
        tables=2 * max_model_len * model.head_dim * item
        + config.max_num_seqs * (4 * -(-max_model_len // config.block_size) + 96)
        + num_blocks * _BLOCK_BYTES
        + block_bytes,
        libraries=_LIBRARY_BYTES["cuda" if device_type == "cuda" else "cpu"],
        loading=max(whole.vocab_size * whole.hidden_size, whole.hidden_size * whole.intermediate_size) * max(4, item),
        activations=tokens * _activation_bytes(local, item, wide),
        attention=_attention_bytes(local, item, tokens, rows, longest + config.block_size),
        logits=_logit_bytes(model, local, tp_size, item, wide, tokens, rows, device_type),
        kv_cache=num_blocks * block_bytes,
        num_kv_tokens=num_kv_tokens,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
    )


def _matrices(model: ModelConfig) -> list[tuple[int, int, int]]:
    """(how many, rows, columns) of those that are multiplied with, the head included."""
    hidden, inner, query = model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim
    of_layer = [
        (query + 2 * model.num_kv_heads * model.head_dim, hidden),
        (hidden, query),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    return [*((model.num_layers, *shape) for shape in of_layer), (1, model.vocab_size, hidden)]


def _num_parameters(model: ModelConfig) -> int:
    hidden, query = model.hidden_size, model.num_heads * model.head_dim
    key_value = 2 * model.num_kv_heads * model.head_dim
    of_layer = 2 * hidden  # norms
    of_layer += (query + key_value) * model.qkv_bias + hidden * model.output_bias + 2 * model.head_dim * model.qk_norm
    of_layer += (2 * model.intermediate_size + hidden) * model.mlp_bias
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * hidden
    matrices = sum(count * rows * columns for count, rows, columns in _matrices(model))
    return matrices + embedding + hidden + model.num_layers * of_layer


def _packed_bytes(model: ModelConfig, dtype: str, copy_dtype: str) -> int:
    """Packed matrices are padded to tiles of 64 rows and 64 columns at the most."""
    return sum(
        count * -(-rows // 64) * 64 * -(-columns // 64) * 64 * ITEM_BYTES[copy_dtype]
        for count, rows, columns in _matrices(model)
        if dtype == "bfloat16" or rows * columns >= _SMALLEST_PACKED
    )


def _resident_bytes(model: ModelConfig, item: int) -> int:
    """Per token, all through a layer: the residual, the layer's input, an output, and rotary angles."""
    return 3 * model.hidden_size * item + 2 * model.head_dim * item + _TOKEN_BYTES


def _activation_bytes(model: ModelConfig, item: int, wide: int) -> int:
    """Per token, in the widest of a layer's parts. Norms may work in float32, and rotation copies thrice."""
    at_least_float32 = max(4, item)
    rotated = (model.num_heads + model.num_kv_heads) * model.head_dim
    heads = rotated + model.num_kv_heads * model.head_dim
    qkv = heads * item + max(rotated * (2 * at_least_float32 + 4 * item), (heads + model.hidden_size) * wide)
    norm = model.hidden_size * (2 * at_least_float32 + 3 * item)
    mlp = (4 * model.intermediate_size + model.hidden_size) * item
    mlp += (2 * model.intermediate_size + model.hidden_size) * wide
    return _resident_bytes(model, item) + max(qkv, norm, mlp)


def _attention_bytes(model: ModelConfig, item: int, tokens: int, num_seqs: int, longest: int) -> int:
    """See `engines/attention/sdpa.py`: less than half of a bucket's queries are padding."""
    query, key_value = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    group = model.num_heads // model.num_kv_heads
    gathered = min(max(PIECE_TOKENS, longest), num_seqs * longest) * key_value * item
    of_row = group * longest * (1 + max(4, item))
    mask = min(max(PIECE_BYTES, of_row), 2 * tokens * of_row)
    padded = 2 * (5 * query * item + 8 * group)
    return gathered + mask + tokens * (_resident_bytes(model, item) + (3 * query + key_value) * item + padded)


def rows_sampled_at_once(vocab_size: int, device_type: str) -> int:
    """Rows of each piece into which the sampler cuts a batch whose logits it copies."""
    return max(1, _sampler_piece(device_type) // (_SAMPLED_BYTES[device_type] * vocab_size))


def _sampler_piece(device_type: str) -> int:
    return PIECE_BYTES if device_type == "cpu" else 16 * PIECE_BYTES  # there pieces cost launches


def _logit_bytes(
    model: ModelConfig, local: ModelConfig, tp_size: int, item: int, wide: int, tokens: int, rows: int, device_type: str
) -> int:
    logits = rows * model.vocab_size
    copies = 1 if tp_size == 1 else 3  # a shard's part, all parts, and those side by side
    hidden = (2 * tokens + rows) * local.hidden_size * item
    per_logit = _SAMPLED_BYTES[device_type]
    sampled = min(logits * per_logit, max(_sampler_piece(device_type), model.vocab_size * per_logit))
    widened = rows * (local.vocab_size + local.hidden_size) * wide
    return hidden + widened + logits * item * copies + sampled
