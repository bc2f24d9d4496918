"""Cuts a mini-batch into micro-batches of a token budget, so that little of what is computed is padding.

Right-padded rows under causal attention need no mask, so that only the shape costs. Sequences are sorted by length and
dealt to the ranks row by row: the ranks' rows of one index are neighbours in length, and every rank cuts its rows at
the same places. So all ranks run the same number of micro-batches (ZeRO's collectives run in lockstep) of nearly the
same shapes (nobody waits).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# What a micro-batch costs beside its tokens, in tokens: launching a model's kernels (or Python on a CPU) once more.
MICRO_BATCH_OVERHEAD_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """`micro_batches[m][rank]`: indices of the sequences, longest first; empty where a rank has only a dummy row."""

    micro_batches: list[list[list[int]]]
    num_tokens: int
    """Of all sequences."""
    num_padded_tokens: int
    """Computed by all ranks together: sequences, padding and dummy rows."""

    def of_rank(self, rank: int) -> list[list[int]]:
        return [per_rank[rank] for per_rank in self.micro_batches]


def plan_micro_batches(
    lengths: Sequence[int], token_budget: int, num_ranks: int, *, max_rows: int | None = None
) -> MicroBatchPlan:
    """Micro-batches of at most `token_budget` padded tokens (and `max_rows` sequences) per rank.

    Minimises padded tokens, and overhead tokens per micro-batch. A sequence longer than the budget is a micro-batch of
    its own. Deterministic: equal lengths keep their order.
    """
    assert lengths and min(lengths) >= 1
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows = [order[start : start + num_ranks] for start in range(0, len(order), num_ranks)]
    # A row's length is its longest member's: the first.
    cuts = cut_rows([lengths[row[0]] for row in rows], token_budget, max_rows or len(rows), MICRO_BATCH_OVERHEAD_TOKENS)
    micro_batches, padded = [], 0
    for start, end in itertools.pairwise(cuts):
        per_rank = [[row[rank] for row in rows[start:end] if rank < len(row)] for rank in range(num_ranks)]
        padded += sum(len(members) * lengths[members[0]] if members else 1 for members in per_rank)
        micro_batches.append(per_rank)
    return MicroBatchPlan(micro_batches=micro_batches, num_tokens=sum(lengths), num_padded_tokens=padded)


def cut_rows(row_lengths: Sequence[int], token_budget: int, max_rows: int, overhead_tokens: int) -> list[int]:
    """Cut points 0 = c_0 < ... < c_m = R of R rows sorted longest first, by dynamic programming in O(R^2).

    Rows [c_i, c_i+1) cost (number of rows) x (length of the first) + `overhead_tokens`, and must fit the budget unless
    there is only one. best[end] is the least cost of the first `end` rows.
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
