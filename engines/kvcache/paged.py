"""The KV cache's storage: per layer, blocks of tokens. Which block is whose, `BlockManager` knows."""

from __future__ import annotations

import ctypes
import mmap
import sys

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
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._take()

    def _take(self) -> None:
        """Touches fresh memory. Zeros: unwritten slots of a block are gathered and masked, and 0 * NaN would be NaN."""
        for tensor in (*self.keys, *self.values):
            if tensor.device.type == "cpu":
                ask_for_huge_pages(tensor)
        self.clear()

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
        self._take()


def ask_for_huge_pages(tensor: Tensor) -> None:
    """Has Linux back a large tensor, not yet touched, by pages of 2 MiB where it can: scattered blocks are then found
    without a walk through page tables for each.
    """
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // page * page
    if sys.platform == "linux" and end > start:
        # Refused where the kernel has none; nothing is lost then.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def write_kv(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Scatters new keys or values [T, num_kv_heads, head_dim] into one layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)
