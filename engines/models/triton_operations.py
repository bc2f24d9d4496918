"""The decoder's small operations on a GPU, in Triton: one launch where torch needs up to nine. They round where
`TorchOperations` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
"""Heads of a token that one program rotates."""
_COLUMNS = 1024
"""Outputs of a row that one program activates."""


class TritonOperations:
    """As `TorchOperations`, for dtypes of at most float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        (rows, size), out = x.shape, torch.empty_like(x)
        padded = triton.next_power_of_2(size)
        with torch.cuda.device_of(x):  # Triton launches on the current device
            _rms_norm[(rows,)](
                *(x, x if residual is None else residual, weight, out, eps),
                SIZE=size,
                PADDED=padded,
                ADDS=residual is not None,
                num_warps=max(1, min(8, padded // 512)),
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, size))
        with torch.cuda.device_of(out):
            _silu_mul[(rows, triton.cdiv(size, _COLUMNS))](gate_up, out, SIZE=size, COLUMNS=_COLUMNS)
        return out

    def rotate_and_store(
        self,
        heads: Tensor,
        norms: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        eps: float,
    ) -> Tensor:
        num_tokens, num_all, dim = heads.shape
        num_kv_heads = keys.shape[2]
        num_heads = num_all - 2 * num_kv_heads
        q = heads.new_empty((num_tokens, num_heads, dim))
        with torch.cuda.device_of(heads):
            _rotate_and_store[(num_tokens, triton.cdiv(num_all, _HEADS))](
                *(heads, heads if norms is None else norms, *rotary, slots, q, keys, values, eps),
                NUM_HEADS=num_heads,
                KV_HEADS=num_kv_heads,
                HALF=dim // 2,
                PADDED_HALF=triton.next_power_of_2(dim // 2),
                HEADS=_HEADS,
                HAS_NORMS=norms is not None,
            )
        return q


@triton.jit
def _rms_norm(x, residual, weight, out, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    """Of a row; with ADDS of its sum with the residual, which becomes that sum."""
    columns = tl.arange(0, PADDED)
    is_column = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(x + places, mask=is_column, other=0.0)
    if ADDS:
        before = tl.load(residual + places, mask=is_column, other=0.0)
        row = (before.to(tl.float32) + row.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(residual + places, row, mask=is_column)
    wide = row.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(x.dtype.element_ty)
    scale = tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(out + places, normed.to(tl.float32) * scale.to(tl.float32), mask=is_column)


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE
    gate = tl.load(gate_up + 2 * row + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row + columns, silu.to(tl.float32) * up, mask=is_column)


@triton.jit
def _rotate_and_store(
    heads, norms, cos, sin, slots, q, keys, values, eps,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """A token's next HEADS heads, each in two halves: the two numbers of a rotation lie at the same place of both."""
    dtype: tl.constexpr = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_HALF)
    is_dim = (dims < HALF)[None, :]
    is_query = head < NUM_HEADS
    is_there = (head < NUM_HEADS + 2 * KV_HEADS)[:, None] & is_dim
    places = (token * (NUM_HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(heads + places, mask=is_there, other=0.0)
    high = tl.load(heads + places + HALF, mask=is_there, other=0.0)

    angles = token * (2 * HALF) + dims
    low_cos = tl.load(cos + angles, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cos + angles + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sin + angles, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sin + angles + HALF, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]

    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        mean = tl.sum(wide_low * wide_low + wide_high * wide_high, 1) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        weights = norms + tl.where(is_query, 0, 2 * HALF)[:, None] + dims[None, :]
        low_weight = tl.load(weights, mask=is_there, other=0.0).to(tl.float32)
        high_weight = tl.load(weights + HALF, mask=is_there, other=0.0).to(tl.float32)
        # Each step is rounded to the dtype, as torch's own is.
        wide_low = ((wide_low * scale).to(dtype).to(tl.float32) * low_weight).to(dtype).to(tl.float32)
        wide_high = ((wide_high * scale).to(dtype).to(tl.float32) * high_weight).to(dtype).to(tl.float32)
    new_low = tl.fma(wide_high, low_sin, (wide_low * low_cos).to(dtype).to(tl.float32))
    new_high = tl.fma(wide_low, high_sin, (wide_high * high_cos).to(dtype).to(tl.float32))

    q_places = (token * NUM_HEADS + head)[:, None] * (2 * HALF) + dims[None, :]
    to_q = is_query[:, None] & is_dim
    tl.store(q + q_places, new_low, mask=to_q)
    tl.store(q + q_places + HALF, new_high, mask=to_q)

    slot = tl.load(slots + token)
    key_places = (slot * KV_HEADS + head - NUM_HEADS)[:, None] * (2 * HALF) + dims[None, :]
    to_key = ((head >= NUM_HEADS) & (head < NUM_HEADS + KV_HEADS))[:, None] & is_dim
    tl.store(keys + key_places, new_low, mask=to_key)
    tl.store(keys + key_places + HALF, new_high, mask=to_key)

    value_places = key_places - KV_HEADS * (2 * HALF)
    to_value = is_there & (head >= NUM_HEADS + KV_HEADS)[:, None]
    tl.store(values + value_places, low, mask=to_value)
    tl.store(values + value_places + HALF, high, mask=to_value)
