"""Counter-based Gumbel noise: a pure function of (sequence key, position, token id), on any device.

The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Each
(key, position) seeds its own stream, which token ids index: no state is stored, and the noise of any subset of the
vocabulary can be computed alone. In plain torch it costs a third of Philox-4x32-10, whose 32 x 32 -> 64 bit
products take four int64 operations each.
"""

from __future__ import annotations

import torch
from torch import Tensor

# int64 arithmetic wraps modulo 2^64, so these are the generator's unsigned constants, reinterpreted.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    """In-place `x ^= x >>> bits`; torch's own shift is arithmetic, hence the mask."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def mix64_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: int64 of any shape to well-mixed int64."""
    _xor_shift_(x, 30).mul_(_MIX_1)
    _xor_shift_(x, 27).mul_(_MIX_2)
    return _xor_shift_(x, 31)


def splitmix64(seeds: Tensor, counters: Tensor) -> Tensor:
    """Returns output number `counters` (from 1) of the generators seeded with `seeds`; int64, broadcast together."""
    return mix64_(seeds + counters * GOLDEN_GAMMA)


def stream_seeds(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns the seed of each (key, position)'s stream, int64 [N]. Mixing keeps streams from being shifted copies."""
    return splitmix64(keys, positions + 1)


def _gumbel_from_bits(bits_32: Tensor) -> Tensor:
    """Returns float64 Gumbel noise for int32 of any shape, each read as b + 2^31 in [0, 2^32)."""
    # (b + 2^31 + 1/2) / 2^32 is never 0 or 1; -log(-log(u)) then lies in [-3.13, 22.88].
    uniform = bits_32.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Returns standard Gumbel noise for the whole vocabulary, float64 [N, vocab_size].

    keys, positions: int64 [N]. Entry v is the same number as that of `gumbel_at` for token v.
    """
    num_pairs = (vocab_size + 1) // 2
    counters = torch.arange(1, num_pairs + 1, device=keys.device)
    bits = splitmix64(stream_seeds(keys, positions)[:, None], counters[None, :])
    return _gumbel_from_bits(bits.view(torch.int32)[:, :vocab_size])  # low half first: little-endian


def gumbel_at(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Returns the same noise for single tokens, float64 [N]. keys, positions, tokens: int64 [N]."""
    bits = splitmix64(stream_seeds(keys, positions), (tokens >> 1) + 1)
    return _gumbel_from_bits((bits >> ((tokens & 1) << 5)).to(torch.int32))
