"""Suffix drafters: what they copy from, that they follow the states, and their bound of memory."""

from __future__ import annotations

import random

import pytest

from engines.sequence import SequenceState
from engines.speculation.drafter import Ask, Draft, News
from engines.speculation.native_suffix_tree import load
from engines.speculation.suffix import SuffixDrafter
from tests.states import asks, make_state

TREES = 2**16 if load() is not None else 80 * 2**16
"""Bytes for about 1,000 tokens."""


def make(grouped: bool, max_bytes: int = 2**24, max_draft_tokens: int = 4) -> SuffixDrafter:
    return SuffixDrafter(grouped=grouped, max_draft_tokens=max_draft_tokens, max_bytes=max_bytes)


def one(drafter: SuffixDrafter, state: SequenceState, limit: int = 4) -> list[int]:
    (draft,) = drafter.propose([Ask(state, limit)], 1, 1)
    assert len(draft.tokens) == len(draft.probabilities) <= limit
    assert draft.probabilities == sorted(draft.probabilities, reverse=True)
    return draft.tokens


def sibling(state: SequenceState, index: int, generated: list[int]) -> SequenceState:
    other = make_state(state.key.prompt_uid, state.tokens[: state.num_prompt_tokens], index=index)
    other.tokens += generated
    return other


@pytest.mark.parametrize("grouped", [False, True])
def test_a_sequence_copies_from_its_prompt_and_from_itself(grouped: bool) -> None:
    drafter, state = make(grouped), make_state(0, [1, 2, 3, 4, 5, 6, 1, 2])
    assert one(drafter, state) == [3, 4, 5, 6]
    assert one(drafter, state, limit=2) == [3, 4]
    state.tokens += [9, 8, 7, 9]
    assert one(drafter, state)[:2] == [8, 7]


@pytest.mark.parametrize("ended", [False, True])
def test_only_a_group_copies_from_its_siblings(ended: bool) -> None:
    first = make_state(0, [1, 2])
    first.tokens += [5, 6, 7, 8]
    second, stranger = sibling(first, 1, [5]), make_state(1, [1, 2])
    stranger.tokens += [5]
    for grouped, expected in ((True, [6, 7, 8]), (False, [])):
        drafter = make(grouped)
        drafter.propose([Ask(first, 4)], 1, 1)
        if ended:
            drafter.follow(News(ended=[first]))
        assert one(drafter, second) == expected and one(drafter, stranger) == []


def test_the_last_tokens_of_an_ended_sequence_count() -> None:
    """Between its last proposal and its end a sequence has got tokens."""
    drafter, first = make(True), make_state(0, [1, 2])
    one(drafter, first)
    first.tokens += [5, 6, 7, 8]
    drafter.follow(News(ended=[first]))
    assert one(drafter, sibling(first, 1, [5])) == [6, 7, 8]


@pytest.mark.parametrize("grouped", [False, True])
def test_tokens_that_are_taken_back_and_generated_again(grouped: bool) -> None:
    """As often as a step fails: drafts are those of a drafter that sees the sequence for the first time."""
    rng, drafter = random.Random(0), make(grouped)
    state = make_state(0, [1, 2, 3])
    for _ in range(300):
        if rng.random() < 0.2:
            state.cut(rng.randint(state.num_prompt_tokens, len(state.tokens)))
            drafter.follow(News(ended=[state]))
        state.tokens += [rng.randint(0, 2) for _ in range(rng.randint(1, 3))]
        state.logprobs += [0.0] * (len(state.tokens) - state.num_prompt_tokens - len(state.logprobs))
        state.versions += [0] * (len(state.logprobs) - len(state.versions))
        assert drafter.propose([Ask(state, 4)], 1, 1) == make(grouped).propose([Ask(state, 4)], 1, 1)


def test_the_group_that_was_used_longest_ago_goes_first() -> None:
    drafter, rng = make(True, max_bytes=2 * TREES), random.Random(0)
    states = []
    for uid in range(12):
        states.append(make_state(uid, [rng.randrange(1000) for _ in range(400)]))
        one(drafter, states[-1])
        one(drafter, states[0])
        states[0].tokens.append(uid)
        assert drafter._num_bytes == sum(group.tree.num_bytes for group in drafter._groups.values()) <= 2 * TREES
    assert drafter.num_evicted > 3 and (0, 0) in drafter._groups and (0, 1) not in drafter._groups


def test_running_groups_that_exceed_the_bound_are_not_built_again_and_again() -> None:
    rng, drafter = random.Random(0), make(True, max_bytes=2 * TREES)
    states = [make_state(uid, [rng.randrange(50) for _ in range(400)]) for uid in range(12)]
    drafter.propose(asks(states), 12, 12)
    trees = {key: group.tree for key, group in drafter._groups.items()}
    assert 3 < len(trees) < 12 and drafter.num_evicted == 0
    for _ in range(5):
        for state in states:
            state.tokens.append(rng.randrange(50))
        drafts = drafter.propose(asks(states), 12, 12)
        assert all(
            not draft.tokens for draft, state in zip(drafts, states, strict=True) if drafter._key(state) not in trees
        )
    assert {key: group.tree for key, group in drafter._groups.items()} == trees and drafter.num_evicted == 0
    assert drafter._num_bytes < 3 * TREES
    drafter.propose(asks(states[-1:]), 1, 1)
    assert drafter.propose(asks(states[-1:]), 1, 1) == make(True).propose(asks(states[-1:]), 1, 1), (
        "the others are not used"
    )


def test_a_sequence_that_its_own_group_evicts_gets_no_drafts_from_then_on() -> None:
    rng, drafter = random.Random(0), make(True, max_bytes=TREES)
    first = make_state(0, [1, 2, 1, 2])
    states = [sibling(first, index, [rng.randrange(50) for _ in range(300)]) for index in range(4)]
    for _ in range(5):
        drafter.propose(asks(states), 4, 4)
        for state in states:
            state.tokens.append(1)
    (group,) = drafter._groups.values()
    assert 0 < len(group.evicted) <= group.tree.num_evictions < 4, "each is evicted once"
    assert group.tree.num_bytes <= TREES


def test_a_batch_drafts_as_each_of_its_sequences_alone() -> None:
    rng = random.Random(1)
    states = [make_state(uid, [rng.randint(0, 3) for _ in range(30)]) for uid in range(20)]
    limits = [rng.randint(1, 4) for _ in states]
    found = make(True).propose([*map(Ask, states, limits)], 20, 20)
    alone = [make(True).propose([Ask(state, limit)], 1, 1)[0] for state, limit in zip(states, limits, strict=True)]
    assert found == alone and sum(map(bool, found)) == len(states) and found != [Draft([], [])] * 20
