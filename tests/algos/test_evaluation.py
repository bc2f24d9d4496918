"""pass@k against brute force, exact fractions and Monte Carlo."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.evaluation import pass_at_k


@pytest.mark.parametrize("num_samples", range(1, 9))
def test_equals_the_share_of_subsets_with_a_right_completion(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        is_right = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(is_right, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.integers(1, 3000), st.data())
def test_equals_the_exact_fraction(num_samples: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    exact = 1 - Fraction(comb(num_samples - num_correct, k), comb(num_samples, k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(float(exact), abs=1e-12)


def test_is_unbiased() -> None:
    """The mean of the estimate over draws of n completions is 1 - (1 - p)^k; that of 1 - (1 - c/n)^k is not."""
    rng = random.Random(0)
    num_samples, k, p, num_trials = 8, 4, 0.2, 20_000
    counts = [sum(rng.random() < p for _ in range(num_samples)) for _ in range(num_trials)]
    expected = 1 - (1 - p) ** k
    estimates = [pass_at_k(num_samples, count, k) for count in counts]
    mean = sum(estimates) / num_trials
    standard_error = (sum((x - mean) ** 2 for x in estimates) / num_trials**2) ** 0.5
    assert abs(mean - expected) < 4 * standard_error
    naive = sum(1 - (1 - count / num_samples) ** k for count in counts) / num_trials
    assert abs(naive - expected) > 4 * standard_error


def test_edges() -> None:
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 10, 1) == 1.0
    assert pass_at_k(10, 1, 10) == 1.0
    assert pass_at_k(4, 3, 1) == pytest.approx(0.75)
    assert pass_at_k(10**6, 1, 10**6 - 1) == pytest.approx(1 - 1e-6, abs=1e-12)
