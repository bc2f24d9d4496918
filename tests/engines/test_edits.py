"""Penalties, biases and forbidden tokens: logit by logit against transformers' processors or a scalar loop.

And the same tokens with drafts, chunks, preemption and moves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engines import LLM, SamplingParams
from engines.sampling.edits import MOST_SPELLINGS, Counts, Edit, Editor, apply_edits
from engines.sequence import SequenceState, Work
from tests.checkpoints import EOS as EOS_OF_MODEL
from tests.engines.test_sampler import columns
from tests.engines.test_token_equality import PROMPTS, SWITCHES, TIGHT_KV
from tests.states import make_state

VOCAB, EOS = 60, 7
RNG = random.Random(5)
ROWS = 30
PROMPT = [RNG.randrange(VOCAB) for _ in range(12)]
GENERATED = [RNG.randrange(VOCAB) for _ in range(ROWS)]


class Words:
    """A tokenizer that reads a word as the numbers that it is made of."""

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))

    def spellings(self, word: str) -> list[list[int]]:
        return [[int(part) for part in word.split()]]


EDITOR = Editor(vocab_size=VOCAB, eos_token_ids=(EOS, VOCAB + 3, -1), tokenizer=Words())


def edited(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Row i has i generated tokens: half of them as those of its sequence, the others as a draft."""
    states = []
    for row in range(ROWS):
        state = make_state(0, PROMPT, params)
        state.tokens += GENERATED[: row // 2]
        states.append((state, GENERATED[row // 2 : row]))
    return apply_edits(logits, [edit(state, draft) for state, draft in states])


def edit(state: SequenceState, draft: Sequence[int] = ()) -> Edit | None:
    counts = Counts()
    counts.follow(state, 0)
    return EDITOR.edit(state, counts if state.params.is_penalised else None, draft)


def of_huggingface(logits: torch.Tensor, processor: LogitsProcessor, *, prompt: list[int]) -> torch.Tensor:
    rows = [torch.tensor([prompt + GENERATED[:row]], dtype=torch.long) for row in range(ROWS)]
    return torch.cat([processor(ids, logits[row : row + 1].clone()) for row, ids in enumerate(rows)])


def some_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype) * 3


BAD = [[3], GENERATED[4:6], GENERATED[9:12], [1, 2, 3, 4]]
PROCESSORS: dict[str, tuple[dict[str, Any], LogitsProcessor, bool]] = {
    "repetition": ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7), True),
    "repetition wanted": ({"repetition_penalty": 0.6}, RepetitionPenaltyLogitsProcessor(0.6), True),
    "bias": (
        {"logit_bias": {3: 1.5, 9: -4, EOS: 100}},
        SequenceBiasLogitsProcessor([[[3], 1.5], [[9], -4.0], [[EOS], 100.0]]),
        True,
    ),
    "large integers as bias": (
        {"logit_bias": {7: 2**63, 8: 10**20}},
        SequenceBiasLogitsProcessor([[[7], float(2**63)], [[8], 1e20]]),
        True,
    ),
    # vLLM looks for the beginning of a word among the generated tokens only.
    "bad words": (
        {"bad_words": [" ".join(map(str, word)) for word in BAD]},
        NoBadWordsLogitsProcessor(BAD, eos_token_id=EOS),
        False,
    ),
    "min tokens": (
        {"min_tokens": 9, "max_tokens": 99, "stop_token_ids": [11, -5]},
        MinNewTokensLengthLogitsProcessor(0, 9, [EOS, 11]),
        False,
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_against_transformers(name: str) -> None:
    options, processor, with_prompt = PROCESSORS[name]
    logits = some_logits()
    mine = edited(logits, SamplingParams(**options))
    theirs = of_huggingface(logits, processor, prompt=PROMPT if with_prompt else [])
    assert torch.equal(mine, theirs)
    assert not torch.equal(mine, logits)


@pytest.mark.parametrize(("presence", "frequency", "repetition"), [(0.7, 0, 1), (0, 0.3, 1), (-0.5, 1.2, 1.3)])
def test_penalties_against_a_scalar_loop(presence: float, frequency: float, repetition: float) -> None:
    logits = some_logits(torch.float64)
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias={2: 1.0}
    )
    mine = edited(logits, params)
    for row in range(ROWS):
        for token in range(VOCAB):
            value = float(logits[row, token]) + (1.0 if token == 2 else 0.0)
            count = GENERATED[:row].count(token)
            if count or token in PROMPT:
                value = value / repetition if value > 0 else value * repetition
            value -= frequency * count + (presence if count else 0)
            assert float(mine[row, token]) == pytest.approx(value, abs=1e-12)
    assert max(GENERATED.count(token) for token in range(VOCAB)) > 1


def test_counts_kept_are_counts_made_anew() -> None:
    """A sequence grows, loses its last tokens, and gets others in their place, as a small model's guesses do; its first
    tokens may be the prompt's alone, in parts. Counting alone is compared with all counts anew, also behind drafts."""
    rng = random.Random(11)
    seen = {"cut": 0, "prompt": 0, "new in a draft": 0, "gone": 0}
    for _ in range(60):
        params = SamplingParams(repetition_penalty=1.3)
        state = make_state(0, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))], params)
        counts, num_same, before = Counts(), 0, set[int]()
        for _ in range(40):
            counts.follow(state, num_same)
            draft = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
            ids, found = counts.behind(draft).tolist()
            tokens = [*state.tokens, *draft]
            assert dict(zip(ids, found, strict=True)) == {
                token: tokens[state.num_prompt_tokens :].count(token) for token in tokens
            }
            assert len({*ids}) == len(ids)
            seen["new in a draft"] += not {*draft} <= {*state.tokens}
            seen["gone"] += not before <= {*state.tokens}
            before = {*state.tokens}
            num_same = rng.randint(state.num_prompt_tokens - (rng.random() < 0.1), len(state.tokens))
            seen["cut"] += num_same < len(state.tokens)
            seen["prompt"] += num_same < state.num_prompt_tokens
            rest = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
            state.tokens[max(num_same, state.num_prompt_tokens) :] = rest
    assert all(count > 20 for count in seen.values()), seen


def test_spellings_are_kept_for_the_words_used_last() -> None:
    spelled: list[str] = []

    class Counting(Words):
        def spellings(self, word: str) -> list[list[int]]:
            spelled.append(word)
            return super().spellings(word)

    editor = Editor(vocab_size=VOCAB, eos_token_ids=(EOS,), tokenizer=Counting())
    for words in (["1", "2"], ["2", "1"], [str(number) for number in range(3, MOST_SPELLINGS + 2)], ["1"], ["2"]):
        editor.edit(make_state(0, PROMPT, SamplingParams(bad_words=words)), None)
    assert len(spelled) == MOST_SPELLINGS + 2 and spelled[-1] == "2", "only the word whose use was longest ago has gone"


def test_a_row_without_edits_keeps_its_bits_and_all_are_processed_after_them() -> None:
    logits = some_logits()
    state = make_state(0, PROMPT, SamplingParams(logit_bias={5: 3.0}))
    edits = [edit(state) if row % 2 else None for row in range(ROWS)]
    assert torch.equal(apply_edits(logits, edits)[::2], logits[::2])
    from engines.sampling.sampler import process_logits, sample

    setting = {"temperature": 0.5, "top_k": 4}
    batch = replace(columns(ROWS, **setting), edits=edits)
    expected = process_logits(apply_edits(logits, edits), columns(ROWS, **setting))
    assert torch.equal(process_logits(logits, batch), expected)
    parts = [sample(logits[row : row + 1], batch.rows(slice(row, row + 1))) for row in range(ROWS)]
    whole = sample(logits, batch)
    assert torch.equal(whole.tokens, torch.cat([one.tokens for one in parts]))


@pytest.mark.parametrize("bias", [1e30, -1e30])
def test_the_largest_edits_leave_float32_finite(bias: float) -> None:
    from engines.sampling.sampler import sample

    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), bias), repetition_penalty=0.01 if bias > 0 else 100)
    state = make_state(0, list(range(VOCAB)), params)
    batch = replace(columns(1, temperature=1e-6), edits=[edit(state)])
    assert sample(some_logits()[:1], batch).logprobs.isfinite().all()


# -- in the engine: the state is a function of the sequence's tokens

EDITS = SamplingParams(
    max_tokens=40, n=2, min_tokens=12, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2,
    logit_bias={5: 1.5, 9: -3.0, EOS_OF_MODEL: 2.5}, temperature=0.4,
)  # fmt: skip
REPEATING = replace(EDITS, presence_penalty=-1.0, frequency_penalty=-0.8, repetition_penalty=0.9)
"""Tokens come back, so that drafts are right now and then."""


def run(model: str, params: list[SamplingParams], **options: Any) -> tuple[list[list[list[int]]], LLM]:
    llm = LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**24, **options})
    outputs = llm.generate(PROMPTS, params)
    if options.get("kv_cache_bytes") == TIGHT_KV:
        assert llm.replica.scheduler.num_preemptions
    return [[one.token_ids for one in output.outputs] for output in outputs], llm


MIXED = [[EDITS, REPEATING, SamplingParams(max_tokens=40, n=2)][i % 3] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def plain(qwen3: str) -> list[list[list[int]]]:
    return run(qwen3, MIXED)[0]


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_tokens_whatever_runs_beside(qwen3: str, plain: list[list[list[int]]], switch: str) -> None:
    tokens, llm = run(qwen3, MIXED, **SWITCHES[switch])
    assert tokens == plain
    if SWITCHES[switch].get("draft_lengths") == "fixed":
        assert sum(step.num_accepted for step in llm.step_records) > 50


def test_the_plain_run_shows_the_edits(plain: list[list[list[int]]], qwen3: str) -> None:
    for index, group in enumerate(plain):
        if index % 3 < 2:
            assert all(len(tokens) >= 12 for tokens in group)
    without = run(qwen3, [replace(one, min_tokens=0) for one in MIXED])[0]
    assert any(len(tokens) < 12 for index, group in enumerate(without) if index % 3 < 2 for tokens in group)
    repeats = [sum(len(t) - len(set(t)) for group in plain[kind::3] for t in group) for kind in (0, 1)]
    assert repeats[1] > 2 * repeats[0]


def test_moved_between_replicas(qwen3: str, plain: list[list[list[int]]]) -> None:
    replicas = [LLM(qwen3, dtype="float64", max_num_seqs=size, kv_cache_bytes=2**23).replica for size in (4, 9)]
    rng = random.Random(3)
    for uid, prompt in enumerate(PROMPTS):
        for index in range(2):
            rng.choice(replicas).submit(Work(state=make_state(uid, prompt, MIXED[uid], index=index)))
    done: dict[tuple[int, int], list[int]] = {}
    while any(replica.has_work for replica in replicas):
        for replica in replicas:
            for _ in range(rng.randint(1, 6)):
                for one in replica.step().finished:
                    done[one.state.key.prompt_uid, one.completion.index] = one.completion.token_ids
        for work in rng.choice(replicas).pause():
            state = SequenceState.from_bytes(work.state.to_bytes())
            rng.choice(replicas).submit(Work(state=state))
    assert done == {(uid, index): tokens for uid, group in enumerate(plain) for index, tokens in enumerate(group)}
