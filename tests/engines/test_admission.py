"""Who may enter, by hand; the most blocks at one time, against passes one by one."""

from __future__ import annotations

import random

import pytest

from engines.kvcache.block_manager import BlockManager
from engines.replica.admission import Admission, peak_blocks
from engines.replica.schedule import Sequence
from tests.states import make_state


def count(stays: list[tuple[int, int]], num_passes: int, block_size: int) -> int:
    """Returns the blocks of the sequences that are still there after so many passes."""
    return sum(-(-(n + num_passes) // block_size) for n, end in stays if n + num_passes < end)


@pytest.mark.parametrize("seed", range(50))
def test_the_peak_is_that_of_passes_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 4, 16])
    stays = [(n := rng.randint(1, 60), n + rng.randint(1, 40)) for _ in range(rng.randint(1, 20))]
    others = [rng.randint(1, 9) for _ in range(rng.randint(0, 3))]
    by_pass = [sum(others) + count(stays, num_passes, size) for num_passes in range(41)]
    assert peak_blocks(stays, others, block_size=size, num_held=by_pass[0]) == max(by_pass)


@pytest.mark.parametrize("seed", range(50))
def test_no_order_of_extra_tokens_exceeds_the_peak(seed: int) -> None:
    rng = random.Random(seed)
    size, num_ahead = rng.choice([1, 4, 16]), rng.randint(1, 9)
    stays = [(n := rng.randint(1, 60), n + rng.randint(1, 40)) for _ in range(rng.randint(1, 12))]
    first = count(stays, 0, size)
    peak = peak_blocks(stays, [], block_size=size, num_held=first, num_ahead=num_ahead)
    for _ in range(50):
        staying = [(n, end, num_ahead) for n, end in stays]
        while staying:
            assert sum(-(-n // size) for n, _, _ in staying) <= peak
            gains = [rng.randint(0, left) if rng.random() < 0.3 else 0 for _, _, left in staying]
            after = [(n + 1 + gain, end, left - gain) for (n, end, left), gain in zip(staying, gains, strict=True)]
            staying = [(n, end, left) for n, end, left in after if n < end]


def test_many_departures_are_not_underrated() -> None:
    rng = random.Random(1)
    stays = [(n := rng.randint(1, 9000), n + rng.randint(1, 2000)) for _ in range(700)]
    by_pass = [count(stays, num_passes, 16) for num_passes in range(2001)]
    assert max(by_pass) <= peak_blocks(stays, [], block_size=16, num_held=by_pass[0]) < 1.01 * max(by_pass)


def test_what_sequences_share_counts_once_and_stays_with_the_last() -> None:
    """Two hold 8 blocks each, the same first six; one leaves at once, and its block that the other lacks with it."""
    assert peak_blocks([(32, 33), (32, 34)], [], block_size=4, num_held=10) == 10
    assert peak_blocks([(32, 33), (32, 50)], [], block_size=4, num_held=10) == 13, "49 tokens without what was shared"
    assert peak_blocks([(32, 33), (32, 99)], [8], block_size=4, num_held=12) == 29


def test_without_bounded_stays_all_is_held() -> None:
    assert peak_blocks([], [3, 4], block_size=4, num_held=6) == 6
    assert peak_blocks([], [], block_size=4, num_held=0) == 0


def waiting(num_tokens: int, release_len: int, *, is_bounded: bool) -> Sequence:
    state = make_state(0, [1] * num_tokens)
    return Sequence(state=state, max_len=release_len, release_len=release_len, is_bounded=is_bounded)


def enter(admission: Admission, blocks: BlockManager, num_tokens: int, release_len: int, *, bounded: bool) -> Sequence:
    sequence = waiting(num_tokens, release_len, is_bounded=bounded)
    blocks.grow(sequence, num_tokens)
    sequence.blocks = blocks.table(sequence)
    admission.keep_free(sequence)
    return sequence


def test_free_blocks_are_kept_for_those_that_run() -> None:
    """10 blocks: a bounded one holds 2 and may need 2 more, one without a bound holds 1 and may grow. 4 are left."""
    blocks = BlockManager(10, 4)
    admission = Admission(blocks)
    bounded = enter(admission, blocks, 5, 17, bounded=True)
    unbounded = enter(admission, blocks, 4, 41, bounded=False)
    assert admission.num_kept_free == {True: 2, False: 1}
    assert (admission.num_left_free(bounded), admission.num_left_free(unbounded)) == (0, 2)

    def admits(num_tokens: int, release_len: int, *, is_bounded: bool) -> bool:
        sequence = waiting(num_tokens, release_len, is_bounded=is_bounded)
        return admission.admits(sequence, [], [bounded, unbounded], [bounded, unbounded], 0)

    assert admits(16, 99, is_bounded=False) and not admits(17, 99, is_bounded=False)
    assert admits(1, 17, is_bounded=True) and not admits(1, 18, is_bounded=True)
    admission.forget(bounded)
    assert admits(1, 25, is_bounded=True) and admission.num_left_free(unbounded) == 0


def test_bounded_ones_enter_where_all_leave_in_time() -> None:
    """4 blocks, 2 of which are held. Each of the two that run may need another one, but not at the same time."""
    blocks = BlockManager(4, 4)
    admission = Admission(blocks)
    both = [enter(admission, blocks, *lengths, bounded=True) for lengths in ((4, 6), (3, 9))]
    one = waiting(2, 4, is_bounded=True)
    assert admission.num_kept_free[True] == blocks.num_free_blocks == 2
    assert admission.admits(one, [], both, both, 0)
    assert not admission.admits(one, [], both, both, 1), "drafts may let both need it in the next pass"
    assert not admission.admits(one, [], both, both[1:], 0), "the first one may stay for many passes of its prefill"
    assert not admission.admits(waiting(2, 4, is_bounded=False), [], both, both, 0)
