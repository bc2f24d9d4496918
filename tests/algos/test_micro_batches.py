"""Micro-batch plans against exhaustive search, and their invariants on random mini-batches."""

from __future__ import annotations

import itertools
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algos.batch import collate, spread
from algos.micro_batches import cut_rows, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def cost_of(lengths: list[int], cuts: list[int], overhead: int) -> int:
    return sum((end - start) * lengths[start] + overhead for start, end in itertools.pairwise(cuts))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 80), st.integers(1, 9), st.integers(0, 40))
def test_cuts_are_the_best_of_all(lengths: list[int], budget: int, max_rows: int, overhead: int) -> None:
    lengths = sorted(lengths, reverse=True)

    def fits(cuts: list[int]) -> bool:
        return all(
            end - start == 1 or (end - start <= max_rows and (end - start) * lengths[start] <= budget)
            for start, end in itertools.pairwise(cuts)
        )

    inner = range(1, len(lengths))
    candidates = [
        [0, *chosen, len(lengths)] for count in range(len(lengths)) for chosen in itertools.combinations(inner, count)
    ]
    best = min(cost_of(lengths, cuts, overhead) for cuts in candidates if fits(cuts))
    cuts = cut_rows(lengths, budget, max_rows, overhead)
    assert cuts[0] == 0 and cuts[-1] == len(lengths) and fits(cuts)
    assert cost_of(lengths, cuts, overhead) == best


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 200), st.integers(1, 5), st.none() | st.integers(1, 6))
def test_every_sequence_is_computed_once_in_lockstep_and_in_budget(
    lengths: list[int], budget: int, num_ranks: int, max_rows: int | None
) -> None:
    plan = plan_micro_batches(lengths, budget, num_ranks, max_rows=max_rows)
    flat = [index for micro_batch in plan.micro_batches for members in micro_batch for index in members]
    assert sorted(flat) == list(range(len(lengths)))
    padded = 0
    for micro_batch in plan.micro_batches:
        assert len(micro_batch) == num_ranks
        assert max(map(len, micro_batch)) - min(map(len, micro_batch)) <= 1
        for members in micro_batch:
            longest = max((lengths[index] for index in members), default=1)
            assert len(members) <= (max_rows or len(lengths))
            assert len(members) * longest <= budget or len(members) == 1
            padded += max(1, len(members)) * longest
    assert (plan.num_tokens, plan.num_padded_tokens) == (sum(lengths), padded)
    assert plan.num_tokens <= plan.num_padded_tokens
    assert len({len(plan.of_rank(rank)) for rank in range(num_ranks)}) == 1


def test_long_tails_cost_little_padding() -> None:
    """Log-normal lengths, as rollouts have: padding all rows to the longest would be mostly padding."""
    rng = random.Random(0)
    lengths = [min(1024, 1 + int(rng.lognormvariate(4.6, 0.9))) for _ in range(256)]
    assert 1 - sum(lengths) / (len(lengths) * max(lengths)) > 0.7
    plan = plan_micro_batches(lengths, 4096, 2)
    assert 1 - plan.num_tokens / plan.num_padded_tokens < 0.1


def test_a_sequence_beyond_the_budget_goes_alone() -> None:
    plan = plan_micro_batches([5, 100, 5], 10, 1)
    assert plan.micro_batches == [[[1]], [[0, 2]]]


def test_collate_keeps_the_positions_that_predict_completions() -> None:
    device = torch.device("cpu")
    batch = collate([([1, 2, 3, 4, 5], 3), ([6, 7, 8], 2)], device)
    assert batch.input_ids_BL.tolist() == [[1, 2, 3, 4], [6, 7, 0, 0]]
    # Position 1 is the first that any row needs: it predicts row 1's 8. Row 0 starts one later.
    assert batch.num_kept == 3
    assert batch.targets_BT.tolist() == [[0, 4, 5], [8, 0, 0]]
    assert spread([[0.5, 0.25], [0.125]], batch, torch.float32).tolist() == [[0, 0.5, 0.25], [0.125, 0, 0]]
    dummy = collate([], device)
    assert dummy.input_ids_BL.shape == (1, 1)
    assert not spread([], dummy, torch.bool).any()
