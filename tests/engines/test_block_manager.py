import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kvcache.block_manager import BlockManager, content_key

OPERATION = st.tuples(
    st.sampled_from(["grow", "grow", "release", "publish", "share", "forget", "stretch", "shrink", "take over"]),
    st.integers(0, 5),
    st.integers(1, 40),
)
OPERATIONS = st.lists(OPERATION, max_size=60)


@settings(max_examples=500, deadline=None)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 12), block_size=st.integers(1, 8))
def test_against_a_plain_record_of_who_holds_what(
    operations: list[tuple[str, int, int]], num_blocks: int, block_size: int
) -> None:
    """The record: each holder's blocks, each block's content, and since when a block of known content is free."""
    manager = BlockManager(num_blocks, block_size)
    held: dict[int, list[int]] = {}
    content: dict[int, bytes] = {}
    freed_at: dict[int, int] = {}
    now = 0

    def in_use() -> set[int]:
        return {block for blocks in held.values() for block in blocks}

    def lose(added: list[int], free: set[int]) -> None:
        """Contents are lost of the oldest blocks, and only where nothing else was free."""
        kept = free - set(added)
        lost = [block for block in added if block in content]
        if lost:
            assert all(block in content for block in kept)
            assert all(freed_at[a] < freed_at[b] for a in lost for b in kept)
        for block in lost:
            del content[block]

    for operation, holder, number in operations:
        before = held.get(holder, [])
        if operation == "release":
            manager.release(holder)
            held.pop(holder, None)
            for block in reversed(before):
                if block not in in_use():
                    now += 1
                    freed_at[block] = now
        elif operation == "shrink":
            if before:
                manager.shrink(holder, number)
                held[holder] = before[: -(-number // block_size)]
                for block in reversed(before[len(held[holder]) :]):
                    if block not in in_use():
                        now += 1
                        freed_at[block] = now
        elif operation == "take over":
            other, num_kept = number % 6, number // 6
            if before and other != holder and not set(held.get(other, before)) & set(before):
                manager.take_over(holder, other, num_kept)
                held[holder] = before[:num_kept] + held.pop(other)
                for block in reversed(before[num_kept:]):
                    if block not in in_use():
                        now += 1
                        freed_at[block] = now
        elif operation == "stretch":
            even_known = number % 2 == 0
            free = set(range(num_blocks)) - in_use()
            usable = free if even_known else free - set(content)
            covered = manager.stretch(holder, number, even_known=even_known)
            added = manager.table(holder)[len(before) :]
            assert len(added) == min(max(-(-number // block_size) - len(before), 0), len(usable))
            assert set(added) <= usable and covered == min(number, (len(before) + len(added)) * block_size)
            lose(added, free)
            if added:
                held[holder] = before + added
        elif operation == "publish":
            index, key = number % (len(before) + 1), b"%d" % (number % 5)
            if index < len(before):
                manager.publish(holder, index, key)
                if before[index] not in content and key not in content.values():
                    content[before[index]] = key
        elif operation == "share":
            keys = [b"%d" % (number % 5), b"%d" % (number // 5 % 5)]
            found = manager.find(keys)
            blocks = {key: block for block, key in content.items()}
            wanted = [blocks[key] for key in keys if key in blocks] if keys[0] in blocks else []
            assert found == wanted
            assert manager.num_free_of(found) == sum(block not in in_use() for block in found)
            if not before and len(set(found)) == len(found):
                manager.share(holder, found)
                if found:
                    held[holder] = list(found)
        elif operation == "forget":
            manager.forget()
            content.clear()
        else:
            need = max(-(-number // block_size) - len(before), 0)
            free = set(range(num_blocks)) - in_use()
            assert manager.can_grow(holder, number) == (need <= len(free))
            if need <= len(free):
                added = manager.grow(holder, number)
                assert len(added) == need and set(added) <= free
                lose(added, free)
                if need:
                    held[holder] = before + added
            else:
                with pytest.raises(RuntimeError, match="free"):
                    manager.grow(holder, number)
        manager.check_integrity()
        assert {h: manager.table(h) for h in held} == held
        assert manager.num_free_blocks == num_blocks - len(in_use())
        for block, key in content.items():
            assert manager.find([key]) == [block]
        for holder in held:  # what is found again when the holder is gone: what others hold
            keys = [content[block] for block in held[holder] if block in content]
            others = {block for other, blocks_ in held.items() if other != holder for block in blocks_}
            kept = [key for key in keys if manager.find([key])[0] in others]
            assert manager.num_common(holder, keys) == next(
                (i for i, key in enumerate(keys) if key not in kept), len(keys)
            )


def test_a_key_names_its_tokens_and_all_before_them() -> None:
    keys = {content_key(before, tokens) for before in (b"", b"x") for tokens in ([1, 2], [2, 1], [1, 2, 0], [258])}
    assert len(keys) == 8
    assert content_key(b"", [1, 2]) == content_key(b"", [1, 2])


def test_integrity_check_sees_a_block_held_twice() -> None:
    manager = BlockManager(4, 2)
    manager.grow("a", 4)
    manager._free.append(manager.table("a")[0])
    with pytest.raises(AssertionError, match="twice"):
        manager.check_integrity()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(num_blocks, block_size)
