"""Checksums of weights over logical elements: the same for the same weights, however they are fused or sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from engines.noise import mix64_

_CHUNK = 1 << 20
_BIT_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Sum modulo 2^64 of one hash per element, over (name, index in the logical tensor, bits).

    A sum, so that shards can be added up in any order; with hashes, so that swapped elements or names show.
    """
    total = 0
    for name, tensor in tensors.items():
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
        flat = tensor.reshape(-1).view(_BIT_TYPES[tensor.element_size()])
        for start in range(0, flat.numel(), _CHUNK):
            bits = flat[start : start + _CHUNK].to(torch.int64, copy=True)
            index = torch.arange(start, start + len(bits), device=bits.device)
            # The element's bits are mixed before the index joins, so that neither can cancel the other.
            total += int(mix64_(mix64_(bits.add_(seed)).add_(mix64_(index))).sum())
    return total % 2**64
