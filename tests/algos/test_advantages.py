"""Advantages and the reward rules of GRPO and DAPO, against numpy and the papers' numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algos.advantages import batch_advantages, group_advantages, leave_one_out_advantages
from algos.dapo import DAPO
from algos.grpo import GRPO

REWARD = st.floats(-10, 10, allow_nan=False)


@given(st.lists(REWARD, min_size=2, max_size=9), st.booleans())
def test_group_advantages_are_numpys(rewards: list[float], normalise_std: bool) -> None:
    want = np.array(rewards) - np.mean(rewards)
    if normalise_std:
        want = want / (np.std(rewards, ddof=1) + 1e-6)
    got = group_advantages(rewards, normalise_std=normalise_std)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@given(st.lists(REWARD, min_size=2, max_size=9))
def test_leave_one_out_advantages_are_the_rewards_less_the_mean_of_the_others(rewards: list[float]) -> None:
    want = [reward - np.mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(leave_one_out_advantages(rewards), want, atol=1e-9)


@given(st.lists(st.lists(REWARD, min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_batch_advantages_are_normalised_over_all_groups(groups: list[list[float]], group_baseline: bool) -> None:
    flat = np.concatenate([np.array(group) - group_baseline * np.mean(group) for group in groups])
    want = np.zeros(len(flat))
    if np.ptp(flat) > 1e-9:
        want = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6)
        got = batch_advantages(groups, group_baseline=group_baseline)
        assert [len(group) for group in got] == [len(group) for group in groups]
        np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-5, atol=1e-5)


def test_normalisation_over_the_batch_keeps_what_groups_tell_apart() -> None:
    """A solved and a failed group: nothing to learn within them; without baseline there is between them."""
    solved, failed = [1.0] * 4, [0.0] * 4
    assert batch_advantages([solved, failed], group_baseline=True) == [[0.0] * 4, [0.0] * 4]
    (high, *_), (low, *_) = batch_advantages([solved, failed], group_baseline=False)
    assert high == -low > 0.9


@pytest.mark.parametrize("value", [0.1, 1.0, -3.3])
def test_equal_rewards_and_lone_completions_have_no_advantage(value: float) -> None:
    # 0.1 x 3 has a mean that is not 0.1: a rounding that 1 / eps must not amplify.
    assert group_advantages([value] * 3) == [0.0] * 3 and group_advantages([value]) == [0.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e308])
def test_rewards_must_be_finite(reward: float) -> None:
    with pytest.raises(ValueError, match=r"rewards=\[0.0, 1.0, (nan|inf|1e\+308)\]: must be from -1e30 to 1e30"):
        group_advantages([0.0, 1.0, reward])
    large = [0.0, 1e30, -1e30, 1e30]
    assert np.isfinite(np.float32([group_advantages(large), leave_one_out_advantages(large)])).all()


def test_grpo_keeps_everything_as_it_is() -> None:
    grpo = GRPO()
    assert grpo.keep_group([1.0, 1.0])
    assert grpo.shape_rewards([1.0, 0.0], [10, 100], [False, True], 100) == [1.0, 0.0]
    assert grpo.loss_mask(100, True)
    assert GRPO(normalise_std=False).advantages([[1.0, 0.0, 0.0, 0.0]]) == [[0.75, -0.25, -0.25, -0.25]]


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(1, 0.0), (16384, 0.0), (16384 + 1024, -0.25), (16384 + 2048, -0.5), (20480, -1.0)],
)
def test_daposs_overlong_punishment_is_the_papers(length: int, punishment: float) -> None:
    """§4.1: expected maximum 16384 tokens, and 4096 more as the soft punishment's cache."""
    dapo = DAPO(overlong_buffer_fraction=0.2, overlong_factor=1.0)
    assert dapo.shape_rewards([1.0], [length], [False], 20480) == pytest.approx([1.0 + punishment])
    half = DAPO(overlong_buffer_fraction=0.2, overlong_factor=0.5)
    assert half.shape_rewards([1.0], [length], [False], 20480) == pytest.approx([1.0 + punishment / 2])
    assert DAPO(overlong_buffer_fraction=0).shape_rewards([1.0], [length], [False], 20480) == [1.0]


def test_dapo_keeps_groups_that_teach() -> None:
    assert DAPO().keep_group([0.0, 1.0, 0.0])
    assert not DAPO().keep_group([1.0, 1.0, 1.0])
    assert not DAPO().keep_group([0.0, 0.0])
    assert DAPO(dynamic_sampling=False).keep_group([0.0, 0.0])


def test_overlong_filtering_masks_truncated_completions() -> None:
    assert not DAPO(overlong_filtering=True).loss_mask(100, True)
    assert DAPO(overlong_filtering=True).loss_mask(100, False)
    assert DAPO().loss_mask(100, True)


@pytest.mark.parametrize(
    ("algorithm", "field", "value"),
    [
        (GRPO, "ratio_clip_low", 0.0),
        (GRPO, "kl_coef", -1.0),
        (GRPO, "dual_clip", 1.0),
        (DAPO, "ratio_clip_high", -0.1),
        (DAPO, "overlong_buffer_fraction", 1.5),
        (DAPO, "max_sampling_rounds", 0),
        (DAPO, "loss_aggregation", "mean"),
        (GRPO, "kl_estimator", "k4"),
        (GRPO, "importance_correction", "both"),
    ],
)
def test_hyperparameters_are_refused_by_name(algorithm: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{algorithm.__name__}\.{field}={value!r}: must be"):
        algorithm(**{field: value})
