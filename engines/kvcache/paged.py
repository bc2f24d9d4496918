"""The KV cache's storage: per layer, blocks of tokens. Which block is whose, `BlockManager` knows."""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKVCache:
    """Keys and values of every layer, each [num_blocks + 1, block_size, num_kv_heads, head_dim].

    The last block is scratch: padding writes there, and no sequence ever has it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scratch_block = num_blocks
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: unwritten slots of a block are gathered and masked, and 0 * NaN would be NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def clear(self) -> None:
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def release(self) -> None:
        """Gives the memory back; the contents are lost."""
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory again after `release`, zeroed."""
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()


def write_kv(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Scatters new keys or values [T, num_kv_heads, head_dim] into one layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)
