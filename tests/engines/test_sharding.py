"""Shards of a model: every element is held, parts nest, checksums add up, and what cannot be cut is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.config import ModelConfig, RopeConfig
from engines.models.checksums import checksum, checksum_parts
from engines.models.parameters import logical_shapes
from engines.parallel.layout import Layout, ReplicaSpec, contiguous_layout, nested_layout
from engines.parallel.sharding import Shard, is_first_holder, padded_vocab_size, shard_config, shard_slices

BASE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=131,
    hidden_size=24,
    intermediate_size=40,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
    eos_token_ids=(),
)
CONFIGS = {
    "fewer KV heads than shards": BASE,
    "one KV head": replace(BASE, num_kv_heads=1),
    "as many KV heads as heads": replace(BASE, num_kv_heads=8),
    "tied, vocabulary 5": replace(BASE, vocab_size=5, tie_word_embeddings=True),
}


def index_of(config: ModelConfig, name: str, shape: torch.Size, shard: Shard) -> torch.Tensor:
    """Flat logical indices of the elements that the shard holds."""
    whole = torch.arange(shape.numel()).view(shape)
    return whole[shard_slices(config, name, shard)].flatten()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_first_holders_hold_every_element_once(config: ModelConfig, count: int) -> None:
    shards = [Shard(index=i, count=count, max_count=8) for i in range(count)]
    for name, shape in logical_shapes(config).items():
        first = [index_of(config, name, shape, s) for s in shards if is_first_holder(config, name, s)]
        assert torch.equal(torch.cat(first).sort().values, torch.arange(shape.numel())), name
        everyone = torch.cat([index_of(config, name, shape, s) for s in shards])
        assert set(everyone.tolist()) == set(range(shape.numel())), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_query_heads_meet_the_kv_heads_they_share(config: ModelConfig) -> None:
    group = config.num_heads // config.num_kv_heads
    for count in (1, 2, 4, 8):
        for i in range(count):
            shard = Shard(index=i, count=count, max_count=8)
            local = shard_config(config, shard)
            q = shard_slices(config, "model.layers.0.self_attn.q_proj.weight", shard)[0]
            k = shard_slices(config, "model.layers.0.self_attn.k_proj.weight", shard)[0]
            heads = range(q.start // config.head_dim, q.stop // config.head_dim)
            local_group = local.num_heads // local.num_kv_heads
            for position, head in enumerate(heads):
                assert k.start // config.head_dim + position // local_group == head // group


def test_going_up_in_a_nested_layout_no_rank_needs_a_new_element() -> None:
    for config in CONFIGS.values():
        for name, shape in logical_shapes(config).items():
            for ranks in ((0, 1, 2, 3), (4, 6, 1, 9)):
                held: dict[int, set[int]] = {}
                for tp_size in (1, 2, 4):
                    for replica in nested_layout(ranks, tp_size).replicas:
                        for index, rank in enumerate(replica.ranks):
                            shard = Shard(index=index, count=tp_size, max_count=4)
                            now = set(index_of(config, name, shape, shard).tolist())
                            assert now <= held.get(rank, now), (name, tp_size, rank)
                            held[rank] = now


@pytest.mark.parametrize("count", [2, 4])
def test_checksums_of_shards_add_up(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = logical_shapes(BASE)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    total = 0
    for i in range(count):
        shard = Shard(index=i, count=count, max_count=4)
        total += checksum_parts(
            (name, whole[where], where)
            for name, whole in weights.items()
            if is_first_holder(BASE, name, shard)
            for where in [shard_slices(BASE, name, shard)]
        )
    assert total % 2**64 == checksum(weights)


def test_the_vocabulary_is_padded_for_the_largest_size_at_once() -> None:
    assert [padded_vocab_size(BASE, count) for count in (1, 2, 4, 8)] == [131, 132, 132, 136]
    rows = [shard_config(BASE, Shard(index=0, count=count, max_count=8)).vocab_size for count in (1, 2, 8)]
    assert rows == [136, 68, 17]


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, 4, ["num_heads=6", "tensor_parallel_size=4"]),
        ({"intermediate_size": 42}, 4, ["intermediate_size=42"]),
        ({"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 48}, 4, ["num_kv_heads=3"]),
    ],
)
def test_what_cannot_be_cut_is_refused(changes: dict[str, int], count: int, words: list[str]) -> None:
    with pytest.raises(ValueError, match="use a") as error:
        shard_config(replace(BASE, **changes), Shard(index=0, count=count, max_count=count))  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_layouts() -> None:
    assert [r.ranks for r in nested_layout(range(4), 2).replicas] == [(0, 2), (1, 3)]
    assert [r.ranks for r in contiguous_layout(range(4), 2).replicas] == [(0, 1), (2, 3)]
    assert nested_layout(range(4), 2).replica_of(3) == ReplicaSpec(id=1, ranks=(1, 3))
    assert Layout(epoch=1, replicas=(ReplicaSpec(id=0, ranks=(2,)),)).replica_of(0) is None
    for make in (nested_layout, contiguous_layout):
        with pytest.raises(ValueError, match="tensor_parallel_size=3: does not divide the 4 ranks"):
            make(range(4), 3)
    with pytest.raises(ValueError, match="repeat"):
        Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0, 1)), ReplicaSpec(id=1, ranks=(1,))))
    with pytest.raises(ValueError, match="ids"):
        Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0,)), ReplicaSpec(id=0, ranks=(1,))))
