"""Which waiting sequence may enter a replica, and which free blocks are kept for those that run. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np

from engines.kvcache.block_manager import BlockManager
from engines.replica.schedule import Sequence

MOST_DEPARTURES = 128
"""Departures that are considered one by one: 0.2 ms with 256 sequences, 0.9 ms with 1,024."""


class Admission:
    """Keeps free blocks for running sequences: all that a bounded one may still need, and one for any other that may
    grow.

    A waiting sequence may enter when the free blocks suffice for its own tokens and for those kept free; a bounded one
    also when all that run are bounded, too, and leave early enough for each other and for it.
    """

    def __init__(self, blocks: BlockManager) -> None:
        """No sequence holds any of the blocks."""
        self._blocks = blocks
        self.num_kept_free = Counter[bool]()
        """Sums of what is kept free, by whether the sequences are bounded."""

    def admits(
        self, sequence: Sequence, shared: list[int], running: Items[Sequence], decodes: Items[Sequence], num_ahead: int
    ) -> bool:
        """Whether a waiting sequence may enter that finds its first tokens in the blocks `shared`.

        `decodes` are those of the running sequences that get a token in this pass; drafts may give each of them up to
        `num_ahead` tokens more, in all.
        """
        num_tokens = sequence.release_len - 1 if sequence.is_bounded else len(sequence.state.tokens)
        num_wanted = self._blocks.blocks_for(num_tokens)
        num_taken = num_wanted - len(shared) + self._blocks.num_free_of(shared)
        if num_taken + self.num_kept_free.total() <= self._blocks.num_free_blocks:
            return True
        return sequence.is_bounded and self._leave_in_time(running, decodes, num_ahead, num_wanted, num_taken)

    def most_ahead(self, running: Items[Sequence], decodes: Items[Sequence], most: int) -> int:
        """Returns how many draft tokens, up to `most`, each decode may gain so that none lacks blocks later on."""
        if self.num_kept_free[True] <= self._blocks.num_free_blocks:
            return most  # there is room for all to their ends
        while most and not self._leave_in_time(running, decodes, most):
            most //= 2
        return most

    def num_left_free(self, sequence: Sequence) -> int:
        """Returns the blocks that a sequence may not take, since bounded ones may still need them; these take their own
        alone."""
        return 0 if sequence.is_bounded else self.num_kept_free[True]

    def keep_free(self, sequence: Sequence) -> None:
        """Keeps free what a running sequence may still need here, now that it has entered or its blocks have changed:
        all tokens but the last of `release_len` are computed. Of one without a bound, that is one block."""
        num_left = self._blocks.blocks_for(sequence.release_len - 1) - len(sequence.blocks)
        num_kept = num_left if sequence.is_bounded else min(num_left, 1)
        self.num_kept_free[sequence.is_bounded] += num_kept - sequence.num_kept_free
        sequence.num_kept_free = num_kept

    def forget(self, sequence: Sequence) -> None:
        """Keeps nothing free any more for a sequence that leaves its slot."""
        self.num_kept_free[sequence.is_bounded] -= sequence.num_kept_free
        sequence.num_kept_free = 0

    def _leave_in_time(
        self,
        running: Items[Sequence],
        decodes: Items[Sequence],
        num_ahead: int,
        num_wanted: int = 0,
        num_taken: int = 0,
    ) -> bool:
        """Whether bounded sequences leave early enough for each other, although there is less than the sum of what all
        may still need: where they decode in lockstep, or get up to `num_ahead` tokens more, and beside another one that
        needs `num_wanted` blocks, `num_taken` of which are free now."""
        num_blocks, decoding = self._blocks.num_blocks, set(decodes)
        num_held = num_blocks - self._blocks.num_free_blocks + num_taken
        if num_held > num_blocks or not all(sequence.is_bounded for sequence in running):
            return False
        behind = [sequence for sequence in running if sequence not in decoding]  # perhaps for several passes
        stays = [(len(sequence.state.tokens), sequence.release_len) for sequence in decoding]
        others = [len(sequence.blocks) + sequence.num_kept_free for sequence in behind]
        num_held += sum(sequence.num_kept_free for sequence in behind)
        size = self._blocks.block_size
        peak = peak_blocks(stays, [*others, num_wanted], block_size=size, num_held=num_held, num_ahead=num_ahead)
        return peak <= num_blocks


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
