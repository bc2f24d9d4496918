"""The draw in Triton: one pass over the logits, nothing of the vocabulary's size written.

A program takes PART tokens of one row: their highest logit, the sum of exponentials relative to it, and the best score
of logit + Gumbel noise with its token. A second kernel merges the parts of a row. Parts begin at multiples of PART and
kernels are compiled for the vocabulary alone, never for number, stride or place of the rows, so that the order of every
sum is the same for a row in any batch.

Float64 logarithms are slow on most GPUs, and noise takes two. So each token's noise is bounded in float32 first, and
computed one token after the other, the highest bound first, while a bound reaches the best score: 1.0 to 1.2 times a
part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Tokens of a row that one program takes."""


def draw_in_triton(logits: Tensor, keys: Tensor, positions: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """As `sampler.Draw`. logits: bfloat16, float16 or float32. Asks nothing of the device.

    Its tokens are those of `engines.noise` but where two scores agree in all digits but those in which float64
    logarithms of two libraries differ.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    tops, sums = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    scores = torch.empty((rows, parts), dtype=torch.float64, device=logits.device)
    best = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    temperatures = temperatures.contiguous()
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _draw_parts[(rows * parts,)](
            *(logits, keys.contiguous(), positions.contiguous(), temperatures, tops, sums, scores, best),
            logits.stride(0),
            VOCABULARY=vocabulary,
            PAIRS=PART // 2,
            num_warps=4,
        )
        _merge_parts[(rows,)](
            *(logits, temperatures, tops, sums, scores, best, tokens, logprobs),
            logits.stride(0),
            VOCABULARY=vocabulary,
            PARTS=parts,
            PADDED_PARTS=triton.next_power_of_2(parts),
            num_warps=1,
        )
    return tokens, logprobs


# -- kernels. One is compiled for all addresses and strides: another might spread a sum over other threads.

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
def _pair_bits(seed, pairs):
    """uint32, as unsigned noise goes by them: of the even and of the odd token of each pair (see `engines.noise`)."""
    both = _mix64(seed + (pairs + 1).to(tl.uint64) * _GOLDEN_GAMMA)
    return both.to(tl.uint32) ^ 0x80000000, (both >> 32).to(tl.uint32) ^ 0x80000000


@triton.jit
def _most_gumbel(bits):
    """float32, no less than the noise of these bits, and by 0.06 more at most where that is high.

    -log(-log u) <= -log(1 - u); a float's pattern is a lower bound of its logarithm, linear between powers of two. 1e-4
    is more than what float32 rounds away, here and where a bounded score is in reach.
    """
    rest = (0xFFFFFFFF - bits).to(tl.float32) + 0.5  # (1 - u) 2^32
    return 110.21040173 + 1e-4 - rest.to(tl.int32, bitcast=True).to(tl.float32) * 8.26295829e-8


@triton.jit
def _gumbel(bits):
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _scaled(logits, tokens, divisor, VOCABULARY: tl.constexpr):
    """Minus infinity beyond the vocabulary. Correctly rounded, as torch divides."""
    some = tl.load(logits + tokens, mask=tokens < VOCABULARY, other=_NOTHING)
    return tl.div_rn(some.to(tl.float32), divisor)


@triton.jit
def _divisor(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0.0, 1.0, temperature).to(tl.float32), temperature == 0.0


_DRAWN_OF = ("logits", "keys", "positions", "temperatures", "tops", "sums", "scores", "best")
_MERGED_OF = ("logits", "temperatures", "tops", "sums", "scores", "best", "tokens", "logprobs")


@triton.jit(do_not_specialize=("stride",), do_not_specialize_on_alignment=_DRAWN_OF)
def _draw_parts(
    logits, keys, positions, temperatures, tops, sums, scores, best, stride,
    VOCABULARY: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A part's tokens are even and odd ones, since two neighbours share a random number.

    The best of a part without any finite logit is -inf. A NaN or +inf makes the sum NaN.
    """
    parts: tl.constexpr = (VOCABULARY + 2 * PAIRS - 1) // (2 * PAIRS)
    place = tl.program_id(0)
    row = (place // parts).to(tl.int64)
    of_row = logits + row * stride
    divisor, is_greedy = _divisor(temperatures, row)
    pairs = place % parts * PAIRS + tl.arange(0, PAIRS)
    even, odd = 2 * pairs, 2 * pairs + 1
    x_even = _scaled(of_row, even, divisor, VOCABULARY)
    x_odd = _scaled(of_row, odd, divisor, VOCABULARY)
    top = tl.max(tl.maximum(x_even, x_odd), 0)
    token = tl.min(tl.where(x_even == top, even, tl.where(x_odd == top, odd, VOCABULARY - 1)), 0)
    finite = tl.where(top == _NOTHING, 0.0, top)
    x_even -= finite
    x_odd -= finite
    tl.store(tops + place, top)
    tl.store(sums + place, tl.sum(tl.exp(x_even) + tl.exp(x_odd), 0))

    score = top.to(tl.float64)
    if not is_greedy:
        score = tl.full([], _NOTHING, tl.float64)
        seed = _mix64(tl.load(keys + row).to(tl.uint64) + (tl.load(positions + row) + 1).to(tl.uint64) * _GOLDEN_GAMMA)
        even_bits, odd_bits = _pair_bits(seed, pairs)
        x_even += _most_gumbel(even_bits)
        x_odd += _most_gumbel(odd_bits)
        # Scores are rounded to float64 at the logits' own magnitude.
        rounding = tl.abs(finite) * 4.440892098500626e-16
        highest = tl.max(tl.maximum(x_even, x_odd), 0)
        in_reach = highest > _NOTHING
        while in_reach:  # each turn takes a token out
            at = tl.min(tl.where(x_even == highest, even, tl.where(x_odd == highest, odd, VOCABULARY - 1)), 0)
            low, high = _pair_bits(seed, at // 2)
            exact = _scaled(of_row, at, divisor, VOCABULARY).to(tl.float64) + _gumbel(tl.where(at % 2 == 0, low, high))
            is_better = (exact > score) | ((exact == score) & (at < token))
            token = tl.where(is_better, at, token)
            score = tl.where(is_better, exact, score)
            x_even = tl.where(even == at, _NOTHING, x_even)
            x_odd = tl.where(odd == at, _NOTHING, x_odd)
            highest = tl.max(tl.maximum(x_even, x_odd), 0)
            in_reach = (highest > _NOTHING) & (highest + rounding >= (score - finite.to(tl.float64)).to(tl.float32))
    tl.store(scores + place, score)
    tl.store(best + place, token)


@triton.jit(do_not_specialize=("stride",), do_not_specialize_on_alignment=_MERGED_OF)
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
    # A row of NaN has no best: its log-prob tells.
    token = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), of_part, VOCABULARY), 0), VOCABULARY - 1)
    part_tops = tl.load(tops + places, mask=is_part, other=_NOTHING).to(tl.float64)
    top = tl.max(part_tops, 0)
    part_sums = tl.load(sums + places, mask=is_part, other=0.0).to(tl.float64)
    total = tl.sum(part_sums * tl.exp(part_tops - top), 0)
    divisor, _ = _divisor(temperatures, row)
    chosen = _scaled(logits + row * stride, token, divisor, VOCABULARY).to(tl.float64)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, (chosen - top - tl.log(total)).to(tl.float32))
