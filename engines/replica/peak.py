"""How many KV blocks sequences with a bounded stay hold at most at one time. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

MOST_DEPARTURES = 128
"""Departures that are considered one by one: 0.2 ms with 256 sequences, 0.9 ms with 1,024."""


def peak_blocks(
    stays: Items[tuple[int, int]], others: Iterable[int], *, block_size: int, num_held: int, num_ahead: int = 0
) -> int:
    """Returns a number of blocks that sequences never exceed together while they stay.

    `stays` has for each sequence its tokens n and its length e at which it leaves, n < e. Every pass computes all its
    tokens and appends one, and the sequence gives its blocks back after the pass that computes e - 1 tokens; some may
    get up to `num_ahead` tokens more in all. `others` are the blocks of sequences that may stay longer. `num_held` are
    the blocks in the first pass, with those of `others`: fewer than the sum where sequences share some. A shared block
    stays while one of its holders does.
    """
    num_others = sum(others)
    if not stays:
        return min(num_others, num_held)
    tokens, ends = np.array(stays, dtype=np.int32).T
    last = ends - 1 - tokens
    # Between two departures blocks only grow. Where there are too many, those who leave in between count to its end.
    passes = np.array(sorted(set(last.tolist())))  # np.unique takes several times as long
    passes = passes[np.linspace(0, len(passes) - 1, min(len(passes), MOST_DEPARTURES)).astype(int)]
    stay = last >= np.append(0, passes[:-1] + 1)[:, None]
    blocks = -(-np.minimum(tokens + num_ahead + passes[:, None], ends - 1) // block_size)
    unshared = num_others + (blocks * stay).sum(1)
    grown = num_held + ((blocks - -(-tokens // block_size)) * stay).sum(1)
    return int(np.minimum(unshared, grown).max())
