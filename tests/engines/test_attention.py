"""Paged attention against a dense loop, one query at a time."""

from __future__ import annotations

import random

import pytest
import torch

from engines.attention import sdpa
from engines.attention.batch import ForwardBatch
from engines.kvcache.paged import write_kv

BLOCK = 4


def dense(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query [H, D] over a context [L, KV, D]."""
    group = q.shape[0] // keys.shape[1]
    out = []
    for head in range(q.shape[0]):
        weights = (keys[:, head // group] @ q[head] * q.shape[1] ** -0.5).softmax(0)
        out.append(weights @ values[:, head // group])
    return torch.stack(out)


@pytest.mark.parametrize("pieces", ["whole", "small", "smallest"])
@pytest.mark.parametrize("seed", range(12))
def test_mixed_batches(seed: int, pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of a few sequences and queries, and of one each."""
    if pieces != "whole":
        monkeypatch.setattr(sdpa, "PIECE_TOKENS", 80 if pieces == "small" else 1)
        monkeypatch.setattr(sdpa, "PIECE_BYTES", 4000 if pieces == "small" else 1)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_kv_heads, group, head_dim = rng.choice([(1, 1, 8), (2, 3, 8), (4, 1, 10), (1, 4, 16)])
    shapes = [(rng.randint(0, 30), rng.choice([1, 1, 1, 2, 3, 7, 8, 20])) for _ in range(rng.randint(1, 9))]
    shapes.sort(key=lambda shape: shape[1] > 1)
    contexts = [past + new for past, new in shapes]
    num_blocks = sum(-(-c // BLOCK) for c in contexts) + 3
    free = list(range(num_blocks))
    rng.shuffle(free)
    k_cache, v_cache = (torch.randn(num_blocks, BLOCK, num_kv_heads, head_dim, dtype=torch.float64) for _ in range(2))
    table = torch.zeros(len(shapes), -(-max(contexts) // BLOCK), dtype=torch.int32)
    keys, values, slots = [], [], []
    for row, context in enumerate(contexts):
        blocks = [free.pop() for _ in range(-(-context // BLOCK))]
        table[row, : len(blocks)] = torch.tensor(blocks)
        keys.append(torch.randn(context, num_kv_heads, head_dim, dtype=torch.float64))
        values.append(torch.randn(context, num_kv_heads, head_dim, dtype=torch.float64))
        slots.append(torch.tensor([blocks[t // BLOCK] * BLOCK + t % BLOCK for t in range(context)]))
    for cache, dense_kv in ((k_cache, keys), (v_cache, values)):
        write_kv(cache, torch.cat(slots), torch.cat(dense_kv))
    new = [length for _, length in shapes]
    ends = torch.tensor([0, *new]).cumsum(0)
    total = int(ends[-1])
    empty = torch.zeros(total, dtype=torch.int64)
    batch = ForwardBatch(
        tokens=empty,
        positions=empty,
        cu_seqlens_q=ends.int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_table=table,
        slot_mapping=empty,
        logit_rows=empty,
        seqlens_q=new,
    )
    q = torch.randn(total, num_kv_heads * group, head_dim, dtype=torch.float64)
    out = sdpa.attention(q, k_cache, v_cache, sdpa.plan(batch, BLOCK))
    row = 0
    for index, (past, length) in enumerate(shapes):
        for offset in range(length):
            seen = past + offset + 1
            torch.testing.assert_close(out[row], dense(q[row], keys[index][:seen], values[index][:seen]))
            row += 1
