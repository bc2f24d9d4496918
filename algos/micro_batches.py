"""Cuts a mini-batch into micro-batches within a token budget, with little padding.

Right-padded rows under causal attention need no mask, so only a micro-batch's shape sets its cost. Sequences are sorted
by length and dealt out to the ranks in turn, so the n-th sequences of all ranks have similar lengths. All ranks cut
their sequences at the same places. They therefore run the same number of micro-batches (ZeRO's collectives run in
lockstep), of nearly the same shapes (no rank waits long).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Cost of a micro-batch besides its tokens, in tokens: launching the model's kernels (on a CPU: Python) once more.
MICRO_BATCH_OVERHEAD_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """`micro_batches[m][rank]`: indices of its sequences, longest first; empty where the rank has only a dummy row."""

    micro_batches: list[list[list[int]]]
    num_tokens: int
    """Tokens of all sequences, without padding."""
    num_padded_tokens: int
    """Tokens that all ranks together compute: sequences, padding and dummy rows."""

    def of_rank(self, rank: int) -> list[list[int]]:
        return [per_rank[rank] for per_rank in self.micro_batches]


def plan_micro_batches(
    lengths: Sequence[int], token_budget: int, num_ranks: int, *, max_rows: int | None = None
) -> MicroBatchPlan:
    """Plans micro-batches of at most `token_budget` padded tokens (and `max_rows` sequences) per rank.

    Minimises the sum of padded tokens and overhead tokens per micro-batch. A sequence longer than the budget gets a
    micro-batch of its own. Deterministic: sequences of equal length keep their order.
    """
    assert lengths and min(lengths) >= 1
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    # A row holds one sequence per rank. Its length is that of its first sequence, the longest.
    cuts = cut_rows([lengths[row[0]] for row in rows], token_budget, max_rows or len(rows), MICRO_BATCH_OVERHEAD_TOKENS)
    micro_batches, padded = [], 0
    for start, end in itertools.pairwise(cuts):
        per_rank = [[row[rank] for row in rows[start:end] if rank < len(row)] for rank in range(num_ranks)]
        padded += sum(len(members) * lengths[members[0]] if members else 1 for members in per_rank)
        micro_batches.append(per_rank)
    return MicroBatchPlan(micro_batches=micro_batches, num_tokens=sum(lengths), num_padded_tokens=padded)


def cut_rows(row_lengths: Sequence[int], token_budget: int, max_rows: int, overhead_tokens: int) -> list[int]:
    """Returns cut points 0 = c_0 < ... < c_m = R of R rows sorted longest first, by dynamic programming in O(R^2).

    Rows [c_i, c_i+1) cost (number of rows) x (length of the first) + `overhead_tokens`. Two or more rows must fit the
    budget. best[end] is the lowest cost of the first `end` rows.
    """
    num_rows = len(row_lengths)
    lengths = np.asarray(row_lengths, dtype=np.int64)
    best = np.zeros(num_rows + 1, dtype=np.int64)
    cut_before = np.zeros(num_rows + 1, dtype=np.int64)
    for end in range(1, num_rows + 1):
        starts = np.arange(max(0, end - max_rows), end)
        tokens = (end - starts) * lengths[starts]
        fits = (tokens <= token_budget) | (end - starts == 1)
        costs = np.where(fits, best[starts] + tokens + overhead_tokens, np.iinfo(np.int64).max)
        choice = int(np.argmin(costs))
        best[end], cut_before[end] = costs[choice], starts[choice]
    cuts = [num_rows]
    while cuts[-1] > 0:
        cuts.append(int(cut_before[cuts[-1]]))
    return cuts[::-1]
