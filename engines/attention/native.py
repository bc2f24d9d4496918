"""Attention on a CPU: decodes read the paged cache where it lies, in C++; several new tokens at once go through torch.

A decode costs what its own context costs: nothing is gathered, and nothing padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.attention import sdpa
from engines.batch import ForwardBatch
from engines.native.library import Library, address


@dataclass(frozen=True, kw_only=True)
class NativePlan:
    """What `attention` needs of a batch, the same for every layer."""

    num_decodes: int
    """Sequences with one new token each: the first rows of the batch."""
    lengths: Tensor
    """int32 [num_decodes]: tokens that each sees, its new one included."""
    tables: Tensor
    """int32 [num_decodes, blocks]"""
    buckets: list[sdpa.Bucket]


class NativeAttention:
    """See `sdpa`, whose signature it has."""

    capturable = False

    def __init__(self, library: Library) -> None:
        self._library = library

    def plan(self, batch: ForwardBatch, block_size: int) -> NativePlan:
        num_decodes = sum(length == 1 for length in batch.seqlens_q)
        return NativePlan(
            num_decodes=num_decodes,
            lengths=batch.context_lens[:num_decodes],
            tables=batch.block_table[:num_decodes],
            buckets=sdpa.plan_buckets(batch, num_decodes, block_size),
        )

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: NativePlan) -> Tensor:
        out = torch.empty_like(q)
        num_heads, dim = q.shape[1:]
        block_size, num_kv_heads = k_cache.shape[1:3]
        if plan.num_decodes:
            self._library.decode_attention(
                *(address(q), address(k_cache), address(v_cache), address(out)),
                *(address(plan.tables), plan.tables.shape[1], address(plan.lengths), plan.num_decodes),
                *(num_heads, num_kv_heads, block_size, dim, dim**-0.5),
            )
        for bucket in plan.buckets:
            sdpa.attend_bucket(out, q, k_cache, v_cache, bucket)
        return out
