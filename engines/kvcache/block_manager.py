"""Which sequence holds which KV blocks. Plain Python: no tensors, so it can be tested against brute force."""

from __future__ import annotations


class BlockManager:
    """A free list over `num_blocks` blocks of `block_size` tokens, and the block table of each holder.

    A holder is whatever hashable id the caller uses. Every block is either free or in exactly one table.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Handed out from the end: low ids first, the most recently freed (warm in cache) before them.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[object, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, holder: object) -> list[int]:
        """The holder's blocks in token order. Not to be modified."""
        return self._tables.get(holder, [])

    def can_grow(self, holder: object, num_tokens: int) -> bool:
        """Whether the holder's table could be made to cover `num_tokens` tokens."""
        return self.blocks_for(num_tokens) - len(self.table(holder)) <= len(self._free)

    def grow(self, holder: object, num_tokens: int) -> list[int]:
        """Extends the holder's table to cover `num_tokens` tokens; returns the blocks added.

        Raises RuntimeError when too few are free; nothing is changed then.
        """
        missing = self.blocks_for(num_tokens) - len(self.table(holder))
        if missing > len(self._free):
            raise RuntimeError(f"{missing} blocks wanted, {len(self._free)} free")
        added = [self._free.pop() for _ in range(missing)]
        if added:
            self._tables.setdefault(holder, []).extend(added)
        return added

    def release(self, holder: object) -> None:
        """Frees all blocks of the holder; one without blocks is no error."""
        self._free.extend(reversed(self._tables.pop(holder, [])))

    def check_integrity(self) -> None:
        """Asserts that every block is free or in one table, and no block twice."""
        held = [block for table in self._tables.values() for block in table]
        assert sorted(held + self._free) == list(range(self.num_blocks)), "a block is lost or held twice"
        assert all(self._tables.values()), "an empty table is kept"
