"""Checksums of weights over logical elements: the same for the same weights, however they are fused or sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engines.noise import GOLDEN_GAMMA, mix64_

_CHUNK = 1 << 15  # elements: what is written for them stays in the second-level cache
_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_parts(parts: Iterable[tuple[str, Tensor, torch.Size, tuple[slice, ...]]]) -> int:
    """Sum modulo 2^64 of each element's bits times a key, a hash of (name, index in the logical tensor).

    A sum, so that shards can be added up in any order; with keys, so that swapped elements or names show (multilinear
    hashing, Carter and Wegman 1979). Each item is a logical parameter's name, the part of it that is held, the whole's
    shape, and where in the whole the part is.
    """
    total = 0
    for name, part, shape, where in parts:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        num_columns = shape[1] if len(shape) > 1 else 1
        rows, columns = _starts(where)
        matrix = part.reshape(len(part), -1).view(_BIT_TYPES[part.element_size()])
        step = max(1, _CHUNK // matrix.shape[1])
        for start in range(0, len(matrix), step):
            bits = matrix[start : start + step].to(torch.int64)
            # The counter of an element is its logical index times SplitMix64's gamma, which adds up by row and column.
            row_counters = torch.arange(rows + start, rows + start + len(bits), device=bits.device)
            column_counters = torch.arange(columns, columns + bits.shape[1], device=bits.device)
            counters = (row_counters * num_columns * GOLDEN_GAMMA + seed)[:, None] + column_counters * GOLDEN_GAMMA
            # Odd, so that a changed bit always changes the product.
            keys = mix64_(counters).bitwise_or_(1)
            total += int(keys.mul_(bits).sum())
    return total % 2**64


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """`checksum_parts` of whole parameters."""
    return checksum_parts((name, tensor, tensor.shape, ()) for name, tensor in tensors.items())


def _starts(where: tuple[slice, ...]) -> tuple[int, int]:
    """First row and first column of a part."""
    rows, columns = (*where, slice(None), slice(None))[:2]
    return rows.start or 0, columns.start or 0
