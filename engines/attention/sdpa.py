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

capturable = False
"""Whether `plan` and `attention` of decodes can be captured in a CUDA graph: whether they ask nothing of the host, and
cost what the contexts cost and not what the block table could hold. This backend gathers all of the table."""


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What S sequences see: their blocks, gathered and padded to L tokens."""

    num_seqs: int
    blocks: Tensor
    """int64 [S * L / block_size]"""

    def gather(self, cache: Tensor) -> Tensor:
        """[S, num_kv_heads, L, head_dim] of a layer's cache."""
        return cache.index_select(0, self.blocks).view(self.num_seqs, -1, *cache.shape[2:]).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class _Decodes:
    """Sequences with one new token each: the first rows of the batch."""

    context: _Context
    visible: Tensor
    """bool [S, 1, 1, L]"""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sequences with several new tokens, run in one call: padded to Q new tokens each."""

    context: _Context
    rows_SQ: Tensor
    """int64: row of each new token in the flat batch; padding repeats the sequence's first row."""
    visible_SQL: Tensor
    """bool"""
    flat_rows: Tensor | None
    """int64 [tokens of the bucket]: flat rows without padding; None when nothing is padded."""
    padded_rows: Tensor | None
    """int64 [tokens of the bucket]: where those are in the padded [S * Q]."""


@dataclass(frozen=True, kw_only=True)
class SdpaPlan:
    """What `attention` needs of a batch, the same for every layer."""

    decodes: _Decodes | None
    buckets: list[Bucket]


def plan(batch: ForwardBatch, block_size: int) -> SdpaPlan:
    """Groups sequences whose numbers of new tokens round up to the same power of two: less than half is padding."""
    num_decodes = sum(length == 1 for length in batch.seqlens_q)
    return SdpaPlan(
        decodes=_plan_decodes(batch, num_decodes, block_size) if num_decodes else None,
        buckets=plan_buckets(batch, num_decodes, block_size),
    )


def plan_buckets(batch: ForwardBatch, num_decodes: int, block_size: int) -> list[Bucket]:
    """Of the sequences behind the first `num_decodes`."""
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(num_decodes, len(batch.seqlens_q)):
        members[(batch.seqlens_q[index] - 1).bit_length()].append(index)
    return [_plan_bucket(batch, indices, block_size) for indices in members.values()]


def _plan_decodes(batch: ForwardBatch, num_decodes: int, block_size: int) -> _Decodes:
    contexts = batch.context_lens[:num_decodes]
    context, key_positions = _plan_context(contexts, batch.block_table[:num_decodes], block_size)
    return _Decodes(context=context, visible=(key_positions < contexts[:, None])[:, None, None])


def _plan_context(contexts: Tensor, table: Tensor, block_size: int) -> tuple[_Context, Tensor]:
    on_host = contexts.device.type == "cpu"  # elsewhere asking for the longest would wait for the device
    num_blocks = -(-int(contexts.max()) // block_size) if on_host else table.shape[1]
    key_positions = torch.arange(num_blocks * block_size, device=contexts.device)
    return _Context(num_seqs=len(contexts), blocks=table[:, :num_blocks].flatten().long()), key_positions


def _plan_bucket(batch: ForwardBatch, indices: list[int], block_size: int) -> Bucket:
    device = batch.tokens.device
    pick = torch.tensor(indices, device=device)
    starts, contexts = batch.cu_seqlens_q[pick].long(), batch.context_lens[pick].long()
    lengths = [batch.seqlens_q[i] for i in indices]
    max_q = max(lengths)
    new = torch.tensor(lengths, device=device)[:, None]
    offsets = torch.arange(max_q, device=device)[None, :]
    real_SQ = offsets < new
    rows_SQ = starts[:, None] + torch.where(real_SQ, offsets, 0)
    context, key_positions = _plan_context(contexts, batch.block_table[pick], block_size)
    query_positions = contexts[:, None] - new + torch.where(real_SQ, offsets, 0)
    padded = min(lengths) != max_q
    return Bucket(
        context=context,
        rows_SQ=rows_SQ,
        visible_SQL=key_positions <= query_positions[:, :, None],
        flat_rows=rows_SQ[real_SQ] if padded else None,
        padded_rows=real_SQ.flatten().nonzero().squeeze(1) if padded else None,
    )


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SdpaPlan) -> Tensor:
    """Causal grouped-query attention of new tokens over the paged cache, scaled by head_dim ** -0.5.

    q: [T, num_heads, head_dim]; caches: [num_blocks, block_size, num_kv_heads, head_dim], new tokens already
    written. Returns [T, num_heads, head_dim].
    """
    if plan.decodes is None:
        out = torch.empty_like(q)
    else:
        decoded = _attend_decodes(q, k_cache, v_cache, plan.decodes)
        if not plan.buckets:
            return decoded
        out = torch.empty_like(q)
        out[: len(decoded)] = decoded
    for bucket in plan.buckets:
        attend_bucket(out, q, k_cache, v_cache, bucket)
    return out


def _attend_decodes(q: Tensor, k_cache: Tensor, v_cache: Tensor, decodes: _Decodes) -> Tensor:
    """[S, num_heads, head_dim]. The query heads that share a KV head become query rows of it: no key is repeated."""
    num_seqs = decodes.context.num_seqs
    q_rows = q[:num_seqs].view(num_seqs, k_cache.shape[2], -1, q.shape[2])
    keys, values = decodes.context.gather(k_cache), decodes.context.gather(v_cache)
    return scaled_dot_product_attention(q_rows, keys, values, attn_mask=decodes.visible).view(num_seqs, *q.shape[1:])


def attend_bucket(out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: Bucket) -> None:
    num_seqs, max_q = bucket.rows_SQ.shape
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    q_padded = q.index_select(0, bucket.rows_SQ.flatten()).view(num_seqs, max_q, num_kv_heads, group, head_dim)
    q_rows = q_padded.permute(0, 2, 1, 3, 4).reshape(num_seqs, num_kv_heads, max_q * group, head_dim)
    visible = bucket.visible_SQL[:, None, :, None, :].expand(-1, 1, -1, group, -1).flatten(2, 3)
    keys, values = bucket.context.gather(k_cache), bucket.context.gather(v_cache)
    result = scaled_dot_product_attention(q_rows, keys, values, attn_mask=visible)
    result = result.view(num_seqs, num_kv_heads, max_q, group, head_dim).permute(0, 2, 1, 3, 4)
    flat = result.reshape(num_seqs * max_q, num_heads, head_dim)
    if bucket.flat_rows is None or bucket.padded_rows is None:
        out.index_copy_(0, bucket.rows_SQ.flatten(), flat)
    else:
        out.index_copy_(0, bucket.flat_rows, flat.index_select(0, bucket.padded_rows))
