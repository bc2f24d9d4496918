"""The same bits in any batch on Triton's kernels: interpreted without a GPU, compiled where there is one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM
from engines.attention.choose import Setting, choose_attention
from engines.batch import ForwardBatch
from engines.models.operations import TorchOperations
from engines.sampler import process_logits
from tests.checkpoints import save_checkpoint
from tests.engines.test_batch_invariant import alone, beside_others, finish, fresh, make_states
from tests.engines.test_sampler import columns
from tests.worlds import ROOT

pytest.importorskip("triton")

from engines.attention.triton import TritonAttention
from engines.models import triton_products
from engines.models.triton_operations import TritonOperations
from engines.models.triton_products import project_in_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
BFLOAT16 = pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, on_gpu])
"""Which Triton's interpreter cannot multiply, and cuts off where a GPU rounds."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def picks(rows: int, seed: int = 0) -> list[list[int]]:
    """Single rows of the first and the last tile, and some rows in any order."""
    rng = random.Random(seed)
    return [[0], [rows - 1], *(rng.sample(range(rows), count) for count in (1, 2, 5, 17, 33, rows - 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 131), (33, 20), (256, 64), (1, 1)])
def test_a_row_of_a_product(dtype: torch.dtype, biased: bool, inputs: int, outputs: int) -> None:
    x, weight = (normal(rows, inputs, dtype=dtype, seed=rows) for rows in (70, outputs))
    bias = normal(outputs, dtype=dtype, seed=2) if biased else None
    whole = project_in_triton(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for rows in picks(70):
        assert torch.equal(project_in_triton(x[rows], weight, bias), whole[rows])
    assert torch.equal(project_in_triton(x[3:70], weight, bias), whole[3:]), "which may lie at an odd address"
    others = torch.where(torch.arange(70, device=DEVICE)[:, None] == 40, x, 100.0)
    assert torch.equal(project_in_triton(others, weight, bias)[40], whole[40])
    assert project_in_triton(x[:0], weight, bias).shape == (0, outputs)


def test_a_device_that_treats_rows_unlike_is_found(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = triton_products.project_in_triton

    def reversed_beyond_one_tile(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        low, high = real(x[:32], weight, bias), real(x[32:].flip(-1), weight.flip(-1).contiguous(), bias)
        return torch.cat((low, high))

    monkeypatch.setattr(triton_products, "project_in_triton", reversed_beyond_one_tile)
    with pytest.raises(ValueError, match=r"batch_invariant=True: on .* a matrix of 128 x 48 has other bits at another"):
        LLM(qwen3, device=DEVICE, attention="triton", batch_invariant=True, kv_cache_bytes=2**20)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (14336, 4096), (1000, 20_001)])
def test_a_row_of_a_large_product(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Every place in a tile gives one row the same bits, where the order of a sum shows."""
    row, weight = (normal(count, inputs, dtype=dtype, seed=count) for count in (1, outputs))
    expected = project_in_triton(row, weight)
    torch.testing.assert_close(expected.double(), row.double() @ weight.double().T, rtol=1e-2, atol=1e-1)
    for count in (2, 64, 65, 200, 4097):
        assert torch.equal(project_in_triton(row.expand(count, -1), weight), expected.expand(count, -1))
    x = normal(300, inputs, dtype=dtype, seed=3)
    x[123] = row
    assert torch.equal(project_in_triton(x, weight)[123:124], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("size", [64, 48, 131])
def test_a_row_of_a_norm(dtype: torch.dtype, size: int) -> None:
    x, residual = (normal(40, size, dtype=dtype, seed=seed) for seed in (0, 1))
    weight, mine, theirs = normal(size, dtype=dtype, seed=2), TritonOperations(), TorchOperations()
    alone, (added, total) = mine.rms_norm(x, weight, 1e-6), mine.add_rms_norm(x, residual.clone(), weight, 1e-6)
    expected, expected_total = theirs.add_rms_norm(x, residual, weight, 1e-6)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 1e-6}
    torch.testing.assert_close(alone, theirs.rms_norm(x, weight, 1e-6), **tolerance)
    torch.testing.assert_close(added, expected, **tolerance)
    assert torch.equal(total, expected_total)
    for rows in picks(40):
        assert torch.equal(mine.rms_norm(x[rows], weight, 1e-6), alone[rows])
        assert torch.equal(mine.add_rms_norm(x[rows], residual[rows], weight, 1e-6)[0], added[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_a_row_of_an_activation(dtype: torch.dtype) -> None:
    gate_up = 3 * normal(40, 2 * 1100, dtype=dtype, seed=0)
    whole = TritonOperations().silu_mul(gate_up)
    torch.testing.assert_close(whole, TorchOperations().silu_mul(gate_up), rtol=TOLERANCE[dtype], atol=1e-6)
    for rows in picks(40):
        assert torch.equal(TritonOperations().silu_mul(gate_up[rows]), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 10)])
def test_a_token_that_is_rotated_and_stored(
    dtype: torch.dtype, normed: bool, heads: int, kv_heads: int, dim: int
) -> None:
    new = normal(12, heads + 2 * kv_heads, dim, dtype=dtype, seed=0)
    angles = torch.randn(12, 1, dim // 2, generator=torch.Generator().manual_seed(1))
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    rotary = cos.to(DEVICE, dtype), sin.to(DEVICE, dtype)
    norms = normal(2, dim, dtype=dtype, seed=2) if normed else None
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:12].to(DEVICE)

    def run(operations: Any, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = torch.zeros((2, 5, 4, kv_heads, dim), dtype=dtype, device=DEVICE)
        turned = cos_sin[0][rows], cos_sin[1][rows]
        q = operations.rotate_and_store(new[rows], norms, turned, slots[rows], keys, values, 1e-6)
        return q, keys, values

    cos_sin, every = rotary, list(range(12))
    mine, theirs = run(TritonOperations(), every), run(TorchOperations(), every)
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(mine[2], theirs[2])
    for rows in ([0], [11], [7, 2, 9]):
        q, keys, _ = run(TritonOperations(), rows)
        assert torch.equal(q, mine[0][rows])
        written = slots[rows]
        assert torch.equal(keys.flatten(0, 1)[written], mine[1].flatten(0, 1)[written])
        assert int((keys.flatten(0, 1).flatten(1).abs().sum(1) > 0).sum()) == len(rows), "nothing else is touched"


def test_the_same_bits_in_a_few_batches(tmp_path: Path) -> None:
    """A whole engine; many more batches, and bfloat16: `test_gpu.test_the_same_bits_in_twenty_batches`."""
    save_checkpoint(tmp_path, "qwen3-odd")
    model, states = str(tmp_path), make_states(longest=16, max_tokens=4, count=5)
    options: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "attention": "triton"}
    expected = alone(model, states, **options)
    num_compared = 0
    for seed in (3, 6):  # with the prefix cache and chunks of 3 tokens; without either
        done, _ = beside_others(model, states, seed, kv_cache_bytes=512 * 400, **options)
        assert done == {sequence_id: expected[sequence_id] for sequence_id in done}
        num_compared += len(done)
    assert num_compared > 3
    # Padded and ahead, as CUDA graphs replay them.
    llm = LLM(model, batch_invariant=True, kv_cache_bytes=2**20, max_num_seqs=6, **options)
    assert (llm.attention, llm.kernels) == ("triton", "triton")
    llm._engine._runner.pad_decodes(run_ahead=True)
    for state in states:
        llm.replica.submit(fresh(state))
    assert finish(llm.replica) == expected


def test_parts_that_take_too_much_memory_are_one_program_s() -> None:
    attention = TritonAttention(
        num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=DEVICE, part_tokens=512
    )
    table = torch.zeros((1, 2**13), dtype=torch.int32, device=DEVICE)
    num_parts = []
    for new in (1, 4, 40):  # parts of 2^17 tokens are 256, of 16.6 KB for a token
        tokens = torch.zeros(new, dtype=torch.int64, device=DEVICE)
        batch = ForwardBatch(
            tokens=tokens,
            positions=tokens,
            cu_seqlens_q=torch.tensor([0, new], dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor([2**17], dtype=torch.int32, device=DEVICE),
            block_table=table,
            slot_mapping=tokens,
            logit_rows=tokens,
            seqlens_q=[new],
        )
        num_parts.append(attention.plan(batch, 16).launches[0].num_parts)
    assert num_parts == [256, 256, 1]


@pytest.mark.parametrize("vocab", [1, 2, 1000, 150_000, 2**18])
def test_top_p_by_sums_that_have_no_order(vocab: int) -> None:
    """Of tokens that are all as likely just the half is kept: sums are exact, and of a large vocabulary still fit."""
    for logit in (0.0, -3.7):
        kept = process_logits(torch.full((2, vocab), logit), columns(2, top_p=0.5)).isfinite()
        assert kept.sum(-1).tolist() == [(vocab + 1) // 2] * 2


CUDA = Setting(
    device=torch.device("cuda"), capability=(9, 0), dtype=torch.bfloat16, head_dim=128, block_size=256,
    batch_invariant=True,
)  # fmt: skip


def test_which_attention_gives_the_same_bits() -> None:
    on_cpu = replace(CUDA, device=torch.device("cpu"), dtype=torch.float32)
    interpreted = replace(on_cpu, is_interpreted=True)
    for setting, asked, expected in (
        (CUDA, "auto", "triton"),
        (replace(CUDA, dtype=torch.float32), "triton", "triton"),
        (on_cpu, "auto", "native"),
        (replace(on_cpu, dtype=torch.float64), "native", "native"),
        (interpreted, "auto", "native"),
        (interpreted, "triton", "triton"),
    ):
        assert choose_attention(asked, setting, lambda name: None) == expected


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        ("auto", {"dtype": torch.float64}, "attention='triton' computes in float32, so dtype='float64' .* bits"),
        ("flash_attn", {}, "attention='flash_attn' gives a row other bits in another batch"),
        ("sdpa", {}, "attention='sdpa' gives a row other bits in another batch"),
        ("native", {}, "attention='native' runs on a CPU, not on cuda"),
        ("auto", {"capability": (7, 5)}, r"attention='triton' needs compute capability 8.0 \(Ampere\), .* has 7.5"),
        ("auto", {"head_dim": 288}, "attention='triton' takes heads of up to 256, the model's are of head_dim=288"),
        ("auto", {"device": torch.device("mps")}, "attention='triton' needs a CUDA device, not mps"),
        ("triton", {"device": torch.device("cpu")}, "attention='triton' needs a CUDA device, not cpu"),
    ],
)
def test_what_cannot_give_the_same_bits(asked: Any, changes: dict[str, Any], message: str) -> None:
    said = f"^EngineConfig.batch_invariant=True: {message}; change that, or set batch_invariant=False$"
    with pytest.raises(ValueError, match=said):
        choose_attention(asked, replace(CUDA, **changes), lambda name: None)


def test_without_triton_there_is_no_other_way() -> None:
    with pytest.raises(ValueError, match="batch_invariant=True: attention='triton' cannot be imported; change that"):
        choose_attention("auto", CUDA, lambda name: "cannot be imported" if name == "triton" else None)


COMPILE = """
import itertools

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from engines.models import triton_operations, triton_products

def build(capability, dtype, kernel, constants, num_warps=4, num_stages=3):
    names = kernel.arg_names
    types = {"eps": "fp32", "num_rows": "i32", "slots": "*i64"}
    signature = {name: "constexpr" if name in constants else types.get(name, f"*{dtype}") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)

for capability, dtype in itertools.product((80, 90), ("bf16", "fp32")):
    for outputs, inputs in ((6144, 4096), (32000, 4096), (131, 100)):
        tile = triton_products.choose_product_tile(outputs, {"bf16": 2, "fp32": 4}[dtype])
        constants = triton_products.constants(outputs, inputs, torch.empty(0), tile)
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        built = build(capability, dtype, triton_products._project, constants, **options)
        assert built.metadata.shared <= 99 * 1024, (outputs, dtype, built.metadata.shared)
        on_tensor_cores = any(name in built.asm["ptx"] for name in ("mma.sync", "wgmma", "tcgen05"))
        assert on_tensor_cores == (dtype == "bf16"), (outputs, dtype)
        assert "tf32" not in built.asm["ptx"]
    for adds in (False, True):
        norm = dict(SIZE=4100, PADDED=8192, ADDS=adds)
        build(capability, dtype, triton_operations._rms_norm, norm, triton_operations.norm_warps(8192))
        heads = dict(NUM_HEADS=32, KV_HEADS=8, HALF=64, PADDED_HALF=64, HEADS=8, HAS_NORMS=adds)
        build(capability, dtype, triton_operations._rotate_and_store, heads)
    build(capability, dtype, triton_operations._silu_mul, dict(SIZE=14336, COLUMNS=1024))
"""


def test_compiles_without_a_gpu(tmp_path: Path) -> None:
    """As `test_triton.test_compiles_without_a_gpu`: bfloat16 on tensor cores, float32 in full precision."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
