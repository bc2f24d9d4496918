"""Drafts of a stated acceptance: how often they are right, what they cost, and that an engine takes them."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.sequence import SequenceKey, SequenceState, Work
from engines.speculation.drafter import Ask, DraftPass, News
from engines.speculation.verify import num_accepted
from research.simulator.stated import StatedDrafter
from tests.states import make_state

PROMPT, LENGTH = [7, 8, 9], 400
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPTS = [[7, 8, 9, 10] * 4, [21, 22, 23] * 6, [3, 5]]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**24, "prefix_caching": False}


def truth(state: SequenceState, position: int) -> int:
    return (position * 7919 + state.key.prompt_uid) % 50


def by_sides(key: SequenceKey, num_generated: int) -> float:
    """Good and bad sequences, which change sides."""
    return 0.9 if (key.prompt_uid % 2 == 0) == (num_generated < LENGTH / 2) else 0.5


def run(drafter: StatedDrafter, uid: int, window: int) -> list[tuple[int, bool]]:
    """Returns of each guess that was tried how many generated tokens came before it, and whether it was right."""
    state, tried = make_state(uid, PROMPT), []
    while state.num_generated < LENGTH:
        (draft,) = drafter.propose([Ask(state, window)], 1, 1)
        known, first = len(state.tokens), state.num_generated
        assert draft.start == known and len(draft.tokens) == window
        drawn = [truth(state, known + place) for place in range(window + 1)]
        count = num_accepted(draft.tokens, drawn)
        assert not any(guess == token for guess, token in zip(draft.tokens[count:], drawn[count:], strict=False))
        tried += [(first + place, place < count) for place in range(min(count + 1, window))]
        state.tokens += drawn[: count + 1]
    drafter.follow(News(ended=[state]))
    assert not drafter._copies
    return tried


def test_guesses_are_right_as_often_as_is_stated() -> None:
    """By halves of the sequences, which change sides: 0.9 and 0.5, within four standard errors."""
    drafter = StatedDrafter(truth, by_sides)
    for uid in (0, 1):
        found = [one for number in range(40) for one in run(drafter, uid + 2 * number, 4)]
        for half in (0, 1):
            rights = [is_right for place, is_right in found if (place < LENGTH / 2) == (half == 0)]
            expected = 0.9 if uid == half else 0.5
            error = (expected * (1 - expected) / len(rights)) ** 0.5
            assert statistics.mean(rights) == pytest.approx(expected, abs=4 * error), (uid, half, len(rights))


def test_chances_depend_on_seed_sequence_and_place_alone() -> None:
    """A window more or less, or another drafter, changes no guess behind right ones."""
    state = make_state(5, PROMPT)
    drafters = [StatedDrafter(truth, lambda *_: 0.6) for _ in range(2)]
    other = StatedDrafter(truth, lambda *_: 0.6, seed=1)
    differs = 0
    for position in range(len(PROMPT), 200):
        state.tokens = [*PROMPT, *(truth(state, place) for place in range(len(PROMPT), position))]
        (long,), (short,) = (
            one.propose([Ask(state, limit)], 1, 1) for one, limit in zip(drafters, (6, 2), strict=True)
        )
        assert long.tokens[:2] == short.tokens
        differs += other.propose([Ask(state, 2)], 1, 1)[0].tokens != short.tokens
    assert differs > 50


def test_guesses_that_hold_cost_nothing() -> None:
    state, drafter = make_state(0, PROMPT), StatedDrafter(truth, lambda *_: 1.0)
    (draft,) = drafter.propose([Ask(state, 3)], 1, 1)
    assert drafter.passes == [DraftPass(3, 3), DraftPass(1, 4), DraftPass(1, 5)]
    state.tokens.append(draft.tokens[0])
    assert drafter.propose([Ask(state, 2)], 1, 1)[0].tokens == draft.tokens[1:] and drafter.passes == []
    drafter.propose([Ask(state, 3)], 1, 1)
    assert drafter.passes == [DraftPass(1, 6)]
    state.tokens.append(draft.tokens[1] + 1)  # another token than the guess: what was computed behind it is void
    drafter.propose([Ask(state, 1)], 1, 1)
    assert drafter.passes == [DraftPass(1, 5)]


def generate(llm: LLM) -> tuple[list[list[int]], list[list[DraftPass]], list[list[int]]]:
    """Returns the tokens of each sequence, the drafter's passes of each step, and the accepted tokens."""
    states = [make_state(uid, prompt, PARAMS) for uid, prompt in enumerate(PROMPTS)]
    for state in states:
        llm.replica.submit(Work(state=state))
    passes, accepted = [], []
    while llm.replica.has_work:
        output = llm.replica.step()
        passes.append([*output.draft_passes])
        accepted.append(output.accepted)
    return [state.tokens for state in states], passes, accepted


def known(tokens: list[list[int]], state: SequenceState, position: int) -> int:
    """The tokens of a plain run; behind them, any."""
    mine = tokens[state.key.prompt_uid]
    return mine[position] if position < len(mine) else 0


def test_it_costs_what_a_small_model_that_is_always_right_costs(qwen3: str) -> None:
    """The target itself, as draft model, runs the same passes in each step."""
    drafts = {"max_draft_tokens": 3, "draft_lengths": "fixed"}
    tokens, passes, accepted = generate(LLM(qwen3, drafter="model", draft_model=qwen3, **drafts, **OPTIONS))
    own = partial(StatedDrafter, partial(known, tokens), lambda *_: 1.0)
    assert generate(LLM(qwen3, drafter="own", own_drafter=own, **drafts, **OPTIONS)) == (tokens, passes, accepted)
    assert max(map(len, passes)) == 3 and sum(map(sum, accepted)) > 60


@pytest.mark.parametrize("lengths", ["fixed", "adaptive"])
def test_a_run_keeps_its_tokens(qwen3: str, lengths: str) -> None:
    tokens, *_ = generate(LLM(qwen3, **OPTIONS))
    own = partial(StatedDrafter, partial(known, tokens), lambda *_: 0.7)
    llm = LLM(qwen3, drafter="own", own_drafter=own, max_draft_tokens=3, draft_lengths=lengths, **OPTIONS)
    found, _, accepted = generate(llm)
    assert found == tokens and (lengths == "adaptive" or 20 < sum(map(sum, accepted)) < 117)
