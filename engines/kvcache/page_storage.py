"""The memory of a pool's pages, and how one model's blocks lie in it (ROSE §4.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engines.kvcache.pages import PagePool, PageShare


class PageStorage:
    """The memory of a pool's pages: one tensor, with a scratch page behind the others, which nobody leases."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        """Allocates the memory; raises ValueError when there is too little."""
        try:
            self.memory = torch.zeros((num_pages + 1, page_bytes), dtype=torch.uint8, device=device)
        except RuntimeError as error:  # what torch's allocators raise; on a CPU it has no narrower type
            raise ValueError(
                f"num_pages={num_pages}, page_bytes={page_bytes}: {device} has no memory for these pages; give fewer"
            ) from error

    @property
    def num_pages(self) -> int:
        return len(self.memory) - 1

    @property
    def page_bytes(self) -> int:
        return self.memory.shape[1]

    def clear(self, pages: Iterable[int]) -> None:
        """Fills pages with zeros: what another model has left there may be NaN, and 0 * NaN is NaN."""
        for page in pages:
            self.memory[page].zero_()


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where an engine's KV cache is to lie, instead of in memory of its own. See `PageShare` for the fields."""

    storage: PageStorage
    pool: PagePool
    owner: str
    budget: int
    lease_s: float | None = None
    renews: bool = True

    def __post_init__(self) -> None:
        assert self.pool.num_pages == self.storage.num_pages, "the pool's pages are those of the storage"


class ModelPages:
    """The pages of one model, seen as blocks of its KV.

    A unit is the keys or the values of one layer of one block. A block lies in a page as [layer][keys, values], so it
    has 2 * num_layers units; what is left at the end of a page is not used. The whole storage is seen as units, for
    each layer from its first unit on: so the unit in which a block begins is its number in the tensors of all layers.
    """

    def __init__(
        self, pages: Pages, *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        """Joins the pool. Raises ValueError when the pages have no size for this model: see `page_bytes_for`."""
        storage, pool = pages.storage, pages.pool
        unit_bytes = block_size * num_kv_heads * head_dim * dtype.itemsize
        self._units_per_block, self._units_per_page = 2 * num_layers, storage.page_bytes // unit_bytes
        self._blocks_per_page = self._units_per_page // self._units_per_block
        if storage.page_bytes % unit_bytes or not self._blocks_per_page:
            raise ValueError(
                f"page_bytes={storage.page_bytes}: must be a multiple of {unit_bytes}, and at least "
                f"{unit_bytes * self._units_per_block}, for the model of {pages.owner!r}; take page_bytes_for()"
            )
        self.share = PageShare(
            *(pool, pages.owner), budget=pages.budget, block_size=block_size, blocks_per_page=self._blocks_per_page,
            lease_s=pages.lease_s, renews=pages.renews, on_lease=storage.clear,
        )  # fmt: skip
        self.num_blocks = pool.num_pages * self._blocks_per_page
        """Block ids are below it; behind it lie those of the scratch page."""
        units = storage.memory.view(-1).view(dtype).view(-1, block_size, num_kv_heads, head_dim)
        self.keys = [units[2 * layer :] for layer in range(num_layers)]
        self.values = [units[2 * layer + 1 :] for layer in range(num_layers)]
        self._storage = storage

    def physical(self, blocks: Iterable[int]) -> list[int]:
        """Returns the numbers of blocks in the tensors."""
        per_page, page, block = self._blocks_per_page, self._units_per_page, self._units_per_block
        return [one // per_page * page + one % per_page * block for one in blocks]

    def clear(self) -> None:
        """Fills the pages that the model has with zeros."""
        self._storage.clear(self.share.pages)
