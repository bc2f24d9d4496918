"""Which part of each logical parameter a tensor-parallel shard holds: one pure function, torch-free.

Checkpoint load, weight sync, regrouping and checksums all use it. Column-parallel matrices (q, k, v, gate, up) are
cut by output row, row-parallel ones (o, down) by input column, embedding and head by vocabulary row; norms and the
biases of row-parallel matrices are whole on every shard (Shoeybi et al. 2019, Megatron-LM, §3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.config import ModelConfig

_WHOLE = slice(None)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part `index` of `count` equal parts of a model.

    `max_count` is the largest count that the run may regroup to: the vocabulary is padded once to a multiple of it, so
    that parts nest (shard i of n holds all that shard 2i and 2i + 1 of 2n hold).
    """

    index: int = 0
    count: int = 1
    max_count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count or self.max_count % self.count:
            raise ValueError(f"{self}: index must be from 0 to count - 1, and max_count a multiple of count")

    def part(self, size: int) -> slice:
        """This shard's share of `size` equal items."""
        each = size // self.count
        return slice(self.index * each, (self.index + 1) * each)


def check_shardable(config: ModelConfig, count: int) -> None:
    """Raises ValueError, naming the field, when the model cannot be cut into `count` equal parts."""
    for field in ("num_heads", "intermediate_size"):
        size = getattr(config, field)
        if size % count:
            raise ValueError(
                f"tensor_parallel_size={count}: does not divide the model's {field}={size}; use a divisor of {size}"
            )
    kv = config.num_kv_heads
    if kv % count and count % kv:
        raise ValueError(
            f"tensor_parallel_size={count}: neither divides the model's num_kv_heads={kv} nor is a multiple of it "
            f"(each KV head is then held by several shards); use a divisor or a multiple of {kv}"
        )


def is_shardable(config: ModelConfig, count: int) -> bool:
    """Whether `check_shardable` finds nothing wrong."""
    try:
        check_shardable(config, count)
    except ValueError:
        return False
    return True


def padded_vocab_size(config: ModelConfig, max_count: int) -> int:
    """Returns the vocabulary rows, rounded up to a multiple of `max_count`, and so of every shard count of the run."""
    return -(-config.vocab_size // max_count) * max_count


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the sizes of one shard, as if it were a whole model; `vocab_size` counts its rows, padding included.

    Raises ValueError when the model cannot be cut into `shard.count` parts.
    """
    check_shardable(config, shard.count)
    return replace(
        config,
        vocab_size=padded_vocab_size(config, shard.max_count) // shard.count,
        intermediate_size=config.intermediate_size // shard.count,
        num_heads=config.num_heads // shard.count,
        num_kv_heads=max(1, config.num_kv_heads // shard.count),
    )


def kv_heads(config: ModelConfig, shard: Shard) -> slice:
    """Returns the KV heads of a shard; with fewer heads than shards, neighbouring shards hold the same head."""
    if config.num_kv_heads >= shard.count:
        return shard.part(config.num_kv_heads)
    head = shard.index * config.num_kv_heads // shard.count
    return slice(head, head + 1)


def vocab_rows(config: ModelConfig, shard: Shard) -> slice:
    """Returns the token ids whose rows a shard holds, without padding (the last shard may hold fewer than others)."""
    rows = shard.part(padded_vocab_size(config, shard.max_count))
    return slice(min(rows.start, config.vocab_size), min(rows.stop, config.vocab_size))


def shard_slices(config: ModelConfig, name: str, shard: Shard) -> tuple[slice, ...]:
    """Returns the part of the logical parameter `name` (Hugging Face's) that a shard holds: a slice per leading dim.

    Indexing the whole tensor with these slices gives the part.
    """
    module, kind = name.split(".")[-2:]
    if module in ("embed_tokens", "lm_head"):
        return (vocab_rows(config, shard),)
    if module == "q_proj":
        return (shard.part(config.num_heads * config.head_dim),)
    if module in ("k_proj", "v_proj"):
        heads = kv_heads(config, shard)
        return (slice(heads.start * config.head_dim, heads.stop * config.head_dim),)
    if module in ("gate_proj", "up_proj"):
        return (shard.part(config.intermediate_size),)
    if module == "o_proj" and kind == "weight":
        return (_WHOLE, shard.part(config.num_heads * config.head_dim))
    if module == "down_proj" and kind == "weight":
        return (_WHOLE, shard.part(config.intermediate_size))
    return (_WHOLE,)


def is_first_holder(config: ModelConfig, name: str, shard: Shard) -> bool:
    """Whether no earlier shard holds the same part: over the shards of a model, each element counts once."""
    if shard.index == 0:
        return True
    return shard_slices(config, name, shard) != shard_slices(config, name, replace(shard, index=shard.index - 1))
