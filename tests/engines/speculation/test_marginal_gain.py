"""The marginal gain of draft tokens against brute force, and what is learnt of drafts against counts."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from engines.speculation.calibration import Calibration
from engines.speculation.drafter import NO_DRAFT, Draft
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import Prices
from tests.states import asks, make_state


def stairs(rows: int) -> float:
    """A pass is bound by memory up to 8 rows, and by arithmetic from there on."""
    return 1.0 + 0.002 * rows + max(0, rows - 8) * 0.1


def random_drafts(rng: random.Random, count: int) -> list[Draft]:
    drafts = []
    for _ in range(count):
        shares = [rng.choice([1.0, 0.9, 0.75, 0.5, 0.25]) for _ in range(rng.randint(0, 4))]
        drafts.append(Draft([7] * len(shares), list(itertools.accumulate(shares, lambda a, b: a * b))))
    return drafts


def lengths(policy: MarginalGain, num_tokens: int, drafts: list[Draft], num_draws: int | None = None) -> list[int]:
    num_draws = len(drafts) if num_draws is None else num_draws
    return [len(draft.tokens) for draft in policy.shorten([], drafts, num_tokens, num_draws)]


@pytest.mark.parametrize("seed", range(40))
def test_marginal_gain_against_all_lengths(seed: int) -> None:
    """Beside chunks of prompts, and sequences that draw and may take no draft."""
    rng = random.Random(seed)
    drafts = random_drafts(rng, rng.randint(1, 4))
    num_draws = len(drafts) + rng.randint(0, 6)
    num_tokens = num_draws + rng.choice([0, rng.randint(0, 6)])
    policy = MarginalGain(Prices(stairs))
    for _ in range(rng.randint(0, 30)):
        probabilities = [0.9, 0.45]
        policy.observe(make_state(0, [1]), probabilities, rng.randint(0, 2))
    paths = policy._calibration.paths(drafts) if any(draft.tokens for draft in drafts) else np.zeros((len(drafts), 0))

    def rate(counts: tuple[int, ...]) -> float:
        expected = num_draws + sum(paths[row, :count].sum() for row, count in enumerate(counts))
        return float(expected / stairs(num_tokens + sum(counts)))

    choices = list(itertools.product(*(range(len(draft.tokens) + 1) for draft in drafts)))
    best, plain = max(map(rate, choices)), rate((0,) * len(drafts))
    found = lengths(policy, num_tokens, drafts, num_draws)
    assert all(0 <= length <= len(draft.tokens) for length, draft in zip(found, drafts, strict=True))
    if best > 1.1 * plain:
        assert rate(tuple(found)) == pytest.approx(best, rel=1e-12)
    else:
        assert not any(found)


@pytest.mark.parametrize("num_listed", [1, 64])
def test_a_row_is_worth_no_less_where_few_of_those_that_draw_are_offered_drafts(num_listed: int) -> None:
    """A row costs 2 % more, and 64 sequences draw: a sure token adds 1/64 to what the pass yields."""
    policy = MarginalGain(Prices(lambda rows: 1.02**rows), margin=0.0)
    sure = Draft([1, 2, 3, 4], [1.0] * 4)
    assert not any(lengths(policy, 64, [sure] + [NO_DRAFT] * (num_listed - 1), num_draws=64))
    assert lengths(policy, 1, [sure], num_draws=1) == [4]


def test_calibration_learns_how_often_tokens_are_drawn() -> None:
    """Half of all tokens that seem certain are drawn, and all of those that seem to be at 0.55."""
    calibration, rng = Calibration(), random.Random(0)
    before = calibration.paths([Draft([1, 2], [1.0, 0.55])])[0]
    assert before == pytest.approx([0.95, 0.95 * 0.55])
    for _ in range(4000):
        calibration.observe([1.0, 0.55], 2 if rng.random() < 0.5 else 0)
    assert calibration.paths([Draft([1, 2], [1.0, 0.55]), NO_DRAFT])[0] == pytest.approx([0.5, 0.5], abs=0.03)
    for _ in range(4000):  # the text changes: the past does not weigh more than the present
        calibration.observe([1.0], 1)
    assert calibration.paths([Draft([1], [1.0])])[0] == pytest.approx([1.0], abs=0.2)


def test_where_nothing_is_worth_it_drafts_are_seldom_looked_up_until_the_batch_is_smaller() -> None:
    policy = MarginalGain(Prices(lambda rows: float(rows)))  # each row costs as much as a whole pass of one
    looked_up = []
    for step in range(400):
        if policy.wants(asks(64), 64, 64):
            looked_up.append(step)
            assert lengths(policy, 64, [Draft([1], [0.9])] * 64) == [0] * 64
    assert looked_up[:8] == list(range(8)) and 8 < len(looked_up) < 25
    assert policy.wants(asks(55), 55, 55)


def test_a_batch_that_shrinks_one_by_one_is_not_looked_up_at_each_end() -> None:
    policy, looked_up = MarginalGain(Prices(lambda rows: float(rows))), 0
    for num_running in range(64, 8, -1):
        if policy.wants(asks(num_running), num_running, num_running):
            looked_up += 1
            assert not any(lengths(policy, num_running, [Draft([1], [0.9])] * num_running))
    assert looked_up < 30


@pytest.mark.parametrize("pass_s", [0.0, 0.1, 0.3, 1.0])
def test_the_length_that_a_small_model_drafts_against_brute_force(pass_s: float) -> None:
    """Each token of the longest draft takes another pass of `pass_s`, and 0.9 of the draft tokens are drawn."""
    policy = MarginalGain(Prices(stairs, lambda num_sequences, length: pass_s * length), margin=0.0)
    for _ in range(2000):
        policy.observe(make_state(0, [1]), [1.0] * 9, 9)
        policy.observe(make_state(0, [1]), [1.0], 0)
    for count in (1, 3, 20):

        def rate(length: int, count: int = count) -> float:
            gained = sum(policy._acceptance**place for place in range(1, length + 1))
            return float((count + 2 + count * gained) / (stairs(count + 2 + count * length) + pass_s * length))

        best = max(range(9), key=rate) if pass_s else 8
        wanted = policy.wants(asks(count, 8), count + 2, count + 2)
        assert [ask.limit for ask in wanted] == [best] * count if best else not wanted


def test_a_dearer_drafter_drafts_less() -> None:
    def length(pass_s: float) -> int:
        policy = MarginalGain(Prices(lambda rows: 1.0, lambda num_sequences, length: pass_s * length))
        return sum(ask.limit for ask in policy.wants(asks(1, 8), 1, 1))

    lengths = [length(pass_s) for pass_s in (0.01, 0.1, 0.3, 1.0)]
    assert lengths == sorted(set(lengths), reverse=True) and lengths[-1] == 0


def test_after_a_bad_phase_drafts_are_tried_again() -> None:
    policy, draft = MarginalGain(Prices(lambda rows: 1 + 0.05 * rows)), Draft([1, 2, 3], [0.99, 0.98, 0.97])
    for _ in range(300):
        policy.observe(make_state(0, [1]), draft.probabilities, 0)
    assert lengths(policy, 1, [draft]) == [0]
    assert any(lengths(policy, 1, [draft]) != [0] for _ in range(20_000) if policy.wants(asks(1), 1, 1))


def test_a_pass_that_costs_nothing_more_takes_all_drafts() -> None:
    policy = MarginalGain(Prices(lambda rows: 1.0))
    drafts = [Draft([1, 2, 3], [0.5, 0.25, 0.1]), NO_DRAFT, Draft([4], [0.2])]
    assert policy.wants(asks(3), 3, 3) and lengths(policy, 3, drafts) == [3, 0, 1]
    assert lengths(policy, 3, [NO_DRAFT] * 3) == [0] * 3


def random_paths(rng: random.Random) -> Draft:
    """Paths through a random tree, in which the children of a node share its probability."""
    paths: list[tuple[list[int], list[float]]] = [([], [])]
    for _ in range(rng.randint(1, 4)):
        longer = []
        for tokens, probabilities in paths:
            shares = rng.choice([[1.0], [0.6, 0.3], [0.5, 0.4, 0.1], [0.9]])
            score = probabilities[-1] if probabilities else 1.0
            longer += [([*tokens, token], [*probabilities, score * share]) for token, share in enumerate(shares)]
        paths = longer
    paths = sorted(paths, key=lambda path: -path[1][-1])[: rng.randint(1, 5)]
    first, *others = [Draft(*path) for path in paths]
    return first._replace(others=tuple(others))


def nodes(draft: Draft) -> dict[tuple[int, tuple[int, ...]], float]:
    """Each token that some path has, with the path up to it."""
    found = {}
    for path in (draft, *draft.others):
        for length in range(1, len(path.tokens) + 1):
            found[length, tuple(path.tokens[:length])] = path.probabilities[length - 1]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_other_paths_join_where_they_raise_the_rate(seed: int) -> None:
    """Against all choices of lengths, each path a row per token and one more; the estimates are taken as they are."""
    rng = random.Random(seed)
    draft, num_tokens = random_paths(rng), rng.randint(1, 8)
    policy = MarginalGain(Prices(stairs), margin=0.0)
    policy._calibration.paths = lambda drafts: padded([one.probabilities for one in drafts])  # type: ignore[method-assign]

    def rate(chosen: Draft) -> float:
        rows = len(chosen.tokens) + sum(1 + len(path.tokens) for path in chosen.others)
        return (1 + sum(nodes(chosen).values())) / stairs(num_tokens + rows)

    (found,) = policy.shorten([], [draft], num_tokens, 1)
    assert nodes(found).items() <= nodes(draft).items() and len(found.others) <= len(draft.others)
    (alone,) = policy.shorten([], [draft._replace(others=())], num_tokens, 1)
    assert rate(found) >= rate(alone) - 1e-12
    ranges = [range(len(path.tokens) + 1) for path in (draft, *draft.others)]
    best = max(rate(draft.cut(first, rest)) for first, *rest in itertools.islice(itertools.product(*ranges), 4000))
    assert rate(found) >= 0.93 * best, "a path is taken whole or not at all, so the best may be missed by a little"


def padded(rows: list[list[float]]) -> np.ndarray:
    longest = max(map(len, rows))
    return np.array([[*row, *[0.0] * (longest - len(row))] for row in rows])


def test_other_paths_are_taken_where_rows_cost_nothing_and_left_where_they_cost() -> None:
    draft = Draft([1, 2, 3], [0.6, 0.6, 0.5], (Draft([1, 4], [0.6, 0.1]), Draft([7], [0.3])))
    (every,) = MarginalGain(Prices(lambda rows: 1.0)).shorten([], [draft], 1, 1)
    assert every == draft
    (first,) = MarginalGain(Prices(lambda rows: float(rows))).shorten([], [draft], 1, 1)
    assert not first.others


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MarginalGain.margin=-0.1: must be at least 0"):
        MarginalGain(Prices(stairs), margin=-0.1)
