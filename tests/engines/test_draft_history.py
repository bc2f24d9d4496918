"""Drafts from earlier rollouts: what is kept, what a group copies, and that no token depends on it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.coordination.policies import OnDemand
from engines.decoding import DecodeError
from engines.fleet.fleet import Fleet
from engines.models.loader import checkpoint_tensors
from engines.parallel.layout import nested_layout
from engines.rollout.telemetry import StepRecord
from engines.sequence import SequenceState
from engines.speculation.drafter import Draft, News, Outcome
from engines.speculation.history import DraftHistory, age_of, tokens_per_step
from engines.speculation.native_suffix_tree import load
from engines.speculation.suffix import SuffixDrafter
from tests.holding import tokens_of
from tests.states import asks, make_state
from tests.worlds import join, run_world

TREES = 2**16 if load() is not None else 80 * 2**16
"""Bytes for about 1,000 tokens."""
Kept = list[tuple[int, list[list[int]]]]


def found(history: DraftHistory, prompt: list[int]) -> Kept:
    return [(entry.step, [one.tolist() for one in entry.tokens()]) for entry in history.find(prompt)]


def test_what_is_kept_against_brute_force() -> None:
    rng, bound = random.Random(0), 8000
    history, everything = DraftHistory(bound), list[tuple[list[int], int, list[list[int]]]]()
    num_dropped = 0
    for step in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 2))]
        completions = [[rng.randrange(2**31) for _ in range(rng.randint(0, 60))] for _ in range(rng.randint(1, 4))]
        history.keep(prompt, step, completions)
        everything.append((prompt, step, completions))
        while sum(512 + sum(64 + 4 * len(one) for one in some) for _, _, some in everything) > bound:
            del everything[0]
            num_dropped += 1
        if step % 50 == 0:  # goes on as if it had been there all the time
            data, history = history.to_bytes(), DraftHistory(bound)
            history.keep([1], 0, [[1, 2, 3]])
            history.restore(data)
        for one in ([0], [1, 2], [2, 2]):
            assert found(history, one) == [(at, some) for given, at, some in reversed(everything) if given == one]
    assert num_dropped > 200 and 0 < history.num_bytes <= bound
    history.keep([0], 300, [[7] * bound])
    assert history.find([0]) == [] and history.num_bytes == 0, "one that alone exceeds the bound"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x93\x01\xc4\x01a\x91\xc4\x03abc", b"\x91\x01"])
def test_bytes_that_are_no_history(data: bytes) -> None:
    history = DraftHistory(2**20)
    history.keep([1], 0, [[2]])
    with pytest.raises(DecodeError):
        history.restore(data)
    assert found(history, [1]) == [(0, [[2]])], "it stays as it was"


def test_yields_by_age() -> None:
    history = DraftHistory(2**20)
    assert age_of(9, history.find([1])) == "new"
    history.keep([1], 2, [[5]])
    history.keep([1], 4, [[5]])
    ages = [age_of(step, history.find([1])) for step in (4, 5, 6, 7, 8, 11, 12)]
    assert ages == ["age_0", "age_1", "age_2", "age_2", "age_4", "age_4", "age_8"]
    yields = {"age_4/passes": 4, "age_4/accepted": 6, "new/passes": 2, "age_1/passes": 0}
    assert tokens_per_step(yields) == {"age_4": 2.5, "new": 1.0}


def propose(drafter: SuffixDrafter, states: list[SequenceState]) -> list[Draft]:
    return drafter.propose(asks(states), len(states), len(states))


def make(max_bytes: int = 2**24, history: DraftHistory | None = None, num_paths: int = 1) -> SuffixDrafter:
    return SuffixDrafter(grouped=True, max_draft_tokens=4, num_paths=num_paths, max_bytes=max_bytes, history=history)


def test_a_group_copies_from_earlier_rollouts_as_from_siblings_that_have_ended() -> None:
    rng, history = random.Random(0), DraftHistory(2**20)
    prompts = [[rng.randrange(4) for _ in range(rng.choice([3, 40]))] for _ in range(4)]
    earlier: dict[int, list[list[int]]] = {}
    for step in (1, 2):
        for uid, prompt in enumerate(prompts[:3]):
            completions = [[rng.randrange(4) for _ in range(50)] for _ in range(3)]
            earlier[uid] = completions + earlier.get(uid, [])
            history.keep(prompt, step, completions)
    recalls, copies = make(history=history, num_paths=3), make(num_paths=3)
    for uid, prompt in enumerate(prompts):
        for index, completion in enumerate(earlier.get(uid, []), 1):
            sibling = make_state(uid, prompt, index=index, version=5)
            sibling.tokens += completion
            propose(copies, [sibling])
            copies.follow(News(ended=[sibling]))
    num_drafted = 0
    for uid, prompt in enumerate(prompts):
        state = make_state(uid, prompt, version=5)
        for _ in range(30):
            (draft,) = propose(recalls, [state])
            assert [draft] == propose(copies, [state])
            num_drafted += len(draft.tokens)
            recalls.follow(News(drawn=[Outcome(state, draft.tokens, 2)]))
            state.tokens.append(rng.randrange(4))
        assert recalls._groups[5, uid].age == ("age_2" if uid < 3 else "new")
    assert num_drafted > 100 and tokens_per_step(history.yields) == {"age_2": 3, "new": 3}
    assert history.yields["age_2/passes"] == 90 and history.yields["new/passes"] == 30


def test_earlier_completions_leave_half_of_the_memory_to_running_sequences() -> None:
    rng, history, bound = random.Random(0), DraftHistory(2**24), 8 * TREES
    prompts = [[uid, *(rng.randrange(50) for _ in range(20))] for uid in range(12)]
    for prompt in prompts:
        history.keep(prompt, 0, [[rng.randrange(50) for _ in range(100)] for _ in range(10)])
    drafter = make(bound, history)
    for step in (1, 2):  # groups of the step before make room for those of this one
        states = [make_state(uid, prompt, version=step) for uid, prompt in enumerate(prompts)]
        propose(drafter, states)
        trees = {uid: group.tree for (at, uid), group in drafter._groups.items() if at == step}
        recalled = [tree.num_tokens > 500 for tree in trees.values()]
        assert len(trees) == 12 and 2 < sum(recalled) < 12, "not all completions have room"
        assert bound // 2 < drafter._num_bytes < bound * 3 // 4
        assert drafter._num_bytes == sum(group.tree.num_bytes for group in drafter._groups.values())
        for _ in range(60):
            for state in states:
                state.tokens.append(rng.randrange(50))
        propose(drafter, states)
        assert all(tree.length(1) > 60 for tree in trees.values()), "every sequence is followed"


# -- a rollout, and the next one with the same prompts

PROMPTS = [[7 * uid % 129 + 2, 5, 9, 30 + uid] for uid in range(4)]
PARAMS = [SamplingParams(max_tokens=40, n=3, temperature=one, ignore_eos=True) for one in (0.0, 0.0, 0.3, 1.0)]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**21, "max_num_seqs": 6}
DRAFTS: dict[str, Any] = {"drafter": "grouped_suffix", "draft_lengths": "fixed"}
CASES = ["static", "on demand"]


def num_accepted(records: list[StepRecord]) -> int:
    return sum(record.num_accepted for record in records)


def two_epochs(llm: LLM, model: str) -> list[Any]:
    """The tokens of two rollouts, with an update between them, and the draft tokens that this rank has accepted."""
    done: list[Any] = []
    for step in range(2):
        if step:
            llm.sleep()
            llm.wake_up()
            llm.update_weights(checkpoint_tensors(model), version=step)
        done.append(tokens_of(llm.generate(PROMPTS, PARAMS, prompt_uids=[10 * step + uid for uid in range(4)])))
        done.append(num_accepted(llm.step_records))
    return done


def on_two_ranks(model: str) -> dict[str, Any]:
    groups, results = join(timeout_s=120), dict[str, Any]()
    for case in CASES:
        schedule = OnDemand() if case == "on demand" else None
        llm = LLM(model, world=groups, schedule=schedule, **OPTIONS, **DRAFTS, draft_history_bytes=2**20)
        assert llm.draft_history is not None
        results[case] = {"done": two_epochs(llm, model), "history": llm.draft_history.to_bytes().hex()}
        llm.regroup(nested_layout(range(2), 2, epoch=1))
        llm.generate(PROMPTS, PARAMS, prompt_uids=range(20, 24))
        results[case]["age"] = sorted(llm.draft_history.yields)
        results[case]["after"] = num_accepted(llm.step_records)
        llm.close()
    return results


def test_the_next_epoch_copies_from_the_last_one(qwen3: str) -> None:
    plain = two_epochs(LLM(qwen3, **OPTIONS), qwen3)
    grouped = two_epochs(LLM(qwen3, **OPTIONS, **DRAFTS), qwen3)
    llm = LLM(qwen3, **OPTIONS, **DRAFTS, draft_history_bytes=2**20)
    history = two_epochs(llm, qwen3)
    assert history[::2] == grouped[::2] == plain[::2]
    assert history[1] == grouped[1], "there is nothing to copy yet"
    assert history[3] > grouped[3] + 40, "two groups are greedy, and generate the same again"
    assert llm.draft_history is not None and llm.draft_history.yields["age_1/accepted"] == history[3]
    assert [found(llm.draft_history, prompt) for prompt in PROMPTS] == [
        [(1, history[2][uid]), (0, history[0][uid])] for uid in range(4)
    ]
    ranks = run_world(on_two_ranks, 2, qwen3)
    for case in CASES:
        assert [one[case]["done"][::2] for one in ranks] == [plain[::2]] * 2
        assert {one[case]["history"] for one in ranks} == {llm.draft_history.to_bytes().hex()}, "all ranks have all"
        # In a replica of both ranks, each drafts for itself, and has the history.
        assert ranks[0][case]["after"] == ranks[1][case]["after"] > 100 if case == "static" else True
        assert all("age_0/passes" in one[case]["age"] for one in ranks)


@pytest.mark.parametrize("drafter", ["none", "ngram", "suffix"])
def test_refusals(qwen3: str, drafter: str) -> None:
    with pytest.raises(ValueError, match=rf"EngineConfig\.draft_history_bytes=9: .*'grouped_suffix', not '{drafter}'"):
        LLM(qwen3, drafter=drafter, draft_history_bytes=9)  # type: ignore[arg-type]


def test_a_fleet_refuses(qwen3: str) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.draft_history_bytes=9: is kept by an LLM"):
        Fleet(qwen3, num_replicas=1, **OPTIONS, **DRAFTS, draft_history_bytes=9)
