"""Pages of one memory that models lease from a pool, and one model's share of them (ROSE §4.1). Torch-free.

A page holds some blocks of one model. A model leases a page when it needs blocks, and gives it back when no sequence
holds a block of it. So models of other shapes use the same memory one after the other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator

from engines.kvcache.block_manager import BlockManager


class PagePool:
    """Pages of equal size that models lease: whose each is, and how many each may have.

    An owner's budget is a limit, and no promise: where budgets exceed the pool in sum, the first who leases has it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages}: must be at least 1")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners: list[str | None] = [None] * num_pages
        self._budgets: dict[str, int] = {}
        self._num_held: dict[str, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def join(self, owner: str, *, budget: int) -> None:
        """Adds an owner, which has no pages yet. Raises ValueError for one that has joined before."""
        if owner in self._budgets:
            raise ValueError(f"owner={owner!r}: has joined the pool before; give each model its own name")
        self._check(budget)
        self._budgets[owner], self._num_held[owner] = budget, 0

    def budget(self, owner: str) -> int:
        return self._budgets[owner]

    def set_budget(self, owner: str, pages: int) -> None:
        """Sets how many pages the owner may hold. It keeps what it holds beyond them, and leases none until it holds
        fewer. Raises ValueError for a number that the pool cannot have."""
        self._check(pages)
        assert owner in self._budgets, f"{owner} has not joined"
        self._budgets[owner] = pages

    def _check(self, budget: int) -> None:
        if not 0 <= budget <= self.num_pages:
            raise ValueError(f"budget={budget}: must be from 0 to the {self.num_pages} pages of the pool")

    def num_held(self, owner: str) -> int:
        return self._num_held[owner]

    def room(self, owner: str) -> int:
        """Returns how many pages `lease` would give now."""
        return max(0, min(self._budgets[owner] - self._num_held[owner], len(self._free)))

    def lease(self, owner: str, count: int) -> list[int]:
        """Returns `count` pages, which are the owner's now.

        Raises RuntimeError when too few are free, or its budget ends before; nothing is changed then.
        """
        if count > self.room(owner):
            raise RuntimeError(
                f"{count} pages wanted by {owner!r}, which holds {self._num_held[owner]} of a budget of "
                f"{self._budgets[owner]}; {len(self._free)} free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = owner
        self._num_held[owner] += count
        return pages

    def give_back(self, owner: str, pages: Iterable[int]) -> None:
        """Frees pages of the owner."""
        for page in pages:
            assert self._owners[page] == owner, f"page {page} is {self._owners[page]}'s, not {owner}'s"
            self._owners[page] = None
            self._num_held[owner] -= 1
            self._free.append(page)

    def check_integrity(self) -> None:
        """Asserts that every page is free or has one owner, and that the pages of each are counted."""
        free = [page for page, owner in enumerate(self._owners) if owner is None]
        assert sorted(self._free) == free, "a page is free and held, or lost"
        for owner, count in self._num_held.items():
            assert self._owners.count(owner) == count, f"the pages of {owner} are miscounted"


class _PageBlocks:
    """The free blocks of unknown content in a share's pages, as a `BlockSource`.

    Blocks of pages in use come first, so that the others can be given back; then those of the page that was in use
    last; then those of a new page.
    """

    def __init__(
        self,
        blocks_per_page: int,
        *,
        room: Callable[[], int],
        budget: Callable[[], int],
        lease: Callable[[], int],
        renews: bool,
    ) -> None:
        self.blocks_per_page = blocks_per_page
        self.free: dict[int, list[int]] = {}
        """The free blocks of each page."""
        self.num_held: dict[int, int] = {}
        """The blocks of each page that sequences hold."""
        self.idle: dict[int, float] = {}
        """Pages that no sequence holds, the least recently used first, and when the lease of each began to run."""
        self.leased_at: dict[int, float] = {}
        self.ends: list[tuple[float, int]] = []
        """A heap of idle pages, each once, by when its lease began to run, or an earlier time."""
        self.now = 0.0
        self.most_blocks = 0
        self._room, self._budget, self._lease, self._renews = room, budget, lease, renews
        self._in_use: dict[int, None] = {}  # pages that sequences hold, and that have free blocks
        self._spare: dict[int, None] = {}  # idle pages that have free blocks
        self._queued: set[int] = set()  # the pages in `ends`
        self._num_free = 0

    @property
    def num_blocks(self) -> int:
        return (len(self.free) + self._room()) * self.blocks_per_page

    @property
    def num_allowed_blocks(self) -> int:
        return max(len(self.free), self._budget()) * self.blocks_per_page

    def blocks_of(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)

    def held(self) -> Iterator[int]:
        return (block for page in self.free for block in self.blocks_of(page))

    def __iter__(self) -> Iterator[int]:
        return (block for blocks in self.free.values() for block in blocks)

    def __len__(self) -> int:
        return self._num_free + self._room() * self.blocks_per_page

    def pop(self) -> int:
        if not self._num_free:
            self._add(self._lease(), self.now)
        pages = self._in_use or self._spare
        page = next(reversed(pages))
        blocks = self.free[page]
        if len(blocks) == 1:
            del pages[page]
        self._num_free -= 1
        return blocks.pop()

    def append(self, block: int, /) -> None:
        page = block // self.blocks_per_page
        blocks = self.free[page]
        if not blocks:
            (self._spare if page in self.idle else self._in_use)[page] = None
        blocks.append(block)
        self._num_free += 1

    def extend(self, blocks: Iterable[int], /) -> None:
        for block in blocks:
            self.append(block)

    def hold(self, block: int) -> None:
        page = block // self.blocks_per_page
        self.num_held[page] += 1
        if self.num_held[page] == 1:
            del self.idle[page]
            if page in self._spare:
                del self._spare[page]
                self._in_use[page] = None

    def let_go(self, block: int) -> None:
        page = block // self.blocks_per_page
        self.num_held[page] -= 1
        if not self.num_held[page]:
            self._rest(page)
            if page in self._in_use:
                del self._in_use[page]
                self._spare[page] = None

    def _rest(self, page: int) -> None:
        since = self.idle[page] = self.now if self._renews else self.leased_at[page]
        if page not in self._queued:
            self._queued.add(page)
            heapq.heappush(self.ends, (since, page))

    def ended(self, latest: float) -> list[int]:
        """Returns the idle pages whose leases have begun to run by `latest`."""
        pages = []
        while self.ends and self.ends[0][0] <= latest:
            _, page = heapq.heappop(self.ends)
            self._queued.remove(page)
            if page not in self.idle:
                continue  # it comes back when it is idle
            if self.idle[page] <= latest:
                pages.append(page)
            else:
                self._queued.add(page)
                heapq.heappush(self.ends, (self.idle[page], page))
        return pages

    def _add(self, page: int, leased_at: float) -> None:
        self.free[page] = list(reversed(self.blocks_of(page)))
        self.num_held[page], self.leased_at[page] = 0, leased_at
        self._rest(page)
        self._spare[page] = None
        self._num_free += self.blocks_per_page

    def remove(self, page: int) -> None:
        """Takes out an idle page, and its free blocks."""
        self._num_free -= len(self.free.pop(page))
        self._spare.pop(page, None)
        del self.num_held[page], self.leased_at[page], self.idle[page]

    def reset(self) -> None:
        """Makes all blocks free."""
        pages = self.leased_at.copy()
        self._num_free = 0
        for of_pages in (self.free, self.num_held, self.idle, self.leased_at, self._in_use, self._spare):
            of_pages.clear()
        for page, leased_at in pages.items():
            self._add(page, leased_at)

    def begin(self, now: float) -> None:
        """Sets the first known time: all that was before it counts as if it were now."""
        self.now = now
        self.leased_at, self.idle = dict.fromkeys(self.leased_at, now), dict.fromkeys(self.idle, now)
        self.ends, self._queued = [(now, page) for page in sorted(self.idle)], set(self.idle)


class PageShare:
    """One model's pages of a pool. Its `blocks` take pages as they need them.

    A page in which no sequence holds a block stays leased, since the contents of its blocks may be found again. It goes
    back when its lease has ended (`expire`), or when others need it (`reclaim`); its contents are forgotten then.
    """

    def __init__(
        self,
        pool: PagePool,
        owner: str,
        *,
        budget: int,
        block_size: int,
        blocks_per_page: int,
        lease_s: float | None = None,
        renews: bool = True,
        on_lease: Callable[[list[int]], object] = lambda pages: None,
    ) -> None:
        """Joins the pool, with no pages yet. A lease lasts `lease_s` seconds, None for ever: with `renews` they begin
        when the last sequence leaves the page, else when the page is leased. `on_lease` is called with new pages."""
        if blocks_per_page < 1 or (lease_s is not None and lease_s < 0):
            raise ValueError(f"blocks_per_page={blocks_per_page}, lease_s={lease_s}: at least 1, and not negative")
        pool.join(owner, budget=budget)
        self.pool, self.owner, self.blocks_per_page = pool, owner, blocks_per_page
        self._lease_s, self._on_lease = lease_s, on_lease
        self._pages = _PageBlocks(
            blocks_per_page,
            room=lambda: pool.room(owner),
            budget=lambda: pool.budget(owner),
            lease=self._lease,
            renews=renews,
        )
        self._pages.most_blocks = budget * blocks_per_page
        self._has_time = False
        self.blocks = BlockManager(pool.num_pages * blocks_per_page, block_size, self._pages)

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._pages.free)

    @property
    def num_used_pages(self) -> int:
        """Of these, pages with a block that a sequence holds."""
        return len(self._pages.free) - len(self._pages.idle)

    @property
    def pages(self) -> list[int]:
        """The pages that it holds."""
        return list(self._pages.free)

    def pages_for(self, num_blocks: int) -> int:
        """Returns the pages that hold this many blocks; 0 for a negative number."""
        return max(0, -(-num_blocks // self.blocks_per_page))

    def set_budget(self, pages: int) -> None:
        """See `PagePool.set_budget`. Sequences that were promised more blocks must leave before."""
        self.pool.set_budget(self.owner, pages)
        self._pages.most_blocks = max(self._pages.most_blocks, pages * self._pages.blocks_per_page)

    def expire(self, now: float) -> int:
        """Gives back the pages that no sequence holds and whose lease has ended; returns how many. What happens until
        the next call counts as if it happened at `now`, in seconds, which never falls."""
        pages = self._pages
        if not self._has_time:
            pages.begin(now)
            self._has_time = True
        pages.now = now
        return 0 if self._lease_s is None else self._give_back(pages.ended(now - self._lease_s))

    def reclaim(self, count: int) -> int:
        """Gives back up to `count` pages that no sequence holds; returns how many. Pages without known content go
        first, then the least recently used."""
        pages = self._pages
        order = sorted(pages.idle, key=lambda page: len(pages.free[page]) < pages.blocks_per_page)
        return self._give_back(order[:count])

    def _lease(self) -> int:
        pages = self.pool.lease(self.owner, 1)
        self._on_lease(pages)
        return pages[0]

    def _give_back(self, given: list[int]) -> int:
        for page in given:
            self.blocks.lose(self._pages.blocks_of(page))
            self._pages.remove(page)
        self.pool.give_back(self.owner, given)
        return len(given)

    def check_integrity(self) -> None:
        """Asserts that the pages here are those that the pool says, and that their blocks are where they belong."""
        pages = self._pages
        self.pool.check_integrity()
        self.blocks.check_integrity()
        assert self.num_pages == self.pool.num_held(self.owner), "a page is lost, or not leased"
        assert pages.free.keys() == pages.num_held.keys() == pages.leased_at.keys()
        for page, free in pages.free.items():
            num_held = sum(self.blocks.is_held(block) for block in pages.blocks_of(page))
            assert pages.num_held[page] == num_held, "the held blocks of a page are miscounted"
            assert (page in pages.idle) == (num_held == 0), "a page is idle and held"
            assert {block // pages.blocks_per_page for block in free} <= {page}
            places = (pages._in_use, pages._spare)
            assert [page in place for place in places] == [bool(free and num_held), bool(free and not num_held)]
        assert len(list(pages)) == pages._num_free


def page_bytes_for(blocks: Iterable[tuple[int, int]], *, most_waste: float = 0.05) -> int:
    """Returns a page size for several models: the smallest that leaves at most this part of a page unused for each.

    Of each model it takes (bytes of a block, bytes of the keys of one layer of it): a page has whole numbers of both,
    and the last blocks' rest is lost. A large page goes back late. Where no size up to 64 of the largest blocks is good
    enough, it is the one with the least loss.
    """
    sizes = list(blocks)
    step = math.lcm(*(unit for _, unit in sizes))
    largest = max(block for block, _ in sizes)

    def waste(page: int) -> float:
        return max(page % block for block, _ in sizes) / page

    candidates = range(-(-largest // step) * step, 64 * largest + step, step)
    return next((page for page in candidates if waste(page) <= most_waste), min(candidates, key=waste))
