"""Which attention runs, by table; and what is said where one cannot."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM
from engines.attention.choose import Setting, choose_attention, refusal, why_not_importable
from engines.config import Kernels
from engines.models.kernels import choose_kernels
from engines.native.library import choose_library

H200 = Setting(
    device=torch.device("cuda"), capability=(9, 0), dtype=torch.bfloat16, head_dim=128, block_size=256
)  # fmt: skip
CPU = replace(H200, device=torch.device("cpu"), capability=(0, 0), dtype=torch.float32, block_size=16)
WHOLE = {"flash_attn", "triton", "native"}
"""What a machine has."""


def choose(setting: Setting, has: set[str], **options: Any) -> str:
    return choose_attention("auto", setting, lambda name: None if name in has else "absent", **options)


@pytest.mark.parametrize(
    ("changes", "has", "expected"),
    [
        ({}, WHOLE, "flash_attn"),
        ({"block_size": 512}, WHOLE, "flash_attn"),
        ({"block_size": 16}, WHOLE, "triton"),
        ({"head_dim": 250}, WHOLE, "triton"),
        ({"head_dim": 264}, WHOLE, "sdpa"),
        ({"dtype": torch.float32}, WHOLE, "triton"),
        ({"dtype": torch.float64}, WHOLE, "sdpa"),
        ({"capability": (7, 5)}, WHOLE, "sdpa"),
        ({"capability": (8, 0)}, WHOLE, "flash_attn"),
        ({"capability": (12, 0)}, WHOLE, "flash_attn"),
        ({}, {"triton", "native"}, "triton"),
        ({}, {"flash_attn"}, "flash_attn"),
        ({"block_size": 16}, {"flash_attn"}, "sdpa"),
        ({}, set(), "sdpa"),
        ({"is_interpreted": True, "block_size": 16}, WHOLE, "sdpa"),
        ({"device": torch.device("mps")}, WHOLE, "sdpa"),
    ],
)
def test_on_gpus(changes: dict[str, Any], has: set[str], expected: str) -> None:
    assert choose(replace(H200, **changes), has) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_cpus(dtype: torch.dtype) -> None:
    setting = replace(CPU, dtype=dtype)
    assert choose(setting, WHOLE) == "native"
    assert choose(setting, {"triton"}) == "sdpa"
    assert choose(replace(setting, is_interpreted=True), {"triton"}) == "sdpa"
    assert choose(setting, WHOLE, allow_native=False) == "sdpa"
    assert choose_attention("native", setting, lambda name: None, allow_native=False) == "native"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "flash_attn",
            {"block_size": 16},
            "takes blocks of multiples of 256 tokens, not block_size=16; set block_size",
        ),
        ("flash_attn", {"dtype": torch.float32}, "takes bfloat16, not dtype='float32'; use 'triton' or 'sdpa'"),
        ("flash_attn", {"dtype": torch.float64}, "takes bfloat16, not dtype='float64'; use"),
        (
            "flash_attn",
            {"head_dim": 100},
            "takes heads of multiples of 8 up to 256, the model's are of head_dim=100; use",
        ),
        ("flash_attn", {"device": torch.device("cpu")}, "needs a CUDA device, not cpu; use 'sdpa'"),
        ("triton", {"dtype": torch.float64}, "computes in float32, so dtype='float64' would lose bits; use 'sdpa'"),
        ("triton", {"head_dim": 288}, "takes heads of up to 256, the model's are of head_dim=288; use 'sdpa'"),
        ("triton", {"capability": (7, 5)}, r"needs compute capability 8.0 \(Ampere\), this device has 7.5; use 'sdpa'"),
        ("triton", {"device": torch.device("cpu")}, "needs a CUDA device, not cpu; use 'sdpa'"),
        (
            "triton",
            {"is_interpreted": True},
            "interpreter cannot multiply in dtype='bfloat16'; set 'float32', or unset",
        ),
        ("native", {}, "runs on a CPU, not on cuda; use 'sdpa'"),
    ],
)
def test_what_one_cannot_take(name: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^EngineConfig.attention='{name}': .*{message}"):
        choose_attention(name, replace(H200, **changes), lambda name: None)
    assert refusal("sdpa", replace(H200, **changes)) is None


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    reason = why_not_importable("flash_attn")
    assert reason is not None and "cannot be imported" in reason and "`pip install flash-attn`" in reason
    with pytest.raises(ValueError, match=r"EngineConfig.attention='flash_attn': cannot be imported \(.*\); `pip"):
        choose_attention("flash_attn", H200, why_not_importable)
    (tmp_path / "triton.py").write_text("raise OSError('libcuda.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert choose_attention("auto", H200, why_not_importable) == "sdpa", "a broken package is an absent one"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "flash"}, r"EngineConfig.attention='flash': must be one of \['auto', 'flash_attn', 'triton', "),
        ({"attention": "triton", "dtype": "float64"}, "attention='triton': computes in float32, so dtype='float64'"),
        (
            {"attention": "flash_attn", "dtype": "float64"},
            "attention='flash_attn': takes bfloat16, not dtype='float64'",
        ),
        (
            {"attention": "flash_attn", "dtype": "bfloat16"},
            "takes blocks of multiples of 256 tokens, not block_size=16",
        ),
        (
            {"attention": "flash_attn", "dtype": "bfloat16", "block_size": 256, "kv_cache_bytes": 2**20},
            "attention='flash_attn': needs a CUDA device, not cpu",
        ),
    ],
)
def test_the_engine_refuses_by_name(qwen3: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(qwen3, device="cpu", **{"kv_cache_bytes": 2**24, **options})


def test_the_engine_tells_what_runs(qwen3: str) -> None:
    native = choose_library("auto", torch.float32, torch.device("cpu")) is not None
    for options, expected in (
        ({}, "native" if native else "sdpa"),
        ({"kernels": "torch"}, "sdpa"),
        ({"attention": "sdpa"}, "sdpa"),
        *([({"attention": "native", "kernels": "torch"}, "native")] if native else []),
    ):
        llm = LLM(qwen3, device="cpu", kv_cache_bytes=2**20, **options)
        assert llm.attention == expected
        assert llm.generate([[5, 6]])[0].outputs[0].token_ids
        assert llm.kernels == ("native" if native and options.get("kernels") != "torch" else "torch")


def test_native_attention_needs_a_compiler(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.native.library._build", lambda: None)
    with pytest.raises(ValueError, match=r"attention='native': needs a C\+\+ compiler, see the log; use"):
        LLM(qwen3, device="cpu", kv_cache_bytes=2**20, attention="native")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_batch_are_native_attention_s(dtype: torch.dtype) -> None:
    setting = replace(CPU, dtype=dtype, batch_invariant=True)
    assert choose(setting, WHOLE) == choose(setting, WHOLE, allow_native=False) == "native"
    for other in (replace(H200, dtype=dtype, batch_invariant=True), replace(setting, device=torch.device("mps"))):
        said = rf"needs attention='native', which runs on a CPU, not on {other.device.type}; set batch_invariant=False$"
        with pytest.raises(ValueError, match=rf"^EngineConfig.batch_invariant=True: {said}"):
            choose(other, WHOLE)


def test_kernels_that_cannot_be_had() -> None:
    assert choose_library("auto", torch.bfloat16, H200.device) is None
    with pytest.raises(ValueError, match=r"EngineConfig.kernels='native': cannot be had on cuda here"):
        choose_library("native", torch.bfloat16, H200.device)
    with pytest.raises(ValueError, match=r"EngineConfig.kernels='triton': needs a CUDA device, not cpu; use 'torch'"):
        choose_kernels("triton", CPU)


@pytest.mark.parametrize(
    ("asked", "setting", "name"),
    [
        ("auto", H200, "triton"),
        ("triton", H200, "triton"),
        ("torch", H200, "torch"),
        ("auto", replace(H200, dtype=torch.float64), "torch"),
        ("auto", replace(H200, capability=(7, 5)), "torch"),
        ("torch", CPU, "torch"),
    ],
)
def test_kernels(asked: Kernels, setting: Setting, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    chosen = choose_kernels(asked, setting)
    assert chosen.name == name and (chosen.draw is None) == (name == "torch")
