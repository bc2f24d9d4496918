"""The draw on a GPU, in Triton: one pass over the logits, and nothing of the vocabulary's size is written.

A program takes the tokens of a part of one row: their highest logit, the sum of exponentials relative to it, and the
best score of logit + Gumbel noise with its token. A second kernel merges the parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 2048
"""Tokens of a row that one program takes."""


def draw_in_triton(logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """A `sampler.Draw` for logits in bfloat16, float16 or float32. The host does not wait for the device.

    Its tokens are those of `engines.sampling.noise`, except where two scores differ only in the digits in which the
    float64 logarithms of two libraries differ.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    tops, sums = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    scores = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    best = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    parts_of = {"VOCABULARY": vocabulary, "PARTS": parts}
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _draw_parts[(rows, parts)](
            *(logits, keys, positions, temperatures, tops, sums, scores, best, logits.stride(0)),
            **parts_of,
            PAIRS=PART // 2,
            num_warps=8,
        )
        _merge_parts[(rows,)](
            *(logits, temperatures, tops, sums, scores, best, tokens, logprobs, logits.stride(0)),
            **parts_of,
            PADDED_PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
    return tokens, logprobs


# -- kernels

_GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _gumbel(bits):
    """Float64 noise of uint32 bits, which `engines.sampling.noise` reads as int32."""
    return -tl.log(-tl.log(((bits ^ 0x80000000).to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _scaled(logits, tokens, divisor, VOCABULARY: tl.constexpr):
    """Minus infinity beyond the vocabulary. Correctly rounded, as torch divides."""
    some = tl.load(logits + tokens, mask=tokens < VOCABULARY, other=_NOTHING)
    return tl.div_rn(some.to(tl.float32), divisor)


@triton.jit
def _divisor(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0.0, 1.0, temperature).to(tl.float32), temperature == 0.0


@triton.jit(do_not_specialize=("stride",))
def _draw_parts(
    logits, keys, positions, temperatures, tops, sums, scores, best, stride,
    VOCABULARY: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A part's tokens are even and odd ones, because two neighbours share a random number. A NaN or an infinity makes
    the sum NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    place = row * PARTS + tl.program_id(1)
    divisor, is_greedy = _divisor(temperatures, row)
    pairs = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    even, odd = 2 * pairs, 2 * pairs + 1
    x_even = _scaled(logits + row * stride, even, divisor, VOCABULARY)
    x_odd = _scaled(logits + row * stride, odd, divisor, VOCABULARY)
    top = tl.max(tl.maximum(x_even, x_odd), 0)
    finite = tl.where(top == _NOTHING, 0.0, top)
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(x_even - finite) + tl.exp(x_odd - finite), 0))

    seed = _mix64(tl.load(keys + row).to(tl.uint64) + (tl.load(positions + row) + 1).to(tl.uint64) * _GOLDEN_GAMMA)
    bits = _mix64(seed + (pairs + 1).to(tl.uint64) * _GOLDEN_GAMMA)
    score_even = x_even.to(tl.float64) + tl.where(is_greedy, 0.0, _gumbel(bits.to(tl.uint32)))
    score_odd = x_odd.to(tl.float64) + tl.where(is_greedy, 0.0, _gumbel((bits >> 32).to(tl.uint32)))
    score = tl.max(tl.maximum(score_even, score_odd), 0)
    token = tl.min(tl.where(score_even == score, even, tl.where(score_odd == score, odd, VOCABULARY)), 0)
    tl.store(scores + place, score)
    tl.store(best + place, token)


@triton.jit(do_not_specialize=("stride",))
def _merge_parts(
    logits, temperatures, tops, sums, scores, best, tokens, logprobs, stride,
    VOCABULARY: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PADDED_PARTS)
    is_part = parts < PARTS
    places = row * PARTS + parts
    score = tl.load(scores + places, mask=is_part, other=_NOTHING)
    of_part = tl.load(best + places, mask=is_part, other=VOCABULARY)
    # A row of NaN has no best token; its log-prob is NaN.
    token = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), of_part, VOCABULARY), 0), VOCABULARY - 1)
    part_tops = tl.load(tops + places, mask=is_part, other=_NOTHING).to(tl.float64)
    top = tl.max(part_tops, 0)
    part_sums = tl.load(sums + places, mask=is_part, other=0.0).to(tl.float64)
    total = tl.sum(part_sums * tl.exp(part_tops - top), 0)
    divisor, _ = _divisor(temperatures, row)
    chosen = _scaled(logits + row * stride, token, divisor, VOCABULARY).to(tl.float64)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (chosen - top - tl.log(total)).to(tl.float32))
