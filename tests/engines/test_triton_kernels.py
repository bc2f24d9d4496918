"""The draw and the small operations in Triton against torch's: interpreted, or compiled where there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engines import LLM, SamplingParams
from engines.models.operations import TorchOperations
from engines.sampling.noise import gumbel
from engines.sampling.sampler import Sampled, SamplingBatch, make_sampling_batch, process_logits, sample

pytest.importorskip("triton")

from engines.models.triton_operations import TritonOperations
from engines.sampling.triton_draw import PART, draw_in_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
BFLOAT16 = pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, on_gpu])
"""Triton's interpreter cuts off where a GPU rounds."""
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch_of(temperatures: list[float], **columns: np.ndarray) -> SamplingBatch:
    rows = len(temperatures)
    off = {"top_k": np.full(rows, -1), "top_p": np.ones(rows), "min_p": np.zeros(rows)}
    rng = np.random.default_rng(rows)
    keys, positions = rng.integers(-(2**63), 2**63 - 1, rows), rng.integers(0, 10**6, rows)
    named: dict[str, Any] = {"keys": keys, "positions": positions, "temperature": np.array(temperatures), **off}
    return make_sampling_batch(**{**named, **columns}, device=DEVICE)


def check(drawn: Sampled, logits: torch.Tensor, batch: SamplingBatch) -> None:
    assert torch.equal(drawn.tokens, sample(logits, batch).tokens)
    exact = process_logits(logits, batch).double().log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    assert drawn.logprobs.dtype is torch.float32
    torch.testing.assert_close(drawn.logprobs.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        *((torch.float32, vocab) for vocab in (1, 2, 131, PART, PART + 1, 2 * PART + 900)),
        *((torch.bfloat16, vocab) for vocab in (17, 2 * PART + 900)),
        (torch.float16, 2 * PART + 1),
        *(pytest.param(dtype, 151_936, marks=[pytest.mark.gpu, on_gpu]) for dtype in (torch.bfloat16, torch.float32)),
    ],
)
def test_the_same_tokens(dtype: torch.dtype, vocab: int) -> None:
    temperatures = [1.0, 1.0, 1.0, 0.7, 0.0, 50.0, 1e-6, 1.0, 0.0, 0.3, *[1.0, 0.9] * 10]
    logits = 3 * normal(len(temperatures), vocab + 3)
    logits[0] /= 300
    logits[1] *= 10
    logits[2] += 2000
    logits[7, 1::2] = -torch.inf
    logits[8, 1:] = -torch.inf
    logits[9, : vocab // 2] = -torch.inf
    logits, batch = logits.to(dtype)[:, :vocab], batch_of(temperatures)
    check(sample(logits, batch, draw_in_triton), logits, batch)
    assert [len(column) for column in sample(logits[:0], batch.rows(slice(0)), draw_in_triton)[:2]] == [0, 0]


def test_the_same_tokens_of_processed_rows() -> None:
    columns = {"top_k": np.array([-1, 5, 40, 1]), "top_p": np.array([0.9, 1, 0.5, 1]), "min_p": np.full(4, 0.01)}
    logits, batch = 3 * normal(4, PART + 5, seed=1), batch_of([1.0, 0.7, 0.0, 2.0], **columns)
    assert batch.is_processed
    check(sample(logits, batch, draw_in_triton), logits, batch)


def test_ties_go_to_the_lowest_id_and_flat_logits_to_the_most_noise() -> None:
    for logit, temperature in ((5.0, 0.0), (1e30, 1.0)):  # beside the second, noise is nothing in float64
        logits = torch.zeros(4, PART + 9, device=DEVICE)
        for row, tied in enumerate(([7, 6, PART - 96], [PART + 2, PART + 3], [PART, PART - 1], [0, PART + 8])):
            logits[row, tied] = logit
        drawn = sample(logits, batch_of([temperature] * 4), draw_in_triton)
        assert drawn.tokens.tolist() == [6, PART + 2, PART - 1, 0]
    batch = batch_of([1.0] * 12)
    batch.keys[:3] = torch.tensor([3, -(2**63), 2**63 - 1])
    drawn = sample(torch.full((12, PART + 100), -3.7, device=DEVICE), batch, draw_in_triton)
    assert torch.equal(drawn.tokens, gumbel(batch.keys, batch.positions, PART + 100).argmax(-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_show_in_the_log_prob(temperature: float) -> None:
    for vocab, token in ((131, 0), (PART, 7), (PART + 9, 8), (PART + 9, PART + 8)):
        logits = normal(6, vocab)
        logits[1] = torch.nan
        logits[2, token] = torch.nan
        logits[3, token] = torch.inf
        logits[4] = -torch.inf
        drawn = sample(logits, batch_of([temperature] * 6), draw_in_triton)
        assert drawn.logprobs.isfinite().tolist() == [True, False, False, False, False, True]
        assert int(drawn.tokens.min()) >= 0 and int(drawn.tokens.max()) < vocab


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (7, 1, 10), (32, 8, 128)])
def test_operations(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    x, residual, weight = (normal(*shape, seed=dim).to(dtype) for shape in ((5, 48), (5, 48), (48,)))
    gate_up = 3 * normal(5, 2 * 1100).to(dtype)
    qkv = normal(5, heads + 2 * kv_heads, dim).to(dtype)
    rotary = tuple(normal(5, 1, dim, seed=seed).to(dtype) for seed in (1, 2))
    norms, slots = normal(2, dim, seed=3).to(dtype), torch.tensor([3, 0, 17, 5, 9], device=DEVICE)
    results = []
    for operations in (TorchOperations(), TritonOperations()):
        caches = [torch.zeros(5, 4, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(4)]
        normed, total = operations.add_rms_norm(x, residual.clone(), weight, 1e-6)
        results.append(
            [
                *(
                    operations.rms_norm(x, weight, 1e-6),
                    normed,
                    total,
                    operations.silu_mul(gate_up),
                ),
                operations.rotate_and_store(qkv, norms, rotary, slots, *caches[:2], 1e-6),
                operations.rotate_and_store(qkv, None, rotary, slots, *caches[2:], 1e-6),
                *caches,
            ]
        )
    for plain, mine in zip(*results, strict=True):
        assert mine.dtype is dtype
        torch.testing.assert_close(mine, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=[pytest.mark.gpu, on_gpu])])
def test_an_engine_with_these_kernels(qwen3: str, dtype: str) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, ignore_eos=True)
    outputs = []
    for kernels in ("triton", "torch"):
        llm = LLM(qwen3, device=DEVICE, dtype=dtype, kernels=kernels, attention="sdpa", kv_cache_bytes=2**20)
        assert llm.kernels == kernels
        outputs.append([one.outputs[0] for one in llm.generate([[5, 6, 7], [9]], params)])
    for mine, plain in zip(*outputs, strict=True):
        assert mine.token_ids == plain.token_ids
        np.testing.assert_allclose(mine.logprobs, plain.logprobs, atol=1e-4 if dtype == "float32" else 0.1)
    with pytest.raises(ValueError, match=r"EngineConfig.kernels='triton': computes in float32, .* use 'torch'"):
        LLM(qwen3, device=DEVICE, dtype="float64", kernels="triton")


@pytest.mark.gpu
@on_gpu
def test_nothing_asks_the_device() -> None:
    logits, batch = normal(7, 5003), batch_of([1.0] * 6 + [0.0])
    processed = batch_of([1.0] * 6 + [0.0], top_p=np.full(7, 0.9))
    for one in (batch, processed):
        sample(logits, one, draw_in_triton)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in (batch, processed):
            sample(logits, one, draw_in_triton)
    finally:
        torch.cuda.set_sync_debug_mode("default")
