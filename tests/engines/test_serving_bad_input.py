"""Bodies that are no requests, or ask for what the engine does not do: each gets a 4xx with a reason."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engines import LLM, SamplingParams
from engines.replica.stop_strings import find_stop
from engines.serving.text import TextStream, byte_test
from experiments.serving_clients import CHAT, COMPLETIONS, malformed
from tests.chat_models import chat_tokenizer, save_chat_checkpoint
from tests.serving import Running, serving

MESSAGES = [{"role": "user", "content": "12+34="}]
Body = dict[str, Any]
HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    save_chat_checkpoint(directory, "qwen2.5")
    return directory


@pytest.fixture(scope="module")
def running(chat_model: Path) -> Iterator[Running]:
    with serving(LLM(chat_model, kv_cache_bytes=2**23), max_body_bytes=100_000) as one:
        yield one


def error_of(answer: httpx.Response) -> tuple[int, Any, str]:
    """Status, field and message of an error in OpenAI's form."""
    error = answer.json()["error"]
    assert {*error} == {"message", "type", "param", "code"} and error["type"] and len(error["message"]) > 10
    return answer.status_code, error["param"], error["message"]


def post(running: Running, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) or hasattr(body, "__next__") else json.dumps(body).encode()
    return HTTP.post(running.url + path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "change", "param", "message"),
    [
        (COMPLETIONS, {"echo": True}, "echo", "the prompt is not repeated"),
        (COMPLETIONS, {"best_of": 2}, "best_of", "give n"),
        (COMPLETIONS, {"response_format": {"type": "json_object"}}, "response_format", "no grammar"),
        (COMPLETIONS, {"no_such": 1}, "no_such", "does not know this field"),
        (COMPLETIONS, {"messages": MESSAGES}, "messages", "does not know this field"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt", "leave no room in max_model_len=512"),
        (COMPLETIONS, {"prompt": [5, 99999]}, "prompt", "token id 99999 is outside"),
        (COMPLETIONS, {"prompt": ["fine", ""]}, "prompt", r"prompt\[1\]: has no tokens"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "give a text"),
        (COMPLETIONS, {"temperature": "hot"}, "temperature", "must be 0"),
        (COMPLETIONS, {"n": 10**9}, "n", "more than this server runs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"logprobs": True}, "logprobs", "an integer"),
        (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "at most 16"),
        (COMPLETIONS, {"stop": [""]}, "stop", "not empty"),
        (
            COMPLETIONS,
            {"bad_words": ["a", "x" * 201]},
            "bad_words",
            r"bad_words\[1\]='x{20}\.\.\.'.* 201 .*at most 200",
        ),
        (COMPLETIONS, {"bad_words": "x" * 201}, "bad_words", "at most 200"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", "must be an object"),
        (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias", "outside the model's vocabulary"),
        (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_tokens=8"),
        (COMPLETIONS, {"seed": 2**64}, "seed", "64 bits"),
        (COMPLETIONS, {"stream": "yes"}, "stream", "True or False"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "does not know"),
        (CHAT, {"messages": []}, "messages", "must be a list of messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "needs `content`"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only parts of type"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "give auto or none"),
        (CHAT, {"tools": [5]}, "tools", "JSON schemas"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        (CHAT, {"logprobs": True, "top_logprobs": 40}, "top_logprobs", "from 0 to 20"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "no argument for a template"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template", "the model's own is used"),
    ],
)
def test_a_field_that_cannot_be_followed_is_named(
    running: Running, path: str, change: Body, param: str, message: str
) -> None:
    body: Body = {"prompt": "12+34="} if path == COMPLETIONS else {"messages": MESSAGES}
    status, found, told = error_of(post(running, path, {**body, **change}))
    assert (status, found) == (400, param)
    assert re.search(message, told), told


def test_harmless_and_neutral_fields_are_taken(running: Running) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "stop": None, "response_format": {"type": "text"}}
    body = {"prompt": "12+34=", "seed": 1, "max_tokens": 5, "model": "tiny", "return_token_ids": True}
    plain = post(running, COMPLETIONS, body).json()["choices"]
    neutral = {"echo": False, "suffix": None, "best_of": 1, "n": 1, "top_k": -1, "stream": False, "logit_bias": {}}
    assert post(running, COMPLETIONS, {**body, **harmless, **neutral}).json()["choices"] == plain
    chat = {**body, "messages": MESSAGES, "tool_choice": "none", "tools": [], "parallel_tool_calls": True}
    del chat["prompt"]
    assert post(running, CHAT, {**chat, **harmless}).status_code == 200


def test_two_hundred_malformed_requests_get_a_reason_each_and_change_nothing(running: Running) -> None:
    rng = random.Random(0)
    good = {"prompt": "12+34=", "seed": 3, "max_tokens": 20}
    before, steps = post(running, COMPLETIONS, good).json()["choices"], running.service.load.num_steps
    for number in range(200):
        path, body = malformed(rng)
        answer = post(running, path, body)
        assert 400 <= answer.status_code < 500, (number, path, body, answer.text)
        error_of(answer)
    assert running.service.load.num_steps == steps, "none of them has reached the engine"
    assert post(running, COMPLETIONS, good).json()["choices"] == before
    assert running.blocks[0] == running.blocks[1] and HTTP.get(f"{running.url}/health").status_code == 200


def test_what_is_no_json_request_has_other_statuses(running: Running) -> None:
    assert error_of(post(running, COMPLETIONS, {"prompt": "x", "model": "other"}))[:2] == (404, "model")
    assert error_of(HTTP.get(f"{running.url}/v1/models/other"))[0] == 404
    assert error_of(HTTP.get(f"{running.url}/v2"))[0] == 404
    assert error_of(HTTP.get(f"{running.url}{COMPLETIONS}"))[0] == 405
    assert error_of(HTTP.post(running.url + COMPLETIONS, data={"prompt": "x"}))[0] == 415
    for kind in ("Application/JSON", "application/json ; charset=utf-8"):
        assert HTTP.post(
            running.url + COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}
        ).is_success
    longest = json.dumps({"prompt": "x"}).ljust(100_000).encode()
    assert post(running, COMPLETIONS, longest).status_code == 200
    assert error_of(post(running, COMPLETIONS, longest + b" "))[0] == 413
    assert error_of(post(running, COMPLETIONS, iter([longest] * 100)))[0] == 413


def test_a_body_of_100_mb_is_refused_before_it_is_sent(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.server.port)) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n"
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 413 ")


def test_tools_and_their_calls_are_rendered(chat_model: Path, running: Running) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": "I add.", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "46", "tool_call_id": "1"})
    asked = {"messages": messages, "tools": [tool], "seed": 2, "max_tokens": 10, "return_token_ids": True}
    llm = LLM(chat_model, kv_cache_bytes=2**23)
    parsed = [dict(one) for one in messages]
    parsed[1]["tool_calls"] = [{**call, "function": {"name": "add", "arguments": {"a": 1}}}]
    (with_tools,) = llm.chat(parsed, SamplingParams(seed=2, max_tokens=10), tools=[tool])
    (without,) = llm.chat(parsed, SamplingParams(seed=2, max_tokens=10))
    for choice, output in ((None, with_tools), ("auto", with_tools), ("none", without)):
        answer = post(running, CHAT, {**asked, "tool_choice": choice}).json()
        assert answer["prompt_token_ids"] == output.prompt_token_ids
    assert len(with_tools.prompt_token_ids) > len(without.prompt_token_ids)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: what no word has is in tokens of one byte, and a run of them that is no UTF-8 is all U+FFFD."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcehinorstw+=", "▁a", "▁answer"]
    vocabulary = {word: token for token, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [lambda: chat_tokenizer("qwen2.5"), fallback_tokenizer], ids=["BPE of bytes", "bytes"])
def test_parts_of_a_text_are_the_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    """The oracle decodes all tokens so far each time, and ends, as a replica does, at the first stop string."""
    tokenizer = make()

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=True))

    rng, num_stopped = random.Random(0), 0
    for case in range(400):
        words = tokenizer.encode(" the answer is é or 😀, not 12+34=46\n\n", add_special_tokens=False)
        tokens = [rng.choice(words) if rng.random() < 0.8 else rng.randrange(330) for _ in range(rng.randint(0, 40))]
        text = decode(tokens)
        starts = [rng.randrange(len(text)) for _ in range(case % 3) if text]
        stops = [text[start : start + rng.randint(1, 4)] for start in starts]
        ends = [end for end in range(1, len(tokens) + 1) if find_stop(decode(tokens[:end]), stops) >= 0]
        if ends:
            tokens, num_stopped = tokens[: ends[0]], num_stopped + 1
            text = decode(tokens)
            text = text[: find_stop(text, stops)]
        stream, parts, start = TextStream(decode, stops, byte_test(tokenizer)), "", 0
        while (end := start + rng.randint(1, 3)) < len(tokens):
            parts += stream.add(tokens[start:end])
            start = end
            assert text.startswith(parts), f"case {case}: what was sent is taken back"
        assert parts + stream.end(text) == text
    assert num_stopped > 100
