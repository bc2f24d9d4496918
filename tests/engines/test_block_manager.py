import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kvcache.block_manager import BlockManager

OPERATION = st.tuples(st.sampled_from(["grow", "release"]), st.integers(0, 5), st.integers(1, 40))
OPERATIONS = st.lists(OPERATION, max_size=60)


@settings(max_examples=300, deadline=None)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 12), block_size=st.integers(1, 8))
def test_against_a_plain_record_of_who_holds_how_many(
    operations: list[tuple[str, int, int]], num_blocks: int, block_size: int
) -> None:
    manager = BlockManager(num_blocks, block_size)
    held: dict[int, list[int]] = {}
    for operation, holder, num_tokens in operations:
        before = held.get(holder, [])
        if operation == "release":
            manager.release(holder)
            held.pop(holder, None)
        else:
            need = max(-(-num_tokens // block_size) - len(before), 0)
            free = num_blocks - sum(map(len, held.values()))
            assert manager.can_grow(holder, num_tokens) == (need <= free)
            if need <= free:
                added = manager.grow(holder, num_tokens)
                assert len(added) == need
                if need:
                    held[holder] = before + added
            else:
                with pytest.raises(RuntimeError, match="free"):
                    manager.grow(holder, num_tokens)
        manager.check_integrity()
        assert {h: manager.table(h) for h in held} == held
        assert manager.num_free_blocks == num_blocks - sum(map(len, held.values()))


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
