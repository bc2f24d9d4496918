"""The compiled kernels against their twins in torch, and what happens where they cannot be compiled."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import LLM, SamplingParams
from engines.attention import sdpa
from engines.attention.native import NativeAttention
from engines.config import EngineConfig
from engines.models.operations import NativeOperations, TorchOperations
from engines.models.projection import FewRows
from engines.native import build
from engines.native import library as module
from engines.native.library import Library, choose_library
from tests.worlds import ROOT

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
EPS = 1e-6
pytestmark = pytest.mark.skipif(choose_library("auto", torch.float32, CPU) is None, reason="no C++ compiler here")


def library_for(dtype: torch.dtype) -> Library:
    library = choose_library("native", dtype, CPU)
    assert library is not None
    return library


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to the order of sums and a unit of the exponential, which may flip a rounding of bfloat16."""
    rtol, atol = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 2e-6), torch.bfloat16: (1e-2, 1e-3)}[mine.dtype]
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    if mine.dtype is torch.bfloat16:
        assert (mine == theirs).double().mean() > 0.97


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 32), (3, 1), (7, 100), (300, 257)])
def test_norms_and_activation(dtype: torch.dtype, rows: int, size: int) -> None:
    native, torch_ones = NativeOperations(library_for(dtype)), TorchOperations()
    x, residual = 3 * normal(rows, size, dtype=dtype), normal(rows, size, dtype=dtype, seed=1)
    weight, gate_up = normal(size, dtype=dtype, seed=2), 5 * normal(rows, 2 * size, dtype=dtype, seed=3)
    close(native.rms_norm(x, weight, EPS), torch_ones.rms_norm(x, weight, EPS))
    close(native.silu_mul(gate_up), torch_ones.silu_mul(gate_up))
    mine = native.add_rms_norm(x, residual.clone(), weight, EPS)
    theirs = torch_ones.add_rms_norm(x, residual, weight, EPS)
    close(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_far_out_and_of_what_is_no_number(dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -100.0, -87.5, -20.0, -0.0, 0.0, 1e-8, 20.0, 88.5, 1e4, torch.nan, torch.inf])
    gate_up = torch.cat((gate, torch.ones(len(gate))))[None].to(dtype)
    mine = NativeOperations(library_for(dtype)).silu_mul(gate_up)
    theirs = TorchOperations().silu_mul(gate_up)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "normed"),
    [(1, 4, 4, 16, True), (5, 6, 2, 64, False), (70, 8, 1, 128, True), (9, 3, 3, 10, True)],
)
def test_queries_keys_and_values(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    projected = normal(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    norms = normal(2, dim, dtype=dtype, seed=1) if normed else None
    angles = normal(tokens, 1, dim // 2, dtype=torch.float64, seed=2)
    rotary = (
        torch.cat((angles.cos(), angles.cos()), -1).to(dtype),
        torch.cat((-angles.sin(), angles.sin()), -1).to(dtype),
    )
    slots = torch.randperm(20 * 4, generator=torch.Generator().manual_seed(3))[:tokens]
    caches = [[normal(20, 4, kv_heads, dim, dtype=dtype, seed=4 + i) for i in range(2)] for _ in range(2)]
    queries = [
        operations.rotate_and_store(projected, norms, rotary, slots, *cache, EPS)
        for operations, cache in zip((NativeOperations(library_for(dtype)), TorchOperations()), caches, strict=True)
    ]
    close(*queries)
    close(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])


def make_batch(lengths: list[int], new: list[int], block_size: int, seed: int = 0) -> Any:
    """Sequences of these lengths in shuffled blocks; those with one new token come first."""
    generator = torch.Generator().manual_seed(seed)
    widest = -(-max(lengths) // block_size)
    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    table = torch.zeros(len(lengths), widest, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = -(-length // block_size)
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    starts = [0]
    for count in new:
        starts.append(starts[-1] + count)
    return num_blocks, SimpleNamespace(
        tokens=torch.zeros(starts[-1]),
        seqlens_q=new,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        block_table=table,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (8, 2, 64), (6, 1, 128), (3, 3, 10)])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int) -> None:
    lengths, new = [1, 2, 33, 16, 300, 17, 40], [1, 1, 1, 1, 1, 5, 40]
    num_blocks, batch = make_batch(lengths, new, block_size)
    cache = [normal(num_blocks, block_size, kv_heads, dim, dtype=dtype, seed=i) for i in range(2)]
    q = 2 * normal(sum(new), heads, dim, dtype=dtype, seed=2)
    native = NativeAttention(library_for(dtype))
    mine = native.attention(q, *cache, native.plan(batch, block_size))
    theirs = sdpa.attention(q, *cache, sdpa.plan(batch, block_size))
    # In bfloat16 torch rounds the weights, which here stay in float32.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (8, 2, 64), (5, 1, 128), (3, 3, 10)])
def test_a_token_s_attention_has_the_same_bits_in_any_chunk_and_batch_and_with_any_threads(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    lengths, native = [5, 600, 33, 16, 1], NativeAttention(library_for(dtype))
    num_blocks, whole = make_batch(lengths, lengths, 16)
    cache = [normal(num_blocks, 16, kv_heads, dim, dtype=dtype, seed=i) for i in range(2)]
    q = 2 * normal(sum(lengths), heads, dim, dtype=dtype, seed=2)
    rng, before, results = random.Random(0), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native.attention(q, *cache, native.plan(whole, 16)))
            done = [0] * len(lengths)
            out = torch.empty_like(q)
            while done != lengths:
                picked = [i for i, count in enumerate(done) if count < lengths[i] and rng.random() < 0.7]
                rng.shuffle(picked)
                new = [rng.choice([1, 1, 2, 17, 40, 300]) for _ in picked]
                new = [min(count, lengths[i] - done[i]) for i, count in zip(picked, new, strict=True)]
                first = [int(whole.cu_seqlens_q[i]) + done[i] for i in picked]
                rows = [row for start, count in zip(first, new, strict=True) for row in range(start, start + count)]
                for i, count in zip(picked, new, strict=True):
                    done[i] += count
                batch = SimpleNamespace(
                    seqlens_q=new,
                    context_lens=torch.tensor([done[i] for i in picked], dtype=torch.int32),
                    cu_seqlens_q=torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32),
                    block_table=whole.block_table[picked],
                )
                out[rows] = native.attention(q[rows], *cache, native.plan(batch, 16))  # type: ignore[arg-type]
            assert same_bits(out, results[0])
            assert same_bits(results[-1], results[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [10, 100, 256, 1000])
def test_a_row_of_the_small_operations_has_the_same_bits_in_any_batch_and_with_any_threads(
    dtype: torch.dtype, size: int
) -> None:
    operations, rows = NativeOperations(library_for(dtype)), 70
    weight, before = normal(size, dtype=dtype, seed=4), torch.get_num_threads()
    x, residual, gate_up = (3 * normal(rows, n, dtype=dtype, seed=n) for n in (size, size + 1, 2 * size))
    residual = residual[:, :size].contiguous()
    heads = normal(rows, 5 + 2 * 2, size, dtype=dtype, seed=5)
    norms = normal(2, size, dtype=dtype)
    rotary = (normal(rows, 1, size, dtype=dtype), normal(rows, 1, size, dtype=dtype))

    def run(start: int, stop: int) -> list[torch.Tensor]:
        cache = [torch.zeros(rows, 1, 2, size, dtype=dtype) for _ in range(2)]
        part = slice(start, stop)
        cos, sin = (table[part].clone() for table in rotary)
        slots = torch.arange(start, stop)
        queries = operations.rotate_and_store(heads[part].clone(), norms, (cos, sin), slots, *cache, EPS)
        return [
            operations.rms_norm(x[part].clone(), weight, EPS),
            *operations.add_rms_norm(x[part].clone(), residual[part].clone(), weight, EPS),
            operations.silu_mul(gate_up[part].clone()),
            *(queries, cache[0][part], cache[1][part]),
        ]

    whole = run(0, rows)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for start, stop in ((0, rows), (0, 1), (1, 3), (7, 8), (13, 40), (rows - 1, rows)):
                for mine, theirs in zip(run(start, stop), whole, strict=True):
                    assert same_bits(mine, theirs[start:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_same_tokens(qwen3: str, dtype: str) -> None:
    prompts, params = [[5, 6, 7], list(range(2, 60)), [9]], SamplingParams(max_tokens=60, n=3)
    native, plain = (LLM(qwen3, dtype=dtype, kv_cache_bytes=2**23, kernels=kernels) for kernels in ("native", "torch"))
    assert (native.kernels, plain.kernels) == ("native", "torch")
    outputs = [llm.generate(prompts, params) for llm in (native, plain)]
    for mine, theirs in zip(*outputs, strict=True):
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9 if dtype == "float64" else 1e-4)


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_build", module._build.__wrapped__)
    return tmp_path / "curtail"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Compiles in a moment."""
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }\n')
    return path


def answers_one(source: Path, *flags: str) -> Path:
    path = build.build(source, flags, "nothing does it")
    assert path is not None and ctypes.CDLL(str(path)).one() == 1
    return path


def test_compiled_once(no_cache: Path, source: Path) -> None:
    built = answers_one(source)
    written = built.stat().st_mtime_ns
    assert answers_one(source) == built and built.stat().st_mtime_ns == written
    assert answers_one(source, "-DOTHER") != built
    source.write_text(source.read_text() + "// changed")
    assert answers_one(source) != built
    assert len(list(no_cache.iterdir())) == 3


def test_a_compiler_with_arguments(no_cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `CXX="ccache g++"`."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    monkeypatch.setenv("CXX", f"env A=b {compiler}")
    answers_one(source)
    assert len(list(no_cache.iterdir())) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86-64 processor")
def test_compiled_for_another_processor(no_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURTAIL_MARCH", "x86-64-v3")
    library = library_for(torch.bfloat16)
    (built,) = no_cache.iterdir()
    monkeypatch.setenv("CURTAIL_MARCH", "x86-64-v2")
    with pytest.raises(ValueError, match="cannot be had on cpu here"), monkeypatch.context() as hasty:
        hasty.setattr(build, "COMPILE_S", 0.0)
        choose_library("native", torch.bfloat16, CPU)  # is not the one that is there
    assert list(no_cache.iterdir()) == [built]
    x, weight = normal(64, 100, dtype=torch.bfloat16), normal(100, dtype=torch.bfloat16, seed=1)
    close(NativeOperations(library).rms_norm(x, weight, EPS), TorchOperations().rms_norm(x, weight, EPS))


def test_a_damaged_library_is_compiled_anew(no_cache: Path, source: Path) -> None:
    load = f"from pathlib import Path; from engines.native import build; build.build(Path({str(source)!r}), (), '')"
    subprocess.run([sys.executable, "-c", load], cwd=ROOT, check=True)
    (built,) = no_cache.iterdir()
    built.write_bytes(b"no library")  # a disk was full, say
    assert answers_one(source) == built
    assert len(list(no_cache.iterdir())) == 1 and built.stat().st_size > 1000


@pytest.mark.parametrize("problem", ["no compiler", "fails", "hangs", "unwritable"])
def test_without_a_library_torch_does_it_and_it_is_told(
    no_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    words = "cannot compile"
    if problem == "no compiler":
        monkeypatch.setattr(build.shutil, "which", lambda _: None)
        monkeypatch.delenv("CXX", raising=False)
        words = "no C++ compiler"
    elif problem == "fails":
        monkeypatch.setattr(module, "FLAGS", ("--no-such-flag",))
    elif problem == "hangs":
        script = no_cache.parent / "compiler"
        script.write_text("#!/bin/sh\nsleep 60\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setattr(build, "COMPILE_S", 0.2)
    else:
        no_cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert choose_library("auto", torch.float32, CPU) is None
    assert words in caplog.text and "torch" in caplog.text
    with pytest.raises(ValueError, match=r"EngineConfig.kernels='native': cannot be had on cpu here"):
        choose_library("native", torch.float32, CPU)


def test_options() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.kernels='fast': must be one of \['auto', 'torch', "):
        EngineConfig(kernels="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (31, 5), (64, 16), (100, 33), (512, 300)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_few_rows(dtype: torch.dtype, inputs: int, outputs: int, threads: int) -> None:
    few_rows = FewRows(library_for(dtype))
    assert few_rows.most_rows > 6, "the widest tile of any processor, and more"
    most = few_rows.most_rows
    x, weight = normal(most, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype, seed=1)
    bias = normal(outputs, dtype=dtype, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ones = torch.cat([few_rows(x[i : i + 1], weight) for i in range(most)])
        for rows in range(most + 1):
            assert same_bits(few_rows(x[:rows], weight), ones[:rows])
    finally:
        torch.set_num_threads(before)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(ones.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6 * inputs)
    torch.testing.assert_close(few_rows(x[:2], weight, bias), ones[:2] + bias)
