"""Seer's thresholds: one length for all drafts."""

from __future__ import annotations

import pytest

from engines.speculation.drafter import Draft
from engines.speculation.policy import Prices
from research.seer.thresholds import Thresholds
from tests.engines.speculation.test_marginal_gain import stairs
from tests.states import asks, make_state


def lengths(policy: Thresholds, num_tokens: int, drafts: list[Draft]) -> list[int]:
    return [len(draft.tokens) for draft in policy.shorten([], drafts, num_tokens, num_tokens)]


def test_thresholds() -> None:
    """Up to 8 rows cost about the same; 4 sequences share them, one token of draft each."""
    policy = Thresholds(Prices(stairs), slack=1.1)
    long = Draft([1] * 9, [1.0] * 9)
    assert policy.wants(asks(4), 4, 4) and lengths(policy, 4, [long] * 4) == [1] * 4
    assert lengths(policy, 1, [long]) == [7]
    assert not policy.wants(asks(8), 8, 8)
    for _ in range(200):
        policy.observe(make_state(0, [1]), [1.0] * 4, 1)  # a quarter is accepted
    assert lengths(policy, 1, [long]) == [1] and not policy.wants(asks(4), 4, 4)
    assert any(policy.wants(asks(4), 4, 4) for _ in range(1000)), "it is tried again"


def test_other_paths_take_what_is_left_of_the_share() -> None:
    draft = Draft([1, 2, 3], [0.6, 0.6, 0.5], (Draft([1, 4], [0.6, 0.1]), Draft([7], [0.3])))
    few = Thresholds(
        Prices(stairs), slack=1.1
    )  # 7 rows: 3 at an acceptance of a half, and another path of 3 and one more
    few._acceptance = 0.5
    (cut,) = few.shorten([], [draft], 1, 1)
    assert len(cut.tokens) == 3 and cut.others == (draft.others[0],)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack": 0.9}, r"Thresholds.slack=0.9: must be at least 1"),
        ({"most": 0}, r"Thresholds.most=0: must be"),
    ],
)
def test_what_they_refuse(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Thresholds(Prices(stairs), **options)  # type: ignore[arg-type]
