"""SpecActor's formulas against known numbers, and against drafter and verifier, played event by event."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from research.specactor.throughput import (
    DecoupledMode,
    Pair,
    accept_distribution,
    coupled,
    decoupled,
    drawn,
    printed_tau,
    renewal_tau,
)
from tests.research.specactor_world import Played

PROBABILITIES = [0.01, 0.2, 0.5, 0.7, 0.9, 0.99]


def played(pair: Pair, p: float, window: int, mode: DecoupledMode, seed: int = 0) -> tuple[float, float]:
    """Returns tokens per second and rows of a sequence."""
    game = Played(
        draft_s=lambda _: pair.draft_s,
        verify_s=lambda rows: pair.verify(rows / pair.batch),
        p=p,
        window=window,
        mode=mode,
        batch=pair.batch,
        delay_s=pair.delay_s,
        seed=seed,
    )
    rate = game.rate(24_000 // pair.batch)
    return rate, game.num_rows / game.num_passes / pair.batch


@pytest.mark.parametrize("p", PROBABILITIES)
def test_sums_of_the_distribution_of_accepted_guesses(p: float) -> None:
    for window in range(1, 9):
        chances = np.array(accept_distribution(p, window))
        assert chances.sum() == pytest.approx(1)
        tokens = np.arange(1, window + 2)
        assert drawn(p, window + 1) == pytest.approx(chances @ tokens), "coupled: a token more than was accepted"
        tokens[-1] = window
        assert drawn(p, window) == pytest.approx(chances @ tokens), "a whole window yields no token more"
        assert renewal_tau(p, window) == pytest.approx(chances @ tokens / (1 + chances[:-1].sum()))
    assert coupled(p, 0, 0.0, 0.25) == 4, "plain decoding"


def test_the_printed_tau_is_too_high_and_does_not_rise_with_the_window() -> None:
    known = {(0.7, 4): (1.747, 1.439), (0.8, 6): (2.631, 2.123), (0.9, 8): (4.570, 3.629), (0.95, 8): (6.020, 5.036)}
    for (p, window), taus in known.items():
        assert (printed_tau(p, window), renewal_tau(p, window)) == pytest.approx(taus, abs=1e-3)
    for p in PROBABILITIES:
        printed, renewal = (np.array([tau(p, w) for w in range(1, 33)]) for tau in (printed_tau, renewal_tau))
        assert (printed > renewal).all() and (np.diff(renewal) > -1e-12).all()
        for taus in (printed, renewal):
            assert (np.diff(taus / np.arange(1, 33)) <= 1e-12).all(), "no window beyond w D = V helps"
    assert printed_tau(0.7, 4) > printed_tau(0.7, 32)


@pytest.mark.parametrize(("p", "batch"), [(0.5, 4), (0.8, 4), (0.95, 4), (0.8, 16)])
def test_a_filled_verifier_is_as_fast_as_played(p: float, batch: int) -> None:
    """V rises with the rows that there are."""
    for window, ratio in ((1, 3.6), (2, 1.3), (2, 5.2), (3, 2.4), (4, 3.5), (6, 5.37), (3, 3.2)):
        pair = Pair(0.5, lambda rows, ratio=ratio: 0.5 * ratio * (1 + 0.02 * rows), batch)  # type: ignore[misc]
        found = decoupled(pair, p, window, "filled")
        rate, rows = played(pair, p, window, "filled")
        assert found.tokens_per_second == pytest.approx(rate, rel=0.01), (window, ratio)
        assert found.rows == pytest.approx(rows, rel=0.02), (window, ratio)


def test_a_filled_verifier_with_delayed_messages() -> None:
    """A delay of less than a pass costs a part of what the drafter makes after a miss."""
    for window, ratio in ((2, 5.2), (4, 3.5), (4, 7.1), (3, 4.6)):
        pair = Pair(1.0, lambda _, ratio=ratio: ratio, 16)  # type: ignore[misc]
        late = replace(pair, delay_s=0.4)
        found = decoupled(late, 0.8, window, "filled")
        assert found.tokens_per_second == pytest.approx(played(late, 0.8, window, "filled")[0], rel=0.02)
        assert found.tokens_per_second <= decoupled(pair, 0.8, window, "filled").tokens_per_second


def test_a_drafter_that_is_slower_than_its_verifier_gives_nothing() -> None:
    pair = Pair(1.0, lambda _: 0.9, 8)
    assert decoupled(pair, 0.9, 4, "filled") == (pytest.approx(1 / 0.9), 1.0)
    assert played(pair, 0.9, 4, "filled") == (pytest.approx(1 / 0.9, rel=0.01), 1.0)


@pytest.mark.parametrize("p", [0.6, 0.8, 0.95])
def test_whole_windows_are_as_fast_as_played(p: float) -> None:
    """Where w D is at least V, or (w + 1) D is at most V, a miss costs a period, as in `renewal_tau`."""
    for window, ratio in ((3, 2.4), (4, 3.5), (1, 2.6), (2, 3.3), (4, 7.1)):
        pair = Pair(1.0, lambda _, ratio=ratio: ratio, 16)  # type: ignore[misc]
        rate = played(pair, p, window, "strict")[0]
        assert rate == pytest.approx(renewal_tau(p, window) / max(window, ratio), rel=0.01), (window, ratio)
        assert rate == pytest.approx(decoupled(pair, p, window, "strict").tokens_per_second, rel=0.01)
    for window, ratio in ((2, 2.4), (3, 3.5)):
        pair = Pair(1.0, lambda _, ratio=ratio: ratio, 64)  # type: ignore[misc]
        rate = played(pair, p, window, "strict")[0]
        found = decoupled(pair, p, window, "strict").tokens_per_second
        assert rate < 0.94 * renewal_tau(p, window) / ratio, "in between it often costs two periods"
        assert found == pytest.approx(rate, rel=0.11)


def test_whole_windows_without_a_miss_take_a_period_each() -> None:
    for window, ratio in ((3, 3.2), (5, 4.5), (6, 5.9), (1, 1.4)):
        pair = Pair(1.0, lambda _, ratio=ratio: ratio, 16)  # type: ignore[misc]
        for rate in (decoupled(pair, 1.0, window, "strict").tokens_per_second, played(pair, 1.0, window, "strict")[0]):
            assert rate == pytest.approx(window / max(window, ratio), rel=0.01)
