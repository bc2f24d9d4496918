"""The reference attention backend: gather each sequence's blocks, then torch's scaled_dot_product_attention.

Runs on any device and dtype. A backend is two functions: `plan(batch)`, once per forward pass, and
`attention(q, k_cache, v_cache, plan)`, once per layer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engines.batch import ForwardBatch


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Sequences run in one call: S sequences, padded to Q new tokens and L tokens of context."""

    rows_SQ: Tensor
    """int64: row of each new token in the flat batch; padding repeats the sequence's first row."""
    block_table: Tensor
    """int32 [S, L / block_size]"""
    visible_SQL: Tensor
    """bool"""
    flat_rows: Tensor | None
    """int64 [tokens of the bucket]: flat rows without padding; None when nothing is padded."""
    padded_rows: Tensor | None
    """int64 [tokens of the bucket]: where those are in the padded [S * Q]."""


@dataclass(frozen=True, kw_only=True)
class SdpaPlan:
    """What `attention` needs of a batch, the same for every layer."""

    buckets: list[_Bucket]


def plan(batch: ForwardBatch, block_size: int) -> SdpaPlan:
    """Groups sequences whose numbers of new tokens round up to the same power of two: less than half is padding."""
    members: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(batch.seqlens_q):
        members[(length - 1).bit_length()].append(index)
    return SdpaPlan(buckets=[_make_bucket(batch, indices, block_size) for indices in members.values()])


def _make_bucket(batch: ForwardBatch, indices: list[int], block_size: int) -> _Bucket:
    device = batch.tokens.device
    everyone = len(indices) == len(batch.seqlens_q)
    pick = slice(None) if everyone else torch.tensor(indices, device=device)
    starts, contexts = batch.cu_seqlens_q[:-1][pick].long(), batch.context_lens[pick].long()
    lengths = [batch.seqlens_q[i] for i in indices]
    max_q = max(lengths)
    new = torch.tensor(lengths, device=device)[:, None]
    offsets = torch.arange(max_q, device=device)[None, :]
    real_SQ = offsets < new
    rows_SQ = starts[:, None] + torch.where(real_SQ, offsets, 0)
    num_blocks = -(-int(contexts.max()) // block_size) if device.type == "cpu" else batch.block_table.shape[1]
    key_positions = torch.arange(num_blocks * block_size, device=device)
    query_positions = contexts[:, None] - new + torch.where(real_SQ, offsets, 0)
    padded = min(lengths) != max_q
    return _Bucket(
        rows_SQ=rows_SQ,
        block_table=batch.block_table[pick, :num_blocks],
        visible_SQL=key_positions <= query_positions[:, :, None],
        flat_rows=rows_SQ[real_SQ] if padded else None,
        padded_rows=real_SQ.flatten().nonzero().squeeze(1) if padded else None,
    )


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SdpaPlan) -> Tensor:
    """Causal grouped-query attention of new tokens over the paged cache, scaled by head_dim ** -0.5.

    q: [T, num_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads, head_dim], new tokens already
    written. Returns [T, num_heads, head_dim].
    """
    out = torch.empty_like(q)
    for bucket in plan.buckets:
        _attend(out, q, k_cache, v_cache, bucket)
    return out


def _attend(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: _Bucket) -> None:
    num_seqs, max_q = bucket.rows_SQ.shape
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    blocks = bucket.block_table.flatten()

    def gather(cache: Tensor) -> Tensor:
        return cache.index_select(0, blocks).view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)

    # The query heads that share a KV head become query rows of it: no key or value is repeated.
    if max_q == 1:  # decodes stand first in the batch, so their rows need no gathering
        q_rows = q[:num_seqs].view(num_seqs, num_kv_heads, group, head_dim)
        visible = bucket.visible_SQL[:, None]
        result = scaled_dot_product_attention(q_rows, gather(k_cache), gather(v_cache), attn_mask=visible)
        out[:num_seqs] = result.view(num_seqs, num_heads, head_dim)
        return
    q_padded = q.index_select(0, bucket.rows_SQ.flatten()).view(num_seqs, max_q, num_kv_heads, group, head_dim)
    q_rows = q_padded.permute(0, 2, 1, 3, 4).reshape(num_seqs, num_kv_heads, max_q * group, head_dim)
    visible = bucket.visible_SQL[:, None, :, None, :].expand(-1, 1, -1, group, -1).flatten(2, 3)
    result = scaled_dot_product_attention(q_rows, gather(k_cache), gather(v_cache), attn_mask=visible)
    result = result.view(num_seqs, num_kv_heads, max_q, group, head_dim).permute(0, 2, 1, 3, 4)
    flat = result.reshape(num_seqs * max_q, num_heads, head_dim)
    if bucket.flat_rows is None or bucket.padded_rows is None:
        out.index_copy_(0, bucket.rows_SQ.flatten(), flat)
    else:
        out.index_copy_(0, bucket.flat_rows, flat.index_select(0, bucket.padded_rows))
