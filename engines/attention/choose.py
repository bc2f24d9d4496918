"""Chooses the attention backend: a pure decision on its name, and the backend of that name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from engines.attention import sdpa
from engines.attention.batch import ForwardBatch
from engines.attention.flash_attn import FlashAttention
from engines.attention.native import NativeAttention
from engines.config import Attention, EngineConfig, ModelConfig
from engines.native.library import choose_library

Plan = TypeVar("Plan")
HALVES = (torch.bfloat16, torch.float16)


class AttentionBackend(Protocol[Plan]):
    """Causal grouped-query attention of a batch's new tokens over the paged cache."""

    capturable: bool
    """Whether a plan of decodes, made from static memory, may be captured in a CUDA graph."""

    def plan(self, batch: ForwardBatch, block_size: int) -> Plan:
        """Called once per forward pass: returns all that is the same for every layer."""

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan) -> Tensor:
        """Called once per layer; see `sdpa.attention`."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that decides whether an attention backend can run."""

    device: torch.device
    capability: tuple[int, int]
    """Compute capability of a CUDA device; (0, 0) for others."""
    dtype: torch.dtype
    head_dim: int
    block_size: int
    is_interpreted: bool = False
    """Whether Triton's kernels run in its interpreter, and so on a CPU."""
    batch_invariant: bool = False
    """Whether a row must have the same bits in any batch."""


def choose_attention(
    asked: Attention, setting: Setting, without: Callable[[str], str | None], *, allow_native: bool = True
) -> str:
    """Returns the name of the backend to run. `without(name)` returns why a backend is not available on this machine,
    None if it is; it is called only for backends that support the setting.

    "auto" takes the fastest: flash_attn, triton, sdpa on CUDA, native, sdpa on a CPU. With `batch_invariant` only
    native is possible. Raises ValueError when that backend, or the one named by `asked`, is not available or does not
    support the setting.
    """
    if asked != "auto" or setting.batch_invariant:
        name = "native" if setting.batch_invariant else asked
        reason = refusal(name, setting) or without(name)
        if reason is None:
            return name
        if setting.batch_invariant:
            why = reason.removesuffix("; use 'sdpa'")
            raise ValueError(
                f"EngineConfig.batch_invariant=True: needs attention='native', which {why}; set batch_invariant=False"
            )
        raise ValueError(f"EngineConfig.attention={asked!r}: {reason}")
    on_cuda = ("flash_attn",) if setting.is_interpreted else ("flash_attn", "triton")
    fast = {"cuda": on_cuda, "cpu": ("native",) if allow_native else ()}.get(setting.device.type, ())
    return next((name for name in fast if refusal(name, setting) is None and without(name) is None), "sdpa")


def refusal(name: str, setting: Setting) -> str | None:
    """Returns why a backend does not support the setting, and what to do; None if it does."""
    dtype = str(setting.dtype).removeprefix("torch.")
    match name:
        case "native" if setting.device.type != "cpu":
            return f"runs on a CPU, not on {setting.device.type}; use 'sdpa'"
        case "triton" if setting.dtype not in (*HALVES, torch.float32):
            return f"computes in float32, so dtype={dtype!r} would lose bits; use 'sdpa'"
        case "triton" if setting.is_interpreted and setting.dtype is torch.bfloat16:
            return f"Triton's interpreter cannot multiply in dtype={dtype!r}; set 'float32', or unset TRITON_INTERPRET"
        case "triton" if setting.is_interpreted:
            return _head_size_refusal(setting, multiple=1)
        case "triton":
            return _gpu_refusal(setting) or _head_size_refusal(setting, multiple=1)
        case "flash_attn" if setting.dtype not in HALVES:
            return f"takes bfloat16, not dtype={dtype!r}; use 'triton' or 'sdpa'"
        case "flash_attn" if setting.block_size % 256:
            return f"takes blocks of multiples of 256 tokens, not block_size={setting.block_size}; set block_size=256"
        case "flash_attn":
            return _gpu_refusal(setting) or _head_size_refusal(setting, multiple=8)
    return None


def _gpu_refusal(setting: Setting) -> str | None:
    if setting.device.type != "cuda":
        return f"needs a CUDA device, not {setting.device.type}; use 'sdpa'"
    if setting.capability < (8, 0):
        major, minor = setting.capability
        return f"needs compute capability 8.0 (Ampere), this device has {major}.{minor}; use 'sdpa'"
    return None


def _head_size_refusal(setting: Setting, multiple: int) -> str | None:
    if setting.head_dim % multiple or setting.head_dim > 256:
        sizes = f"multiples of {multiple} up to 256" if multiple > 1 else "up to 256"
        return f"takes heads of {sizes}, the model's are of head_dim={setting.head_dim}; use 'sdpa'"
    return None


@dataclass(frozen=True, kw_only=True)
class ChosenAttention:
    name: str
    backend: AttentionBackend[Any]


def setting_of(config: EngineConfig, shard: ModelConfig, device: torch.device) -> Setting:
    """Returns the setting of a shard with these sizes."""
    return Setting(
        device=device,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
        dtype=getattr(torch, config.dtype),
        head_dim=shard.head_dim,
        block_size=config.block_size,
        is_interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        batch_invariant=config.batch_invariant,
    )


def choose_backend(config: EngineConfig, shard: ModelConfig, device: torch.device) -> ChosenAttention:
    """Chooses and makes the backend for a shard with these sizes. Raises ValueError as `choose_attention` does."""
    setting = setting_of(config, shard, device)

    def without(name: str) -> str | None:
        if name == "native":
            library = choose_library("auto", setting.dtype, device)
            return None if library is not None else "needs a C++ compiler, see the log; use 'sdpa'"
        return why_not_importable(name) if name != "sdpa" else None

    name = choose_attention(config.attention, setting, without, allow_native=config.kernels != "torch")
    return ChosenAttention(name=name, backend=_make(name, shard, setting))


def _make(name: str, shard: ModelConfig, setting: Setting) -> AttentionBackend[Any]:
    if name == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        return FlashAttention(flash_attn_varlen_func)
    if name == "triton":
        from engines.attention.triton import TritonAttention

        sizes = {"num_heads": shard.num_heads, "num_kv_heads": shard.num_kv_heads, "head_dim": shard.head_dim}
        return TritonAttention(**sizes, dtype=setting.dtype, device=setting.device)
    if name == "native":
        library = choose_library("auto", setting.dtype, setting.device)
        assert library is not None
        return NativeAttention(library)
    return sdpa


def why_not_importable(name: str) -> str | None:
    """Returns the error of importing an optional package, and what to do; None when it can be imported."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a package built for another torch may raise anything
        return f"cannot be imported ({error}); `pip install {name.replace('_', '-')}`, built for this torch"
    return None
