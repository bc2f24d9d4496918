"""Products of matrices in bfloat16 on a processor without such instructions: by float32 copies."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines import LLM, SamplingParams
from engines.models import projection
from engines.models.projection import copy_dtype, pack_matrix, project
from experiments import launch
from tests.worlds import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "has_bfloat16_products", lambda: False)


@pytest.mark.parametrize("shape", [(48, 33), (512, 768)], ids=["plain", "packed"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_by_a_wider_copy(shape: tuple[int, int], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, shape[1], generator=generator).bfloat16() for size in (17, shape[0]))
    bias = torch.randn(shape[0], generator=generator).bfloat16() if biased else None
    out = project(x, pack_matrix(weight, torch.float32), bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-4)


def test_the_engine_multiplies_in_float32_and_says_so(
    qwen3: str, no_bfloat16: None, capsys: pytest.CaptureFixture[str]
) -> None:
    products: set[torch.dtype] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function.name().split("::")[1] in ("linear", "mm", "addmm", "_linear_pointwise"):
                products.update(value.dtype for value in args if isinstance(value, torch.Tensor))
            return function(*args, **(kwargs or {}))

    llm = LLM(qwen3, device="cpu", dtype="bfloat16", kernels="torch", kv_cache_bytes=2**20)
    with Watch():
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert products == {torch.float32}
    assert llm.product_dtype == "float32" and llm.memory.copies > 0
    launch.tell_engine(llm)
    assert "bfloat16 on cpu (products in float32: this CPU has no bfloat16 instructions)" in capsys.readouterr().err


def test_log_probs_are_near_those_of_float32(qwen3: str, no_bfloat16: None) -> None:
    params = SamplingParams(max_tokens=1, n=8)
    prompts = [list(range(2, 2 + length)) for length in (1, 9, 40)]
    engines = [LLM(qwen3, device="cpu", dtype=dtype, kv_cache_bytes=2**20) for dtype in ("bfloat16", "float32")]
    mine, exact = (
        [(one.token_ids, one.logprobs) for output in llm.generate(prompts, params) for one in output.outputs]
        for llm in engines
    )
    same = [(one[1][0], other[1][0]) for one, other in zip(mine, exact, strict=True) if one[0] == other[0]]
    assert len(same) > len(mine) // 2
    assert all(abs(one - other) < 0.1 for one, other in same)


def test_where_there_is_nothing_to_copy() -> None:
    assert copy_dtype(torch.float64, CPU) is None and copy_dtype(torch.bfloat16, torch.device("cuda")) is None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variable names an x86-64 processor")
def test_the_matrix_library_is_asked_what_the_processor_has() -> None:
    program = "import torch; from engines.models.projection import copy_dtype as c;"
    program += "print(*(c(d, torch.device('cpu')) for d in (torch.bfloat16, torch.float32)))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.split() == ["torch.float32", "torch.float32"]
