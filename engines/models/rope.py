"""Rotary position embedding (RoFormer, Su et al. 2021) with the scalings of Llama checkpoints."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Returns float32 [head_dim / 2], in radians per position, as transformers computes them."""
    inv_freq = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.scaling == "linear":
        return inv_freq / config.factor
    if config.scaling == "llama3":
        return _llama3(inv_freq, config)
    return inv_freq


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Stretches long wavelengths by `factor`, keeps short ones, and interpolates between."""
    context = config.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inv_freq / config.factor + smooth * inv_freq


class RotaryTable:
    """Cosines and signed sines of every position, [max_positions, 1, head_dim], for both halves of a head."""

    def __init__(
        self, config: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # MKL picks a function's kernel at its first call in a process. If several threads make that call at once, one
        # of them may run a far less exact kernel (pytorch/pytorch#188792). So one thread makes the first call alone.
        for function in (torch.cos, torch.sin):
            function(torch.zeros(1))
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies(config, head_dim))
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)[:, None]
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)[:, None]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines at positions int64 [T], each [T, 1, head_dim]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, heads, head_dim] with its pairs (i, i + head_dim / 2) rotated: x cos + swapped(x) sin."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
