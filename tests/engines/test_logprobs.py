"""The most likely tokens: against Hugging Face's log-softmax, and the same whatever runs beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines import LLM, Completion, RequestOutput, SamplingParams
from engines.coordination.policies import OnDemand
from engines.sequence import Logprob, SequenceState, Work
from tests.engines.test_edits import EDITS, REPEATING
from tests.engines.test_rollout_world import Flip
from tests.engines.test_token_equality import PROMPTS, SWITCHES
from tests.states import make_state
from tests.worlds import join, run_world

PARAMS = SamplingParams(max_tokens=12, n=2, logprobs=3, prompt_logprobs=2)
SOME = PROMPTS[:12]


def run(model: str, params: Any = PARAMS, **options: Any) -> list[RequestOutput]:
    return LLM(model, **{"dtype": "float64", "kv_cache_bytes": 2**24, **options}).generate(SOME, params)


@pytest.fixture(scope="module")
def plain(qwen3: str) -> list[RequestOutput]:
    return run(qwen3)


def check(entry: dict[int, Logprob], token: int, logprobs: torch.Tensor, count: int) -> None:
    """The entry of a place against all log-probs there."""
    values, ids = logprobs.topk(count)
    assert list(entry) == [token, *(one for one in ids.tolist() if one != token)]
    for place, (one, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start=1):
        assert entry[one].rank == place
        assert entry[one].logprob == pytest.approx(value, abs=1e-5)  # Hugging Face's norms are in float32
    assert entry[token].logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
    assert entry[token].rank == 1 + int((logprobs > logprobs[token]).sum())


def test_against_huggingface(qwen3: str, plain: list[RequestOutput]) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float64)
    outside = 0
    for output in plain:
        prompt = output.prompt_token_ids
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for one in output.outputs:
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + one.token_ids])).logits[0].log_softmax(-1)
            for place, token in enumerate(prompt[1:], start=1):
                entry = output.prompt_logprobs[place]
                assert entry is not None
                check(entry, token, logprobs[place - 1], 2)
            assert len(one.logprobs) == len(one.token_ids)
            for place, token in enumerate(one.token_ids):
                entry = one.logprobs[place]  # type: ignore[assignment]
                check(entry, token, logprobs[len(prompt) + place - 1], 3)
                outside += entry[token].rank > 3
            assert one.cumulative_logprob == pytest.approx(
                sum(one.logprobs[place][token].logprob for place, token in enumerate(one.token_ids))  # type: ignore
            )
    assert outside > 50, "the sampled token was always among the most likely ones"


def same(one: Any, other: Any) -> bool:
    """Whether two lists of entries are the same, log-probs up to the last digits of float64."""
    return len(one) == len(other) and all(
        a == b or (a.keys() == b.keys() and all(abs(a[t].logprob - b[t].logprob) < 1e-9 for t in a))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_same_whatever_runs_beside(qwen3: str, plain: list[RequestOutput], switch: str) -> None:
    for mine, theirs in zip(run(qwen3, **SWITCHES[switch]), plain, strict=True):
        assert same(mine.prompt_logprobs, theirs.prompt_logprobs)
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids and same(one.logprobs, other.logprobs)


def test_only_those_who_ask_get_them_and_the_tokens_stay(qwen3: str, plain: list[RequestOutput]) -> None:
    none = replace(PARAMS, logprobs=None, prompt_logprobs=None)
    kinds = [none, replace(none, logprobs=0), replace(none, prompt_logprobs=0), replace(PARAMS, logprobs=-1)]
    outputs = run(qwen3, [kinds[index % 4] for index in range(len(SOME))])
    for index, (mine, theirs) in enumerate(zip(outputs, plain, strict=True)):
        assert [one.token_ids for one in mine.outputs] == [one.token_ids for one in theirs.outputs]
        widths = {len(entry) for one in mine.outputs for entry in one.logprobs if not isinstance(entry, float)}
        assert widths == [set(), {1}, set(), {131}][index % 4]
        assert (mine.prompt_logprobs is None) == (index % 4 in (0, 1))
        assert (mine.outputs[0].cumulative_logprob is None) == (index % 4 in (0, 2))


def test_they_are_of_the_distribution_that_is_sampled_from(qwen3: str) -> None:
    (output,) = LLM(qwen3, dtype="float64").generate(
        [[5, 6]], SamplingParams(max_tokens=20, top_k=4, temperature=0.7, logprobs=10, logit_bias={9: 50.0})
    )
    for entry in output.outputs[0].logprobs:
        assert 9 in entry and len(entry) == 4  # type: ignore[operator, arg-type]
        assert sum(torch.tensor(one.logprob).exp() for one in entry.values()) == pytest.approx(1)  # type: ignore


def test_a_repeated_prompt_is_computed_again_for_them(qwen3: str) -> None:
    llm, prompt = LLM(qwen3, dtype="float64"), [3 + i % 40 for i in range(70)]
    llm.generate([prompt], SamplingParams(max_tokens=2))
    scored = SamplingParams(max_tokens=2, n=3, prompt_logprobs=1)
    (first,) = llm.generate([prompt], scored)
    shared = llm.replica.scheduler.num_shared_tokens
    assert shared == 2 * 64, "the other samples of the group share the prompt"
    (again,) = llm.generate([prompt], scored)
    assert same(first.prompt_logprobs, again.prompt_logprobs) and len(first.prompt_logprobs or []) == 70


def test_paused_in_the_middle_of_its_prompt_and_moved(qwen3: str) -> None:
    prompt = [3 + i % 40 for i in range(70)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    options: dict[str, Any] = {"dtype": "float64", "prefill_chunk_size": 16}
    (expected,) = LLM(qwen3, dtype="float64").generate([prompt], params, prompt_uids=[0])
    replicas = [LLM(qwen3, **options).replica for _ in range(2)]
    work, finished, seen = Work(state=make_state(0, prompt, params)), [], []
    while not finished:
        replica = replicas[len(seen) % 2]
        replica.submit(work)
        finished = replica.step().finished or replica.step().finished
        if not finished:
            (paused,) = replica.pause()
            seen.append(len(paused.state.prompt_logprobs))
            work = Work(state=SequenceState.from_bytes(paused.state.to_bytes()))
            if len(seen) == 2:
                options["prefill_chunk_size"] = 48
                replicas = [LLM(qwen3, **options).replica for _ in range(2)]
    assert seen[0] == 32 and seen[-1] == 69
    completion: Completion = finished[0].completion
    assert completion.token_ids == expected.outputs[0].token_ids
    assert [[(t, r) for t, _, r in entry] for entry in completion.top_logprobs] == [
        [(t, r) for t, _, r in entry] for entry in expected.outputs[0].top_logprobs
    ]
    assert [entry[0][0] for entry in completion.prompt_logprobs] == prompt[1:]


FAR = [[EDITS, REPEATING][index % 2] for index in range(len(SOME))]
FAR = [replace(one, logprobs=2, prompt_logprobs=1) for one in FAR]
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_bytes": 2**21, "max_num_seqs": 5}


def plain_values(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens, ranks, and log-probs up to the last digits of float64."""
    completions = [one for output in outputs for one in output.outputs]
    return [
        [one.token_ids, [[[t, round(v, 8), r] for t, v, r in e] for e in one.top_logprobs + one.prompt_logprobs]]
        for one in completions
    ]


def roll_out_with_a_regroup(model: str) -> list[Any]:
    options = OPTIONS | {"drafter": "grouped_suffix", "draft_lengths": "fixed", "prefill_chunk_size": 7}
    llm = LLM(model, world=join(timeout_s=120), schedule=OnDemand(), layout_policy=Flip(), **options)
    outputs = llm.generate(SOME, FAR)
    accepted, epoch = sum(step.num_accepted for step in llm.step_records), llm.layout.epoch
    llm.close()
    return [plain_values(outputs), epoch, accepted]


def test_over_two_ranks_that_regroup_with_drafts_and_penalties(qwen3: str) -> None:
    expected = plain_values(LLM(qwen3, **OPTIONS).generate(SOME, FAR))
    for values, epoch, accepted in run_world(roll_out_with_a_regroup, 2, qwen3):
        assert epoch == 1 and accepted > 20
        assert values == expected
