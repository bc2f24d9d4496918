"""The draw in Triton against torch's and exact log-probs: interpreted without a GPU, compiled where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import LLM, SamplingParams
from engines.noise import _gumbel_from_bits, gumbel
from engines.sampler import Sampled, SamplingBatch, make_draw, make_sampling_batch, process_logits, sample
from tests.engines.test_noise import KNOWN
from tests.engines.test_sampler import mixed
from tests.worlds import ROOT

pytest.importorskip("triton")

import triton
import triton.language as tl

from engines import triton_sampler
from engines.triton_sampler import PART, draw_in_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")


def normal(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def batch_of(temperatures: list[float], **columns: np.ndarray) -> SamplingBatch:
    rows = len(temperatures)
    off = {"top_k": np.full(rows, -1), "top_p": np.ones(rows), "min_p": np.zeros(rows)}
    rng = np.random.default_rng(rows)
    keys, positions = rng.integers(-(2**63), 2**63 - 1, rows), rng.integers(0, 10**6, rows)
    named = {"keys": keys, "positions": positions, "temperature": np.array(temperatures), **off, **columns}
    return make_sampling_batch(**named, device=DEVICE)


def check(drawn: Sampled, logits: torch.Tensor, batch: SamplingBatch, tolerance: float = 2e-6) -> None:
    assert torch.equal(drawn.tokens, sample(logits, batch).tokens)
    exact = process_logits(logits, batch).double().log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    assert drawn.logprobs.dtype is torch.float32
    torch.testing.assert_close(drawn.logprobs.double(), exact, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        *((torch.float32, vocab) for vocab in (1, 2, 131, PART, PART + 1, 5003)),
        *((torch.bfloat16, vocab) for vocab in (17, 5003)),
        (torch.float16, 2 * PART + 1),
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


@pytest.mark.parametrize("vocab", [131, PART + 5])
def test_the_same_tokens_of_processed_rows(vocab: int) -> None:
    columns = mixed(10)
    batch = make_sampling_batch(**columns, device=DEVICE)
    assert batch.top_k is not None and batch.top_p is not None and batch.min_p is not None
    logits = 3 * normal(10, vocab, seed=1)
    check(sample(logits, batch, draw_in_triton), logits, batch)


def test_a_row_has_the_same_bits_whatever_comes_with_it_and_wherever_it_lies() -> None:
    vocab, batch = PART + 17, batch_of([1.0, 0.0, 0.6, 3.0, 1.0])
    logits = 4 * normal(5, vocab, seed=2)
    whole = sample(logits, batch, draw_in_triton)
    odd = torch.cat((logits.new_zeros(5, 1), logits, logits.new_zeros(5, 2)), 1)[:, 1 : vocab + 1]
    across = logits.T.contiguous().T
    for of, rows in ((logits, slice(3, 4)), (logits, slice(1, 5)), (odd, slice(0, 5)), (across, slice(2, 4))):
        drawn = sample(of[rows], batch.rows(rows), draw_in_triton)
        assert torch.equal(drawn.tokens, whole.tokens[rows])
        assert torch.equal(drawn.logprobs.view(torch.int32), whole.logprobs[rows].view(torch.int32))
    logits[[0, 1, 2, 4]] = 1.0
    assert torch.equal(sample(logits, batch, draw_in_triton).logprobs[3], whole.logprobs[3])
    assert [len(column) for column in sample(logits[:0], batch.rows(slice(0)), draw_in_triton)] == [0, 0]


def test_ties_go_to_the_lowest_id() -> None:
    """Greedy ones, and of logits beside which noise is nothing in float64."""
    for logit, temperature in ((5.0, 0.0), (1e30, 1.0)):
        logits = torch.zeros(4, PART + 9, device=DEVICE)
        for row, tied in enumerate(([7, 6, 4000], [PART + 2, PART + 3], [PART, PART - 1], [0, PART + 8])):
            logits[row, tied] = logit
        drawn = sample(logits, batch_of([temperature] * 4), draw_in_triton)
        assert drawn.tokens.tolist() == [6, PART + 2, PART - 1, 0]


def test_scores_that_float64_rounds_into_ties() -> None:
    """Where logits are so large that the steps of float64 are near those of the noise."""
    logits, batch = torch.full((60, PART), 1e15, device=DEVICE), batch_of([1.0] * 60)
    most = gumbel(batch.keys, batch.positions, PART).argmax(-1)
    drawn = sample(logits, batch, draw_in_triton)
    assert torch.equal(drawn.tokens, sample(logits, batch).tokens) and not torch.equal(drawn.tokens, most)


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


def test_noise_alone() -> None:
    """Of flat logits the token with the most noise is drawn."""
    for vocab in (131, PART + 100):
        batch = batch_of([1.0] * 12)
        batch.keys[:3] = torch.tensor([3, -(2**63), 2**63 - 1])
        drawn = sample(torch.full((12, vocab), -3.7, device=DEVICE), batch, draw_in_triton)
        assert torch.equal(drawn.tokens, gumbel(batch.keys, batch.positions, vocab).argmax(-1))


@triton.jit
def _noise(bits, exact, most, seed, pair_bits, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    places = tl.arange(0, SIZE)
    some = tl.load(bits + places).to(tl.uint32, bitcast=True)
    tl.store(exact + places, triton_sampler._gumbel(some))
    tl.store(most + places, triton_sampler._most_gumbel(some))
    pairs = tl.arange(0, PAIRS)
    even, odd = triton_sampler._pair_bits(tl.load(seed).to(tl.uint64), pairs)
    tl.store(pair_bits + 2 * pairs, even)
    tl.store(pair_bits + 2 * pairs + 1, odd)


def test_random_numbers_and_bounds() -> None:
    """Known answers of SplitMix64; and noise never beyond its bound, nor far below where it is high."""
    powers = np.concatenate([2.0 ** np.arange(32) + shift for shift in (-1, 0, 1)])
    near = np.concatenate((powers, 2.0**32 - powers))
    drawn = np.random.default_rng(0).integers(0, 2**32, 2**14 - len(near))
    unsigned = torch.from_numpy(np.concatenate((near.clip(0, 2**32 - 1).astype(np.int64), drawn))).to(DEVICE)
    exact, most = torch.empty(2**14, dtype=torch.float64, device=DEVICE), torch.empty(2**14, device=DEVICE)
    pair_bits, seed = torch.empty(8, dtype=torch.int32, device=DEVICE), torch.tensor([1234567], device=DEVICE)
    _noise[(1,)](unsigned.to(torch.int32), exact, most, seed, pair_bits, SIZE=2**14, PAIRS=4)
    halves = [half for value in KNOWN[:4] for half in (value % 2**32, value >> 32)]
    assert [value % 2**32 for value in pair_bits.tolist()] == [half ^ 2**31 for half in halves]
    torch.testing.assert_close(exact, _gumbel_from_bits((unsigned - 2**31).to(torch.int32)), rtol=1e-14, atol=1e-15)
    above = most.double() - exact
    assert float(above.min()) > 5e-5 and float(above[exact > 4].max()) < 0.08


def test_an_engine_draws_with_its_kernels(qwen3: str) -> None:
    assert make_draw("triton", None) is draw_in_triton and make_draw("torch", None) is None
    params = SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, ignore_eos=True)
    outputs = []
    for kernels in ("triton", "torch"):
        llm = LLM(qwen3, device=DEVICE, kernels=kernels, attention="sdpa", kv_cache_bytes=2**20)
        assert (llm.replica._runner._draw_tokens is draw_in_triton) == (kernels == "triton")
        outputs.append([one.outputs[0].token_ids for one in llm.generate([[5, 6, 7], [9]], params)])
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@on_gpu
def test_nothing_asks_the_device() -> None:
    logits, batch = normal(7, 5003), batch_of([1.0] * 6 + [0.0])
    processed = replace(batch, top_p=torch.full((7,), 0.9, dtype=torch.float64, device=DEVICE))
    for one in (batch, processed):
        sample(logits, one, draw_in_triton)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in (batch, processed):
            sample(logits, one, draw_in_triton)
    finally:
        torch.cuda.set_sync_debug_mode("default")


COMPILE = """
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engines import triton_sampler as kernels

def build(capability, dtype, kernel, num_warps, **constants):
    names = kernel.arg_names
    types = {"logits": f"*{dtype}", "stride": "i32", "best": "*i32", "temperatures": "*fp64", "scores": "*fp64"}
    types |= dict.fromkeys(("keys", "positions", "tokens"), "*i64")
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    return compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}).asm["ptx"]

for capability, dtype in itertools.product((80, 90), ("bf16", "fp32")):
    drawn = build(capability, dtype, kernels._draw_parts, 4, VOCABULARY=151936, PAIRS=kernels.PART // 2)
    sizes = dict(VOCABULARY=151936, PARTS=38, PADDED_PARTS=64)
    merged = build(capability, dtype, kernels._merge_parts, 1, **sizes)
    for ptx in (drawn, merged):
        assert "div.rn.f32" in ptx, "logits are divided as torch divides"
        assert not any(name in ptx for name in ("div.full", "div.approx", "div.rn.ftz")), "and not otherwise"
"""


def test_compiles_without_a_gpu(tmp_path: Path) -> None:
    """As `test_triton.test_compiles_without_a_gpu`."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
