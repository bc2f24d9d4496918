"""Checksums of weights over logical elements: the same for the same weights, however they are fused or sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engines.native import bits
from engines.sampling.noise import GOLDEN_GAMMA, mix64_

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements computed at once: on a CPU their temporary results stay in the second-level cache."""
_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum_parts(parts: Iterable[tuple[str, Tensor, tuple[slice, ...]]], *, num_threads: int | None = None) -> int:
    """Returns the sum modulo 2^64 of each element's bits times a key of (name, row) times a key of the column.

    Each item is a logical parameter's name, the part of it that is held, and the part's place in the whole. A sum can
    be added up over shards in any order; keys make it change when elements or names are swapped (multilinear hashing,
    Carter and Wegman 1979; with a product of two keys most of the work is one multiplication per element). On a CPU,
    `num_threads` work on it, by default torch's.
    """
    total, library = 0, bits.load()
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    for name, part, where in parts:
        if not part.numel():  # a shard whose rows of the vocabulary are all padding
            continue
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        first_row, first_column = _starts(where)
        matrix = part.reshape(len(part), -1).view(_BIT_TYPES[part.element_size()])
        row_keys = _keys(first_row, len(matrix), seed, part.device)
        column_keys = _keys(first_column, matrix.shape[1], 0, part.device)
        if library is not None and part.device.type == "cpu" and matrix.element_size() in bits.SUMMED:
            elements = matrix.contiguous()  # kept until it has been read
            arrays = elements.data_ptr(), *matrix.shape, row_keys.data_ptr(), column_keys.data_ptr()
            total += getattr(library, f"checksum_{elements.element_size()}")(*arrays, num_threads)
            continue
        step = max(1, _CHUNK[part.device.type] // matrix.shape[1])
        for start in range(0, len(matrix), step):
            sums = (matrix[start : start + step] * column_keys).sum(1)  # int64, by promotion
            total += int(sums.mul_(row_keys[start : start + step]).sum())
    return total % 2**64


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Returns `checksum_parts` of whole parameters."""
    return checksum_parts((name, tensor, ()) for name, tensor in tensors.items())


def _keys(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Returns int64 [count]: outputs start, start + 1, ... of SplitMix64, made odd: a changed bit changes a product."""
    counters = torch.arange(start, start + count, device=device)
    return mix64_(counters.mul_(GOLDEN_GAMMA).add_(seed)).bitwise_or_(1)


def _starts(where: tuple[slice, ...]) -> tuple[int, int]:
    """Returns the first row and the first column of a part."""
    rows, columns = (*where, slice(None), slice(None))[:2]
    return rows.start or 0, columns.start or 0
