"""Attention on a CPU in C++, which reads the paged cache in place, without gathering or padding.

A token has the same bits whether it is computed alone, in a chunk of any size, or in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.attention.batch import ForwardBatch
from engines.native.library import Library, address


class NativeAttention:
    """A backend with the interface of `sdpa`. Its plan is the batch itself."""

    capturable = False

    def __init__(self, library: Library) -> None:
        self._library = library

    def plan(self, batch: ForwardBatch, block_size: int) -> ForwardBatch:
        return batch

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: ForwardBatch) -> Tensor:
        q = q.contiguous()  # torch's rotation returns a part of a larger tensor
        out = torch.empty_like(q)
        num_heads, dim = q.shape[1:]
        block_size, num_kv_heads = k_cache.shape[1:3]
        tables = plan.block_table
        self._library.paged_attention(
            *(address(q), address(k_cache), address(v_cache), address(out)),
            *(address(tables), tables.shape[1], address(plan.cu_seqlens_q), address(plan.context_lens)),
            *(len(plan.seqlens_q), num_heads, num_kv_heads, block_size, dim, dim**-0.5),
        )
        return out
