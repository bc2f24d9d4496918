"""Attention by the flash-attn package (FlashAttention-2), on CUDA: an adapter, which has not been run on a GPU.

The package's paged cache has the same layout as ours, with blocks of multiples of 256 tokens, bfloat16 or float16, and
head sizes of multiples of 8 up to 256 (checked by `choose.refusal`). Decodes are a separate call: for them the package
computes the query heads of a KV head as rows of one product, and cuts long contexts into parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.attention.batch import ForwardBatch


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Neighbouring sequences that are run in one call."""

    rows: slice
    """Their rows of the flat batch."""
    starts_q: Tensor
    """int32 [S + 1]: where each sequence's rows begin and end, counted from the first of `rows`."""
    ends_k: Tensor
    """int32 [S + 1]: cumulative sum of the context lengths, from 0."""
    max_q: int
    max_k: int
    """An upper bound of the context lengths that the host knows."""
    table: Tensor


class FlashAttention:
    """A backend with the interface of `sdpa`."""

    capturable = True

    def __init__(self, varlen_func: Callable[..., Tensor]) -> None:
        """`varlen_func`: `flash_attn.flash_attn_varlen_func`."""
        self._varlen_func = varlen_func

    def plan(self, batch: ForwardBatch, block_size: int) -> list[_Call]:
        num_decodes = sum(length == 1 for length in batch.seqlens_q)
        calls = []
        for first, last in ((0, num_decodes), (num_decodes, len(batch.seqlens_q))):
            if first < last:
                contexts = batch.context_lens[first:last]
                first_row = num_decodes if first else 0
                calls.append(
                    _Call(
                        rows=slice(first_row, first_row + sum(batch.seqlens_q[first:last])),
                        starts_q=batch.cu_seqlens_q[first : last + 1] - first_row,
                        ends_k=torch.nn.functional.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
                        max_q=max(batch.seqlens_q[first:last]),
                        max_k=batch.block_table.shape[1] * block_size,
                        table=batch.block_table[first:last],
                    )
                )
        return calls

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: list[_Call]) -> Tensor:
        outs = [
            self._varlen_func(
                q[call.rows],
                k_cache,
                v_cache,
                cu_seqlens_q=call.starts_q,
                cu_seqlens_k=call.ends_k,
                max_seqlen_q=call.max_q,
                max_seqlen_k=call.max_k,
                causal=True,
                block_table=call.table,
            )
            for call in plan
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
