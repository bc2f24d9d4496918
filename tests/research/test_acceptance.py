"""Replayed acceptance against closed forms."""

from __future__ import annotations

import random

import pytest

from engines.speculation.suffix_tree import SpeculationArgs
from research.seer.acceptance import acceptance_length, tokens_per_step

PROMPT = [1, 2, 3]
ARGS = SpeculationArgs(max_spec_tokens=8)


def test_a_reference_that_is_the_target_yields_whole_drafts() -> None:
    """Each step yields 8 draft tokens and the one behind them: 40 tokens take 5 steps."""
    target = list(range(10, 50))
    assert tokens_per_step(PROMPT, target, [target], ARGS) == 40 / 5
    assert tokens_per_step(PROMPT, target, [], ARGS) == 1.0, "nothing occurs twice"


def test_of_several_paths_the_best_counts() -> None:
    target, other = [10, 11, 12, 13, 14], [20, 11, 22, 13, 24]
    assert tokens_per_step([7], target, [other, other, target], ARGS) == 5 / 2, (
        "the first path is the more frequent one"
    )
    assert tokens_per_step([7], target, [other, other, target], SpeculationArgs(top_k=2)) == 5 / 1


def test_more_references_and_more_paths_yield_more() -> None:
    rng = random.Random(0)
    text = [rng.randrange(30) for _ in range(60)]
    groups = [[[token if rng.random() < 0.9 else rng.randrange(30) for token in text] for _ in range(8)]]
    lengths = [
        [acceptance_length([PROMPT], groups, num_references=count, args=SpeculationArgs(top_k=k)) for k in (1, 2, 4)]
        for count in (0, 1, 3, 7)
    ]
    assert all(row == sorted(row) for row in lengths)
    assert all(list(column) == sorted(column) for column in zip(*lengths, strict=True))
    assert lengths[0][0] < 1.5 < 2.5 < lengths[-1][-1]
    with pytest.raises(ValueError, match="num_references=8: a group of 8 has 7; give fewer"):
        acceptance_length([PROMPT], groups, num_references=8, args=ARGS)
