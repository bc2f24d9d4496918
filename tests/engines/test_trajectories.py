"""Trajectories: the tokens of a plain engine that runs one turn at a time, whatever happens in and between turns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines import LLM, SamplingParams
from engines.sequence import Completion
from tests.environments import Echo, Local

RNG = random.Random(3)
PROMPTS = ["".join(chr(RNG.randrange(97, 123)) for _ in range(RNG.randint(1, 30))) for _ in range(6)]
COLUMNS = [{"greeting": None if i % 3 else f"<{i}>", "most": 2 + i} for i in range(len(PROMPTS))]
STOPS = tuple(range(100, 124))
PARAMS = SamplingParams(max_tokens=90, n=3, stop_token_ids=STOPS, stop=("e", "zz"), max_turns=5)
TIGHT_KV = 10 * 16 * 2 * 1 * 1 * 16 * 8  # 10 blocks of float64


def make(model: str, **options: Any) -> LLM:
    return LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**22, **options})


def roll_out(llm: LLM, *, delay_s: float = 0.0, params: SamplingParams = PARAMS, **options: Any) -> Any:
    """Returns the completions and what each environment heard."""
    with Local(delay_s=delay_s) as environments:
        outputs = llm.generate(
            PROMPTS,
            params,
            environment=environments,
            columns=COLUMNS,
            prompt_uids=range(len(PROMPTS)),
            **options,
        )
        assert set(environments.ended.values()) == {1}
        return [output.outputs for output in outputs], environments.texts()


def one_turn_at_a_time(llm: LLM, params: SamplingParams = PARAMS) -> Any:
    """The oracle: each turn is a call of `generate` whose prompt is all that was generated and observed before."""
    completions: list[list[Any]] = []
    texts = {}
    for uid in range(len(PROMPTS)):
        completions.append([])
        for index in range(params.n):
            completion, texts[llm.policy_version, uid, index] = one_trajectory(llm, params, uid, index)
            completions[-1].append(completion)
    return completions, texts


def one_trajectory(llm: LLM, params: SamplingParams, uid: int, index: int) -> Any:
    """Returns tokens, log-probs, observed spans and finish reason, and what the environment heard."""
    environment, tokenizer = Echo(), llm.get_tokenizer()
    assert params.max_tokens is not None and params.max_turns is not None
    tokens: list[int] = tokenizer.encode(PROMPTS[uid])
    num_prompt, logprobs, observed = len(tokens), list[float](), list[tuple[int, int]]()
    text = environment.reset(**COLUMNS[uid]) or ""
    while True:
        new = tokenizer.encode(text, add_special_tokens=False)
        place = len(tokens) - num_prompt
        if place + len(new) >= params.max_tokens:
            reason = "length"
            break
        observed.append((place, place + len(new)))
        logprobs += [0.0] * len(new)
        tokens += new
        one = SamplingParams(
            max_tokens=params.max_tokens - (len(tokens) - num_prompt),
            n=index + 1,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
        )
        turn = llm.generate([tokens], one, prompt_uids=[uid])[0].outputs[index]
        tokens = tokens + turn.token_ids
        logprobs += turn.logprobs
        reason = turn.finish_reason
        if reason == "length" or (observation := environment.step(turn.text)) is None:
            break
        if len(environment.texts) >= params.max_turns:
            reason = "length"
            break
        text = observation.text
    return (tokens[num_prompt:], logprobs, observed, reason), environment.texts


def facts(completions: list[list[Completion]]) -> Any:
    return [[(one.token_ids, one.logprobs, one.observed, one.finish_reason) for one in group] for group in completions]


@pytest.fixture(scope="module")
def plain(text_model: str) -> Any:
    completions, texts = one_turn_at_a_time(make(text_model))
    ends = [one[3] for group in completions for one in group]
    turns = [len(one) for one in texts.values()]
    assert ends.count("stop") > 3 and ends.count("length") > 3 and max(turns) > 3 and len(set(turns)) > 2
    return completions, texts


def check(found: Any, plain: Any) -> None:
    completions, texts = found
    for group, expected in zip(facts(completions), plain[0], strict=True):
        for (tokens, logprobs, observed, reason), oracle in zip(group, expected, strict=True):
            assert tokens == oracle[0]
            assert logprobs == pytest.approx(oracle[1], abs=1e-9)
            assert (observed, reason) == (oracle[2], oracle[3])
    assert texts == plain[1]
    for group in completions:
        for one in group:
            assert one.reward == sum(map(len, texts[0, completions.index(group), one.index]))
            assert [version < 0 for version in one.versions] == [not kept for kept in one.loss_mask]
            assert one.num_generated == sum(one.loss_mask)


SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "crowd of 2": {"max_num_seqs": 2},
    "prefill chunks of 3": {"prefill_chunk_size": 3},
    "no prefix cache": {"prefix_caching": False},
    "preemption": {"kv_cache_bytes": TIGHT_KV, "max_model_len": 140},
    "preemption, swap": {"kv_cache_bytes": TIGHT_KV, "max_model_len": 140, "preemption": "swap"},
    "drafts": {"drafter": "ngram", "draft_lengths": "fixed"},
    "drafts of a group": {"drafter": "grouped_suffix", "draft_lengths": "fixed", "draft_paths": 2},
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_tokens_as_one_turn_at_a_time(text_model: str, plain: Any, switch: str) -> None:
    llm = make(text_model, **SWITCHES[switch])
    check(roll_out(llm, delay_s=0.01), plain)
    if "preemption" in switch:
        assert llm.replica.scheduler.num_preemptions


def test_the_same_tokens_in_rounds(text_model: str, plain: Any) -> None:
    options = {"preemption": "recompute"}  # reading stored KV takes its time, too
    llm = make(text_model, **options)
    check(roll_out(llm, delay_s=0.01, in_rounds=True), plain)
    batches = [record.num_tokens for record in llm.step_records]
    check(roll_out(again := make(text_model, **options), delay_s=0.03, in_rounds=True), plain)
    assert [record.num_tokens for record in again.step_records] == batches
