"""The most blocks at one time, against passes one by one."""

from __future__ import annotations

import random

import pytest

from engines.replica.admission import peak_blocks


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
