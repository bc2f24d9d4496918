"""Served tokens: those of `LLM.generate`, by OpenAI's own client, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engines import LLM, RequestOutput, SamplingParams
from engines.sequence import Completion
from tests.checkpoints import save_text_checkpoint
from tests.serving import Running, serving

IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    save_text_checkpoint(directory, is_chat=True)
    return directory


@pytest.fixture(scope="module")
def alone(chat_model: Path) -> LLM:
    return LLM(chat_model, dtype="float64", kv_cache_bytes=2**23)


@pytest.fixture(scope="module")
def running(chat_model: Path) -> Iterator[Running]:
    with serving(LLM(chat_model, dtype="float64", kv_cache_bytes=2**23)) as one:
        yield one


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def completions(outputs: list[RequestOutput]) -> list[Completion]:
    return [one for output in outputs for one in output.outputs]


def joined(stream: Any) -> dict[int, dict[str, Any]]:
    """What the chunks of a stream say together, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            mine = found.setdefault(choice.index, {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None})
            assert mine["finish_reason"] is None, "nothing follows the end"
            mine["text"] += choice.text if hasattr(choice, "text") else choice.delta.content
            mine["token_ids"] += getattr(choice, "token_ids", None) or []
            if choice.logprobs is not None:
                mine["logprobs"] += choice.logprobs.token_logprobs
            mine["finish_reason"] = choice.finish_reason
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 5, "n": 3, "max_tokens": 40},
        {"temperature": 0, "max_tokens": 30},
        {"seed": 1, "n": 2, "max_tokens": 200, "stop": ["a", "1/"]},
        {"seed": 2, "n": 4, "max_tokens": 60, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
        {"seed": 3, "max_tokens": 60, "frequency_penalty": 1.5, "logit_bias": {"50": 3}, "stop_token_ids": [52]},
    ],
)
def test_tokens_are_those_of_generate(alone: LLM, client: openai.OpenAI, options: dict[str, Any]) -> None:
    prompts = ["12+34=", "a longer prompt of some words: "]
    biases = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    expected = completions(alone.generate(prompts, SamplingParams(**{**options, "logit_bias": biases, "logprobs": 2})))
    own = {name: options[name] for name in ("top_k", "min_p", "stop_token_ids") if name in options}
    known = {name: value for name, value in options.items() if name not in own}
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompts, "logprobs": 2, "extra_body": {**IDS, **own}, **known}
    whole = client.completions.create(**asked)
    streamed = joined(client.completions.create(**asked, stream=True))
    assert len(whole.choices) == len(streamed) == len(expected)
    for index, (choice, one) in enumerate(zip(whole.choices, expected, strict=True)):
        logprobs = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        assert choice.index == index and choice.logprobs is not None
        assert (choice.token_ids, choice.text) == (one.token_ids, one.text)
        # The library's sums may depend on which sequences share a pass, which is by chance here.
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, rel=1e-9)
        assert streamed[index]["logprobs"] == pytest.approx(logprobs, rel=1e-9)
        assert choice.finish_reason == one.finish_reason and choice.stop_reason == one.stop_reason
        assert (streamed[index]["token_ids"], streamed[index]["text"]) == (one.token_ids, one.text)
        assert streamed[index]["finish_reason"] == one.finish_reason
    num_new = sum(len(one.token_ids) for one in expected)
    assert whole.usage is not None and whole.usage.completion_tokens == num_new
    assert whole.usage.prompt_tokens == sum(len(alone.encode(prompts)[i]) for i in range(2))
    if "stop" in options:
        assert {one.stop_reason for one in expected} & {"a", "1/"}


def test_token_ids_are_a_prompt(alone: LLM, client: openai.OpenAI) -> None:
    prompts = [[50, 51, 52], [60]]
    expected = completions(alone.generate(prompts, SamplingParams(seed=9, max_tokens=12)))
    for prompt, outputs in ((prompts, expected), (prompts[0], expected[:1])):
        whole = client.completions.create(model="tiny", prompt=prompt, seed=9, max_tokens=12, extra_body=IDS)
        assert [one.token_ids for one in whole.choices] == [one.token_ids for one in outputs]
        assert [one.prompt_token_ids for one in whole.choices] == (prompts if len(outputs) > 1 else prompts[:1])


def test_without_a_seed_each_request_draws_its_own(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model="tiny", prompt="x", max_tokens=30).choices[0].text for _ in range(4)}
    assert len(texts) == 4


def test_a_conversation_is_rendered_by_the_template(alone: LLM, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "12+34="}]
    params = SamplingParams(seed=4, n=2, max_tokens=25, logprobs=2)
    (output,) = alone.chat(messages, params)
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 4, "n": 2, "extra_body": IDS}
    whole = client.chat.completions.create(**asked, max_completion_tokens=25, logprobs=True, top_logprobs=2)
    streamed = joined(client.chat.completions.create(**asked, max_tokens=25, stream=True))
    assert whole.prompt_token_ids == output.prompt_token_ids
    for choice, one in zip(whole.choices, output.outputs, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == one.text
        assert choice.token_ids == streamed[choice.index]["token_ids"] == one.token_ids
        assert streamed[choice.index]["text"] == one.text
        assert choice.logprobs is not None and choice.logprobs.content is not None
        for entry, token, logprobs in zip(choice.logprobs.content, one.token_ids, one.logprobs, strict=True):
            assert entry.logprob == pytest.approx(logprobs[token].logprob, rel=1e-9)
            top = sorted((one for one in logprobs.values() if one.rank <= 2), key=lambda one: one.rank)
            assert [at.logprob for at in entry.top_logprobs] == pytest.approx([one.logprob for one in top], rel=1e-9)
    everything = client.chat.completions.create(model="tiny", messages=messages, seed=4)
    assert (
        everything.choices[0].message.content
        == alone.chat(messages, SamplingParams(seed=4, max_tokens=None))[0].outputs[0].text
    )


def test_usage_ends_a_stream_that_asks_for_it(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "12+34=", "max_tokens": 7, "n": 2, "seed": 0, "stream": True}
    asked["extra_body"] = {"ignore_eos": True}
    *chunks, last = client.completions.create(**asked, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage is not None and all(one.usage is None for one in chunks)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (6, 14, 20)


def test_of_tokens_with_one_text_the_sampled_one_counts_then_the_most_likely(alone: LLM, client: openai.OpenAI) -> None:
    digit, *halves = alone.encode(["2é"])[0]
    options: dict[str, Any] = {"seed": 3, "n": 40, "max_tokens": 1, "logprobs": 3, "temperature": 5.0}
    params = SamplingParams(**options, logit_bias=dict.fromkeys([digit, *halves], 1e3))
    expected = completions(alone.generate(["12+34="], params))
    assert {one.token_ids[0] for one in expected} == {digit, *halves}
    whole = client.completions.create(
        model="tiny", prompt="12+34=", **options, logit_bias={str(token): 1000 for token in [digit, *halves]}
    )
    for choice, one in zip(whole.choices, expected, strict=True):
        values = {token: one.logprobs[0][token].logprob for token in [digit, *halves]}
        most_likely = max(values[token] for token in halves)
        half = values[one.token_ids[0]] if one.token_ids[0] in halves else most_likely
        assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] == pytest.approx({"2": values[digit], "\ufffd": half}, rel=1e-9)


def test_without_max_tokens_a_chat_goes_on_to_the_end_of_a_small_cache(chat_model: Path) -> None:
    llm = LLM(chat_model, kv_cache_bytes=2**15)
    assert llm.max_model_len == 512
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "12+34="}]}
    with serving(llm) as running:
        client = running.client()
        answer = client.chat.completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.total_tokens == 2**15 // 128, "128 bytes of KV per token"
        with pytest.raises(openai.BadRequestError, match="lower max_tokens"):
            client.chat.completions.create(**asked, max_tokens=400)
