"""The KV cache's storage: per layer, blocks of tokens. `BlockManager` keeps which sequence holds which block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from engines.kvcache.page_storage import ModelPages, Pages


class PagedKVCache:
    """Keys and values of every layer, each [num_blocks + 1, block_size, num_kv_heads, head_dim].

    The last block is scratch: padding writes there, and no sequence ever holds it. A cache in pages has larger tensors,
    which see the memory of all models: `physical` says where in them a block is.
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
        pages: Pages | None = None,
    ) -> None:
        """With `pages` it allocates nothing, and the pool has `num_blocks`. Raises ValueError when the pages have no
        size for this model."""
        self.pages: ModelPages | None = None
        if pages is not None:
            self.pages = ModelPages(
                *(pages,), num_layers=num_layers, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim,
                dtype=dtype,
            )  # fmt: skip
            self.keys, self.values = self.pages.keys, self.pages.values
            (self.scratch_block,) = self.physical([self.pages.num_blocks])
            return
        self.scratch_block = num_blocks
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        # Zeros, not empty: unwritten slots of a block are gathered and masked, and 0 * NaN would be NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor[0, 0].numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    @property
    def num_blocks(self) -> int:
        """Blocks that a sequence may ever hold; with pages, those of the whole pool."""
        return self.scratch_block if self.pages is None else self.pages.num_blocks

    def physical(self, blocks: list[int]) -> list[int]:
        """Returns the blocks' places in the tensors: indices of their first dim."""
        return blocks if self.pages is None else self.pages.physical(blocks)

    def clear(self) -> None:
        if self.pages is not None:
            self.pages.clear()
            return
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        sources, targets = self.physical(sources), self.physical(targets)
        for tensor in (*self.keys, *self.values):
            tensor[targets] = tensor[sources]

    def release(self) -> None:
        """Releases the memory, or gives back the pages; the contents are lost. No sequence may hold blocks."""
        if self.pages is not None:
            self.pages.share.reclaim(self.pages.share.num_pages)
            return
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocates the memory again after `release`, zeroed. Pages are leased when they are needed."""
        if self.pages is not None:
            return
        for tensor in (*self.keys, *self.values):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()


def write_kv(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Scatters new keys or values [T, num_kv_heads, head_dim] into one layer's cache."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def read_kv(kv: PagedKVCache, blocks: list[int], num_tokens: int, *, first: int = 0) -> Iterator[Tensor]:
    """Yields for each layer the KV of tokens `first` to `num_tokens` of a block table,
    [2, num_tokens - first, num_heads, head_dim]."""
    slots = _token_slots(kv, blocks, num_tokens)[first:]
    for keys, values in zip(kv.keys, kv.values, strict=True):
        layer = keys.new_empty((2, num_tokens - first, *keys.shape[2:]))
        for cache, out in zip((keys, values), layer, strict=True):
            torch.index_select(cache.view(-1, *cache.shape[2:]), 0, slots, out=out)
        yield layer


def fill_kv(
    kv: PagedKVCache, blocks: list[int], num_tokens: int, layers: Iterable[Tensor], *, first: int = 0, start: int = 0
) -> None:
    """Writes tokens `first` to `num_tokens` into the blocks of a block table.

    The layers are shaped as by `read_kv`, and begin with token `start`. The blocks of earlier tokens are not written:
    other sequences may hold them, too.
    """
    slots = _token_slots(kv, blocks, num_tokens)[first:]
    for keys, values, layer in zip(kv.keys, kv.values, layers, strict=True):
        for cache, new in zip((keys, values), layer, strict=True):
            write_kv(cache, slots, new[first - start : num_tokens - start].to(cache.device))


def to_host(layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the layers on the CPU. From CUDA they are copied through pinned memory, one ahead of the caller."""
    ahead: tuple[Tensor, torch.cuda.Event] | None = None
    for layer in layers:
        if not layer.is_cuda:
            yield layer
            continue
        staged = torch.empty(layer.shape, dtype=layer.dtype, pin_memory=True).copy_(layer, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        if ahead is not None:
            ahead[1].synchronize()
            yield ahead[0]
        ahead = staged, arrived
    if ahead is not None:
        ahead[1].synchronize()
        yield ahead[0]


def _token_slots(kv: PagedKVCache, blocks: list[int], num_tokens: int) -> Tensor:
    """Returns int64 [num_tokens]: place of the block * block_size + offset of each token."""
    block_size, device = kv.keys[0].shape[1], kv.keys[0].device
    starts = torch.tensor(kv.physical(blocks), dtype=torch.int64, device=device) * block_size
    slots = (starts[:, None] + torch.arange(block_size, device=device)).flatten()
    assert num_tokens <= len(slots), f"{num_tokens} tokens in {len(blocks)} blocks of {block_size}"
    return slots[:num_tokens]
