"""Which sequence holds which KV blocks, and which blocks are known by their content. Plain Python: no tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import Protocol


def content_key(previous: bytes, tokens: Items[int]) -> bytes:
    """Returns a key of a full block's KV, made of its tokens and of `previous`, the key of the block before it."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


class FreeBlocks(Protocol):
    """Free blocks of unknown content; a list is one. `pop` takes the one to allocate next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def pop(self) -> int: ...
    def append(self, block: int, /) -> None: ...
    def extend(self, blocks: Iterable[int], /) -> None: ...


class BlockSource(FreeBlocks, Protocol):
    """Free blocks that are a part of more: those that it could still get count in its length, and `pop` gets them.

    `kvcache/pages.py` has one, for blocks in pages of a pool.
    """

    most_blocks: int
    """The most blocks that it could get so far."""

    @property
    def num_blocks(self) -> int:
        """Blocks that it has got, free or not, and those that it could get now."""
        ...

    @property
    def num_allowed_blocks(self) -> int:
        """Blocks that it may have in all, also where others would have to give them back first."""
        ...

    def held(self) -> Iterable[int]:
        """Returns the blocks that it has got, free or not."""
        ...

    def hold(self, block: int) -> None:
        """Notes that a block has its first holder."""
        ...

    def let_go(self, block: int) -> None:
        """Notes that a block's last holder has gone; it is appended later, if its content is not known."""
        ...

    def reset(self) -> None:
        """Makes all blocks that it has got free, of unknown content."""
        ...


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens: the block table of each holder, and a prefix cache.

    A holder is any hashable id that the caller uses. Every block is free, or in one or more tables. A block whose
    content was published can be shared, even when it is free. Free blocks of known content are allocated last, the
    least recently used first.

    With a source it begins without blocks, and takes some when it has no free ones of unknown content.
    """

    def __init__(self, num_blocks: int, block_size: int, source: BlockSource | None = None) -> None:
        """With a source, all its blocks have ids below `num_blocks`."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: both must be at least 1")
        self._num_ids, self._source = num_blocks, source
        self.block_size = block_size
        self.reset()

    def reset(self) -> None:
        """Frees all blocks and forgets all contents."""
        # Allocated from the end: the most recently freed (warm in cache) first, then low ids.
        self._free: FreeBlocks = list(range(self._num_ids - 1, -1, -1)) if self._source is None else self._source
        if self._source is not None:
            self._source.reset()
        self._free_cached: OrderedDict[int, None] = OrderedDict()  # free, but of known content; the oldest first
        self._num_holders = [0] * self._num_ids
        self._tables: dict[object, list[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def is_leased(self) -> bool:
        """Whether it has a source, so that `num_blocks` changes."""
        return self._source is not None

    @property
    def num_blocks(self) -> int:
        """All blocks. With a source: those that it has, and those that it could get now."""
        return self._num_ids if self._source is None else self._source.num_blocks

    @property
    def num_allowed_blocks(self) -> int:
        """All blocks. With a source: those that it may have, also where others would have to give them back first."""
        return self._num_ids if self._source is None else self._source.num_allowed_blocks

    @property
    def most_blocks(self) -> int:
        """The most blocks that there were so far."""
        return self._num_ids if self._source is None else self._source.most_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._free_cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, holder: object) -> list[int]:
        """The holder's blocks in token order. Not to be modified."""
        return self._tables.get(holder, [])

    def can_grow(self, holder: object, num_tokens: int) -> bool:
        """Whether the holder's table could be made to cover `num_tokens` tokens."""
        return self.blocks_for(num_tokens) - len(self.table(holder)) <= self.num_free_blocks

    def grow(self, holder: object, num_tokens: int) -> list[int]:
        """Extends the holder's table to cover `num_tokens` tokens; returns the blocks added.

        Raises RuntimeError when too few are free; nothing is changed then.
        """
        missing = self.blocks_for(num_tokens) - len(self.table(holder))
        if missing > self.num_free_blocks:
            raise RuntimeError(f"{missing} blocks wanted, {self.num_free_blocks} free")
        added = [self._take() for _ in range(missing)]
        if added:
            self._tables.setdefault(holder, []).extend(added)
            if self._source is not None:
                for block in added:
                    self._source.hold(block)
        return added

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._num_holders[block] = 1
        return block

    def stretch(self, holder: object, num_tokens: int, *, even_known: bool, num_left_free: int = 0) -> int:
        """Extends the holder's table towards `num_tokens` tokens, as far as free blocks last: those of unknown content,
        or, with `even_known`, all; but `num_left_free` stay free.

        Returns how many of these tokens the table covers.
        """
        missing = self.blocks_for(num_tokens) - len(self.table(holder))
        if missing > 0:
            num_free = self.num_free_blocks if even_known else len(self._free)
            num_free = max(0, min(num_free, self.num_free_blocks - num_left_free))
            self.grow(holder, (len(self.table(holder)) + min(missing, num_free)) * self.block_size)
        return min(num_tokens, len(self.table(holder)) * self.block_size)

    def take_over(self, holder: object, other: object, num_kept: int) -> None:
        """Replaces the holder's blocks behind its first `num_kept` by those of `other`, which then has none."""
        self.shrink(holder, num_kept * self.block_size)
        self._tables[holder] += self._tables.pop(other)

    def shrink(self, holder: object, num_tokens: int) -> None:
        """Releases the holder's blocks behind its first `num_tokens` tokens. If these are 0, others must follow."""
        table, num_kept = self._tables[holder], self.blocks_for(num_tokens)
        if num_kept < len(table):
            behind = table[num_kept:]
            del table[num_kept:]
            self._put_back(behind)

    def release(self, holder: object) -> None:
        """Releases all blocks of the holder; a holder without blocks is no error."""
        self._put_back(self._tables.pop(holder, []))

    def _put_back(self, blocks: list[int]) -> None:
        source = self._source
        for block in reversed(blocks):  # a prefix's end is then reused before its beginning
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if source is not None:
                    source.let_go(block)
                if block in self._key_of:
                    self._free_cached[block] = None
                else:
                    self._free.append(block)

    # -- by content

    @property
    def knows_any(self) -> bool:
        """Whether the content of any block is known."""
        return bool(self._block_of)

    def find(self, keys: Items[bytes]) -> list[int]:
        """Returns the blocks with the contents of the leading keys, up to the first key that is not known."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_of(self, blocks: Items[int]) -> int:
        """Returns how many of these blocks are free: sharing them lowers `num_free_blocks` by this number."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def share(self, holder: object, blocks: Items[int]) -> None:
        """Starts the table of a holder that has none with blocks that `find` has just returned."""
        assert holder not in self._tables, "only a table's beginning can be shared"
        for block in blocks:
            if self._num_holders[block] == 0:
                del self._free_cached[block]
                if self._source is not None:
                    self._source.hold(block)
            self._num_holders[block] += 1
        if blocks:
            self._tables[holder] = list(blocks)

    def num_held_alone(self, holder: object) -> int:
        """Returns how many blocks `release` would make free."""
        return sum(self._num_holders[block] == 1 for block in self.table(holder))

    def num_common(self, holder: object, keys: Items[bytes]) -> int:
        """Returns how many of the holder's leading blocks, of contents `keys`, another holder also has (in any block).

        These will be found again after the holder has released its blocks, as long as the other holders stay.
        """
        mine = set(self.table(holder))
        num_common = 0
        for block in self.find(keys):
            if self._num_holders[block] <= (block in mine):
                break
            num_common += 1
        return num_common

    def publish(self, holder: object, index: int, key: bytes) -> None:
        """Registers block number `index` of the holder's table under its content; the block must be full."""
        block = self._tables[holder][index]
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def adopt(self, keys: Items[bytes]) -> list[int]:
        """Makes as many free blocks of unknown content known by these contents, which the caller writes into them, and
        returns them. The last ones are reused first."""
        blocks = [self._free.pop() for _ in keys]
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            self._block_of[key], self._key_of[block] = block, key
            self._free_cached[block] = None
        return blocks

    def unpublish(self, holder: object) -> None:
        """Forgets the content of the holder's last block, which it alone holds and will write to."""
        block = self._tables[holder][-1]
        assert self._num_holders[block] == 1
        del self._block_of[self._key_of.pop(block)]

    def retract(self, holder: object, index: int) -> bool:
        """Forgets the content of block number `index` of the holder's table, if it is known. Returns False, and changes
        nothing, where others hold it, too."""
        block = self._tables[holder][index]
        if block not in self._key_of:
            return True
        if self._num_holders[block] > 1:
            return False
        del self._block_of[self._key_of.pop(block)]
        return True

    def forget(self) -> None:
        """Forgets all contents; tables stay."""
        self._free.extend(self._free_cached)
        self._free_cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def is_held(self, block: int) -> bool:
        return self._num_holders[block] > 0

    def lose(self, blocks: Iterable[int]) -> None:
        """Forgets the contents of free blocks that its source gives away."""
        for block in blocks:
            if block in self._free_cached:
                del self._free_cached[block], self._block_of[self._key_of.pop(block)]

    def check_integrity(self) -> None:
        """Asserts that every block is free or held, that its holders are counted, and that contents have one block."""
        held = [*chain.from_iterable(self._tables.values())]
        free = [*self._free, *self._free_cached]
        blocks = [*range(self._num_ids)] if self._source is None else sorted(self._source.held())
        assert sorted({*held, *free}) == blocks, "a block is lost"
        assert len(free) == len(blocks) - len(set(held)), "a block is free twice, or free and held"
        counts = [0] * self._num_ids
        for block in held:
            counts[block] += 1
        assert counts == self._num_holders, "holders are miscounted"
        assert all(len(set(table)) == len(table) > 0 for table in self._tables.values()), "a table is empty or a circle"
        known = dict(zip(self._block_of.values(), self._block_of, strict=True))
        assert known == self._key_of, "contents and blocks disagree"
        assert self._free_cached.keys() == known.keys() & free, "a free block's content is not kept track of"
