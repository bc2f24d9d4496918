"""What the adapter asks of flash-attn, by the package's documentation; and the package itself, where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.attention import sdpa
from engines.attention.batch import ForwardBatch
from engines.attention.flash_attn import FlashAttention
from tests.engines.test_attention import dense
from tests.engines.test_native import make_batch, normal

BLOCK = 256
LENGTHS, NEW = [1, 2, 300, 17, 40, 600], [1, 1, 1, 5, 40, 3]


def documented(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """`flash_attn_varlen_func` of flash-attn 2.8 on a paged cache: the causal mask stands in the lower right corner."""
    assert causal and cu_seqlens_q.dtype is cu_seqlens_k.dtype is block_table.dtype is torch.int32
    assert cu_seqlens_q[-1] == len(q) and len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    out = []
    for sequence, blocks in enumerate(block_table.tolist()):
        rows = q[cu_seqlens_q[sequence] : cu_seqlens_q[sequence + 1]]
        length = int(cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence])
        assert len(rows) <= max_seqlen_q and length <= max_seqlen_k
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k, v))
        for index, row in enumerate(rows):
            seen = length - len(rows) + index + 1
            out.append(dense(row, keys[:seen], values[:seen]))
    return torch.stack(out)


def compare(backend: FlashAttention, new: list[int], dtype: torch.dtype, device: str, tolerance: float) -> None:
    lengths = LENGTHS[-len(new) :]
    num_blocks, some = make_batch(lengths, new, BLOCK)
    empty = torch.zeros(sum(new), dtype=torch.int64)
    batch = ForwardBatch(
        tokens=empty.to(device),
        positions=empty,
        cu_seqlens_q=some.cu_seqlens_q.to(device),
        context_lens=some.context_lens.to(device),
        block_table=some.block_table.to(device),
        slot_mapping=empty,
        logit_rows=empty,
        seqlens_q=new,
    )
    cache = [normal(num_blocks, BLOCK, 2, 16, dtype=dtype, seed=i).to(device) for i in range(2)]
    q = normal(sum(new), 6, 16, dtype=dtype, seed=2).to(device)
    expected = sdpa.attention(q.double(), *(one.double() for one in cache), sdpa.plan(batch, BLOCK))
    out = backend.attention(q, *cache, backend.plan(batch, BLOCK))
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("new", [NEW, [1, 1, 1], [4, 30]])
def test_what_is_asked_for(new: list[int]) -> None:
    compare(FlashAttention(documented), new, torch.float64, "cpu", 1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("new", [NEW, [1, 1, 1], [4, 30]])
def test_the_package(new: list[int]) -> None:
    package = pytest.importorskip("flash_attn")
    compare(FlashAttention(package.flash_attn_varlen_func), new, torch.bfloat16, "cuda", 2e-2)
