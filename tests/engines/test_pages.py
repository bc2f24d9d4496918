"""Pages that two models lease from one pool: who has which, and when a page goes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from engines.kvcache.pages import PagePool, PageShare

LEASE_S = 5.0
OPERATIONS = ["grow"] * 6 + ["release"] * 6 + ["publish", "share", "time", "expire"] * 3 + ["reclaim", "budget"]


class Record:
    """What a share should say, by plain rules: who holds which blocks, and since when each page is idle."""

    def __init__(self, share: PageShare, per_page: int, budget: int, *, renews: bool, lease_s: float) -> None:
        self.share, self.per_page, self.budget, self.renews, self.lease_s = share, per_page, budget, renews, lease_s
        self.tables: dict[int, list[int]] = {}
        self.content: dict[int, bytes] = {}
        self.pages: set[int] = set()
        self.leased_at: dict[int, float] = {}
        self.used_at: dict[int, float] = {}
        self.order: dict[int, int] = {}
        self.now = 0.0
        """Of the last `expire`."""

    def page(self, block: int) -> int:
        return block // self.per_page

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @property
    def in_use(self) -> set[int]:
        return {self.page(block) for block in self.held}

    def blocks(self, pages: Iterable[int]) -> set[int]:
        return {page * self.per_page + place for page in pages for place in range(self.per_page)}

    def leave(self, before: set[int], tick: int) -> None:
        for page in before - self.in_use:
            self.used_at[page], self.order[page] = self.now, tick

    def lose(self, pages: set[int]) -> None:
        self.pages -= pages
        for block in self.blocks(pages) & self.content.keys():
            del self.content[block]

    def grow(self, holder: int, num_blocks: int, num_free_pages: int, tick: int) -> None:
        blocks, share = self.tables.get(holder, []), self.share
        room = max(0, min(self.budget - len(self.pages), num_free_pages))
        free = self.blocks(self.pages) - self.held
        unknown = free - self.content.keys()
        assert share.blocks.num_free_blocks == len(free) + room * self.per_page
        assert share.blocks.num_blocks == (len(self.pages) + room) * self.per_page
        wanted = len(blocks) + num_blocks
        if num_blocks > len(free) + room * self.per_page:
            with pytest.raises(RuntimeError, match="free"):
                share.blocks.grow(holder, wanted * share.blocks.block_size)
            return
        in_use = self.in_use
        added = share.blocks.grow(holder, wanted * share.blocks.block_size)
        assert len({*added} | self.held) == len(added) + len(self.held)
        new_pages = {self.page(block) for block in added} - self.pages
        num_leased = max(0, min(room, -(-(num_blocks - len(unknown)) // self.per_page)))
        assert len(new_pages) == num_leased, "leases only what it lacks, before it reuses what is known"
        reused = [block for block in added if block in self.content]
        assert len(reused) == max(0, num_blocks - len(unknown) - num_leased * self.per_page)
        open_ = {block for block in unknown if self.page(block) in in_use}
        assert len(open_ & {*added}) == min(len(open_), num_blocks), "pages in use come first"
        for page in new_pages:
            self.leased_at[page] = self.used_at[page] = self.now
            self.order[page] = tick
        self.pages |= new_pages
        for block in reused:
            del self.content[block]
        if added:
            self.tables[holder] = blocks + added

    def expire(self, now: float) -> None:
        self.now = now
        since = self.used_at if self.renews else self.leased_at
        ended = {
            page for page in self.pages - self.in_use if self.lease_s is not None and since[page] + self.lease_s <= now
        }
        assert self.share.expire(now) == len(ended)
        self.lose(ended)

    def reclaim(self, count: int) -> None:
        idle = self.pages - self.in_use
        known = {self.page(block) for block in self.content}
        assert self.share.reclaim(count) == min(count, len(idle))
        gone = self.pages - {*self.share.pages}
        assert gone <= idle
        rank = {page: (page in known, self.order[page]) for page in idle}
        assert all(rank[a] <= rank[b] for a in gone for b in idle - gone)
        self.lose(gone)


@pytest.mark.parametrize("renews", [True, False])
def test_two_shares_against_a_plain_record(renews: bool) -> None:
    """10,000 random operations: what is leased, what expires, and what is known agree with rules that scan all."""
    draw, pool, now = random.Random(5), PagePool(9), 0.0
    new: dict[str, list[int]] = {"a": [], "b": []}
    records = {}
    for owner, per_page in (("a", 3), ("b", 4)):
        share = PageShare(
            *(pool, owner), budget=6, block_size=2, blocks_per_page=per_page, lease_s=LEASE_S, renews=renews,
            on_lease=new[owner].extend,
        )  # fmt: skip
        records[owner] = Record(share, per_page, 6, renews=renews, lease_s=LEASE_S)
    for one in records.values():
        one.share.expire(now)
    seen = Counter[str]()
    for tick in range(10_000):
        owner = draw.choice("ab")
        one = records[owner]
        share, holder = one.share, draw.randrange(5)
        operation = draw.choice(OPERATIONS)
        before, in_use = len(one.pages), one.in_use
        if operation == "grow":
            leased = {*one.pages}
            one.grow(holder, draw.randint(1, 7), pool.num_free, tick)
            assert sorted(new[owner]) == sorted(one.pages - leased), "new pages are announced, each once"
            new[owner].clear()
        elif operation == "release":
            share.blocks.release(holder)
            one.tables.pop(holder, None)
        elif operation == "publish" and holder in one.tables:
            index, key = draw.randrange(len(one.tables[holder])), b"%d" % draw.randrange(8)
            share.blocks.publish(holder, index, key)
            block = one.tables[holder][index]
            if block not in one.content and key not in one.content.values():
                one.content[block] = key
        elif operation == "share" and holder not in one.tables:
            found = share.blocks.find([b"%d" % draw.randrange(8)])
            share.blocks.share(holder, found)
            if found:
                one.tables[holder] = found
        elif operation == "time":
            now += draw.choice([0.5, 1.0, 3.0])
        elif operation == "expire":
            one.expire(now)
        elif operation == "reclaim":
            one.reclaim(draw.randint(1, 3))
        elif operation == "budget":
            one.budget = draw.randint(0, 9)
            share.set_budget(one.budget)
        one.leave(in_use, tick)
        seen[operation] += len(one.pages) != before
        assert {*share.pages} == one.pages and share.num_pages == len(one.pages)
        assert share.num_used_pages == len(one.in_use)
        assert {h: share.blocks.table(h) for h in one.tables} == one.tables
        assert all(share.blocks.find([key]) == [block] for block, key in one.content.items())
        share.check_integrity()
        assert not records["a"].pages & records["b"].pages
        assert pool.num_free == 9 - sum(len(one.pages) for one in records.values())
    assert min(seen[name] for name in ("grow", "expire", "reclaim")) > 50, seen


@pytest.mark.parametrize(("renews", "gone_at"), [(True, 47.0), (False, 15.0)])
def test_a_lease_ends_after_its_last_use_or_after_it_began(renews: bool, gone_at: float) -> None:
    """A page is leased at 10 s and used to 42 s, in two stretches; its lease lasts 5 s. It is used at 15 s, so that
    an absolute lease ends when the first stretch does, at 20 s."""
    pool = PagePool(2)
    share = PageShare(pool, "a", budget=2, block_size=4, blocks_per_page=2, lease_s=LEASE_S, renews=renews)
    gone = None
    for tick in range(100):
        now = 0.5 * tick + 5.0
        expired = share.expire(now)
        if expired and gone is None:
            gone = now
        if now == 10.0:
            share.blocks.grow("first", 4)
            share.blocks.publish("first", 0, b"content")
        elif now == 20.0:
            share.blocks.release("first")
            assert share.num_pages == 1 and share.num_used_pages == 0
        elif now == 22.0 and renews:
            share.blocks.share("second", share.blocks.find([b"content"]))
        elif now == 42.0:
            share.blocks.release("second")
        assert share.num_pages == (now >= 10.0 and gone is None)
        assert bool(share.blocks.find([b"content"])) == (now >= 10.0 and gone is None), "contents go with the page"
    assert gone == (gone_at if renews else 20.5), "in use at the end of its lease, it goes when it is left"


def test_what_was_before_the_first_known_time_counts_as_then() -> None:
    pool = PagePool(1)
    share = PageShare(pool, "a", budget=1, block_size=1, blocks_per_page=1, lease_s=LEASE_S)
    share.blocks.grow("x", 1)
    share.blocks.release("x")
    assert [share.expire(now) for now in (1e9, 1e9 + 4.5, 1e9 + 5.0)] == [0, 0, 1]


def test_without_an_end_a_lease_lasts_until_it_is_reclaimed() -> None:
    pool = PagePool(4)
    share = PageShare(pool, "a", budget=4, block_size=1, blocks_per_page=1)
    share.blocks.grow("x", 4)
    for index in (0, 3):
        share.blocks.publish("x", index, b"%d" % index)
    pages = share.blocks.table("x").copy()
    share.blocks.shrink("x", 1)
    assert share.expire(1e9) == 0 and share.num_pages == 4
    assert share.reclaim(2) == 2, "first those without known content"
    assert {*share.pages} == {pages[0], pages[3]} and share.blocks.find([b"3"])
    assert share.reclaim(2) == 1 and share.pages == pages[:1] and not share.blocks.find([b"3"])
    assert share.reclaim(1) == 0, "a sequence holds the last one"


def test_a_lower_budget_takes_nothing_away_and_gives_nothing_new() -> None:
    pool = PagePool(4)
    a, b = (PageShare(pool, owner, budget=3, block_size=1, blocks_per_page=2) for owner in "ab")
    a.blocks.grow("x", 5)
    assert (pool.num_held("a"), pool.room("a"), pool.room("b"), b.blocks.num_free_blocks) == (3, 0, 1, 2)
    a.set_budget(1)
    assert (a.blocks.num_blocks, a.blocks.num_free_blocks, a.blocks.most_blocks, pool.budget("a")) == (6, 1, 6, 1)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 free"):
        a.blocks.grow("x", 7)
    with pytest.raises(RuntimeError, match=r"1 pages wanted by 'a', which holds 3 of a budget of 1; 1 free"):
        pool.lease("a", 1)
    a.blocks.release("x")
    assert a.reclaim(9) == 3 and (a.blocks.num_blocks, b.blocks.num_free_blocks) == (2, 6)
    b.set_budget(4)
    b.blocks.grow("y", 8)
    assert a.blocks.num_allowed_blocks == 2
    assert a.blocks.num_blocks == a.blocks.num_free_blocks == 0, "the budget is a limit: the pool has none left"
    b.blocks.reset()
    assert b.num_pages == 4 and b.num_used_pages == 0 and b.blocks.num_free_blocks == 8
    b.check_integrity()


def test_bad_numbers_are_refused() -> None:
    pool = PagePool(2)
    pool.join("a", budget=2)
    with pytest.raises(ValueError, match="owner='a': has joined"):
        pool.join("a", budget=1)
    for budget in (-1, 3):
        with pytest.raises(ValueError, match=f"budget={budget}: must be from 0 to the 2 pages"):
            pool.set_budget("a", budget)
    with pytest.raises(ValueError, match="num_pages=0"):
        PagePool(0)
    with pytest.raises(ValueError, match="blocks_per_page=0"):
        PageShare(pool, "b", budget=1, block_size=1, blocks_per_page=0)
