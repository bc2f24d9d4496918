"""Checksums of weights over logical elements: the same for the same weights, however they are fused or sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engines.noise import mix64_

_CHUNK = 1 << 20
_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_parts(parts: Iterable[tuple[str, Tensor, torch.Size, tuple[slice, ...]]]) -> int:
    """Sum modulo 2^64 of one hash per element, over (name, index in the logical tensor, bits).

    A sum, so that shards can be added up in any order; with hashes, so that swapped elements or names show. Each item
    is a logical parameter's name, the part of it that is held, the whole's shape, and where in the whole the part is.
    """
    total = 0
    for name, part, shape, where in parts:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        num_columns = shape[1] if len(shape) > 1 else 1
        rows, columns = _starts(where)
        matrix = part.reshape(len(part), -1).view(_BIT_TYPES[part.element_size()])
        step = max(1, _CHUNK // matrix.shape[1])
        for start in range(0, len(matrix), step):
            bits = matrix[start : start + step].to(torch.int64, copy=True)
            row_index = torch.arange(rows + start, rows + start + len(bits), device=bits.device)
            column_index = torch.arange(columns, columns + bits.shape[1], device=bits.device)
            index = (row_index * num_columns)[:, None] + column_index
            # The element's bits are mixed before the index joins, so that neither can cancel the other.
            total += int(mix64_(mix64_(bits.add_(seed)).add_(mix64_(index))).sum())
    return total % 2**64


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """`checksum_parts` of whole parameters."""
    return checksum_parts((name, tensor, tensor.shape, ()) for name, tensor in tensors.items())


def _starts(where: tuple[slice, ...]) -> tuple[int, int]:
    """First row and first column of a part."""
    rows, columns = (*where, slice(None), slice(None))[:2]
    return rows.start or 0, columns.start or 0
