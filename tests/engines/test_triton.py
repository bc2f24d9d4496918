"""The Triton kernels against the reference: under Triton's interpreter without a GPU, compiled where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM, SamplingParams
from engines.attention import sdpa
from engines.attention.batch import ForwardBatch
from tests.engines.test_native import make_batch, normal
from tests.worlds import ROOT

pytest.importorskip("triton")

from engines.attention.triton import TritonAttention, choose_tile, count_parts, place_tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
LENGTHS, NEW = [1, 2, 33, 16, 300, 17, 40, 130], [1, 1, 1, 1, 1, 5, 40, 3]


def batch_of(lengths: list[int], new: list[int], block_size: int, width: int = 0) -> tuple[int, ForwardBatch]:
    """`make_batch` on the device. The block table is at least `width` wide."""
    num_blocks, some = make_batch(lengths, new, block_size)
    wider = max(0, width - some.block_table.shape[1])
    empty = torch.zeros(sum(new), dtype=torch.int64, device=DEVICE)
    return num_blocks, ForwardBatch(
        tokens=empty,
        positions=empty,
        cu_seqlens_q=some.cu_seqlens_q.to(DEVICE),
        context_lens=some.context_lens.to(DEVICE),
        block_table=torch.nn.functional.pad(some.block_table, (0, wider)).to(DEVICE),
        slot_mapping=empty,
        logit_rows=empty,
        seqlens_q=new,
    )


def backend(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> TritonAttention:
    return TritonAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=DEVICE)


def check(dtype: torch.dtype, shape: tuple[int, int, int], block_size: int, width: int = 0) -> list[int]:
    """Runs a mixed batch against the reference in float64; returns into how many parts each launch cuts contexts."""
    heads, kv_heads, dim = shape
    num_blocks, batch = batch_of(LENGTHS, NEW, block_size, width)
    cache = [normal(num_blocks, block_size, kv_heads, dim, dtype=dtype, seed=i).to(DEVICE) for i in range(2)]
    q = 2 * normal(sum(NEW), heads, dim, dtype=dtype, seed=2).to(DEVICE)
    triton = backend(*shape, dtype)
    plan = triton.plan(batch, block_size)
    out = triton.attention(q, *cache, plan)
    assert out.dtype is dtype
    expected = sdpa.attention(q.double(), *(one.double() for one in cache), sdpa.plan(batch, block_size))
    # Weights are rounded to the dtype of the values before they are multiplied.
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    return [launch.num_parts for launch in plan.launches]


@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((8, 2, 64), 16), ((6, 1, 128), 7), ((3, 3, 10), 1), ((2, 2, 80), 256), ((20, 1, 16), 4), ((2, 1, 256), 32)],
)
def test_as_suits_the_batch(shape: tuple[int, int, int], block_size: int) -> None:
    check(torch.float32, shape, block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_contexts_in_parts(dtype: torch.dtype) -> None:
    assert min(check(dtype, (4, 1, 64), 16, width=80)) > 1


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 2, 64), (32, 8, 128), (6, 1, 128), (4, 2, 80), (8, 4, 256)])
def test_compiled(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    for block_size, width in ((16, 0), (16, 512), (256, 0)):
        check(dtype, shape, block_size, width)


def test_a_plan_serves_other_lengths_in_the_same_tensors() -> None:
    """As a captured graph replays it; a sequence of length 0 pads the batch."""
    heads, kv_heads, dim = 4, 2, 16
    num_blocks, batch = batch_of([600, 40, 3, 90], [1, 1, 1, 1], 16, width=64)
    cache = [normal(num_blocks, 16, kv_heads, dim, dtype=torch.float32, seed=i).to(DEVICE) for i in range(2)]
    triton = backend(heads, kv_heads, dim, torch.float32)
    plan = triton.plan(batch, 16)
    assert plan.launches[0].num_parts > 1
    for lengths in ([600, 40, 3, 90], [5, 38, 0, 64], [1, 0, 0, 0]):
        batch.context_lens.copy_(torch.tensor(lengths))
        q = normal(4, heads, dim, dtype=torch.float32, seed=sum(lengths)).to(DEVICE)
        used = sum(length > 0 for length in lengths)
        real = [row for row, length in enumerate(lengths) if length]
        one = replace(
            batch,
            context_lens=batch.context_lens[real],
            block_table=batch.block_table[real],
            seqlens_q=[1] * used,
        )
        out = triton.attention(q, *cache, plan)
        torch.testing.assert_close(out[real], sdpa.attention(q[real], *cache, sdpa.plan(one, 16)), rtol=1e-5, atol=1e-5)
        assert (out[[row for row in range(4) if row not in real]] == 0).all()


@pytest.mark.gpu
@on_gpu
def test_nothing_asks_the_device() -> None:
    num_blocks, batch = batch_of(LENGTHS, NEW, 16)
    cache = [torch.randn(num_blocks, 16, 2, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    q = torch.randn(sum(NEW), 8, 64, dtype=torch.bfloat16, device=DEVICE)
    triton = backend(8, 2, 64, torch.bfloat16)
    triton.attention(q, *cache, triton.plan(batch, 16))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton.attention(q, *cache, triton.plan(batch, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("group", [1, 3, 4, 70])
@pytest.mark.parametrize("rows", [16, 64])
def test_tiles_hold_every_row_once(group: int, rows: int) -> None:
    seqlens = [2, 40, 16, 5]
    held = [
        (sequence, row)
        for sequence, first in place_tiles(seqlens, 3, group, rows).tolist()
        for row in range(first, min(first + rows, seqlens[sequence - 3] * group))
    ]
    assert held == [(3 + index, row) for index, new in enumerate(seqlens) for row in range(new * group)]


def test_tiles_and_parts() -> None:
    for rows, expected in ((1, 16), (16, 16), (17, 32), (1000, 128)):
        assert choose_tile(rows, 128, 2).rows == expected
    assert choose_tile(1000, 128, 4).rows == 16 and choose_tile(1000, 192, 2).rows == 64
    assert [count_parts(programs, 132, 8192) for programs in (8, 64, 256, 264, 10_000)] == [32, 5, 2, 1, 1]
    assert [count_parts(8, 132, context) for context in (16, 511, 512, 2048)] == [1, 1, 2, 8]


def test_the_same_tokens(qwen3: str) -> None:
    prompts, params = [[5, 6, 7], list(range(2, 40)), [9]], SamplingParams(max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"device": DEVICE, "kv_cache_bytes": 2**20, "prefill_chunk_size": 16, "kernels": "torch"}
    engines = [LLM(qwen3, attention=attention, **options) for attention in ("triton", "sdpa")]
    assert [llm.attention for llm in engines] == ["triton", "sdpa"]
    for one, other in zip(*(llm.generate(prompts, params) for llm in engines), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == pytest.approx(other.outputs[0].logprobs, abs=1e-4)


COMPILE = """
import itertools

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engines.attention import triton as kernels

def build(capability, kernel, tile, **constants):
    types = {"scale": "fp32", **dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")}
    types |= dict.fromkeys(("sums", "tops", "weights"), "*fp32")
    types |= dict.fromkeys(("table", "starts", "contexts", "places"), "*i32")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)

several = ((4, True, True), (1000, False, False))
for capability, (rows, in_parts, is_decode) in itertools.product((80, 90), several):
    tile = kernels.choose_tile(rows, 128, 2)
    shape = dict(GROUP=4, KV_HEADS=8, DIM=128, PADDED_DIM=128, ROWS=tile.rows, KEYS=tile.keys)
    built = build(capability, kernels._attend, tile, **shape, BLOCK=16, IN_PARTS=in_parts, IS_DECODE=is_decode)
    assert built.metadata.shared <= 99 * 1024, built.metadata.shared
    assert any(name in built.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05")), "not on tensor cores"
    if in_parts:
        build(capability, kernels._merge_parts, tile, **shape, IS_DECODE=is_decode)
"""


def test_compiles_without_a_gpu(tmp_path: Path) -> None:
    """What the interpreter does not look at: types, tensor cores, shared memory within that of the smallest device."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
