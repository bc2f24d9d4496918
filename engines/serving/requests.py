"""What a body asks for: OpenAI's fields, and vLLM's additions to them, checked one by one. Torch-free.

A field that this engine does not have, and that would change the result, is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engines.constraints import check_value
from engines.decoding import DecodeError, from_json
from engines.models.chat import ChatTemplate, Messages, check_template_kwargs
from engines.models.tokenizer import Prompt, encode_prompt
from engines.sequence import SamplingParams
from engines.serving.refusals import Refused, invalid

Kind = Literal["completion", "chat"]
MOST_TOP_LOGPROBS = 20
_MOST_ENTRIES = {"stop": 16, "bad_words": 128, "stop_token_ids": 1024, "logit_bias": 1024}
_MOST_CHARACTERS = 200
"""Of a bad word. Longer lists and words would slow down each step of all requests."""

_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "bad_words", "logit_bias", "seed", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output"),
}
_BOTH = {*_SAMPLING, "model", "stream", "stream_options", "logprobs", "return_token_ids"}
_OWN: dict[Kind, set[str]] = {
    "completion": {"prompt"},
    "chat": {"messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"},
}
_HARMLESS = {
    *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key", "parallel_tool_calls"),
}
"""Fields that change no token."""
_NEUTRAL: dict[str, object] = {"echo": False, "suffix": "", "best_of": 1, "response_format": {"type": "text"}}
"""Fields that this engine does not have, with the value that asks for nothing."""
_WHY = {
    "echo": "the prompt is not repeated before the completion; leave it out, and put the two together yourself",
    "suffix": "the model continues a prompt and fills in nothing; leave it out",
    "best_of": "give n, and choose among the completions",
    "response_format": "no grammar is compiled here; ask for the form in the prompt",
    "prompt_logprobs": "only tokens that are generated get log-probs; leave it out",
    "functions": "give tools",
    "function_call": "give tools",
    "chat_template": "the model's own is used; give chat_template_kwargs",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A body of /v1/completions or /v1/chat/completions, whose prompts are not tokens yet."""

    kind: Kind
    model: str | None
    prompts: list[Prompt] = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    params: SamplingParams
    streams: bool = False
    includes_usage: bool = False
    returns_token_ids: bool = False

    def encode(self, template: ChatTemplate) -> list[list[int]]:
        """Returns the token ids of each prompt. Raises `Refused`."""
        try:
            if self.kind == "chat":
                return [template.render(self.messages, self.tools, **self.template_kwargs)]
            names = ["prompt"] if len(self.prompts) == 1 else [f"prompt[{i}]" for i in range(len(self.prompts))]
            return [
                encode_prompt(template.tokenizer, prompt, name)
                for prompt, name in zip(self.prompts, names, strict=True)
            ]
        except ValueError as error:
            raise invalid("messages" if self.kind == "chat" else "prompt", str(error)) from None


def read_body(body: bytes, kind: Kind) -> Asked:
    """Raises `Refused` for anything that is no request, or asks for what this engine does not do."""
    try:
        given = from_json(body, dict[str, Any])
    except DecodeError as error:
        raise invalid(None, f"the body must be a JSON object in UTF-8 ({error})") from None
    given = {name: value for name, value in given.items() if value is not None and name not in _HARMLESS}
    _check_known(given, _BOTH | _OWN[kind])
    streams = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping) or (options and not streams):
        raise invalid("stream_options", "stream_options: must be an object, and needs stream=true")
    _check_known(options, {"include_usage", "include_obfuscation"}, "stream_options.")
    asked = {
        "kind": kind,
        "model": _value(given, "model", str | None),
        "params": _params(given, kind),
        "streams": streams,
        "includes_usage": _flag(options, "include_usage", "stream_options."),
        "returns_token_ids": _flag(given, "return_token_ids"),
    }
    if kind == "completion":
        return Asked(**asked, prompts=_prompts(given.get("prompt")))
    return Asked(**asked, **_conversation(given))


def _check_known(given: Mapping[str, Any], known: set[str], prefix: str = "") -> None:
    for name, value in given.items():
        if name not in known and not (name in _NEUTRAL and value == _NEUTRAL[name]):
            why = _WHY.get(name, "this server does not know this field; leave it out")
            raise invalid(prefix + name, f"{prefix}{name}: {why}")


def _value(given: Mapping[str, Any], name: str, kind: Any, prefix: str = "") -> Any:
    value = given.get(name)
    with_reason(prefix + name, lambda: check_value(prefix + name, value, kind))
    return value


def _flag(given: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    return bool(_value(given, name, bool | None, prefix))


def with_reason(param: str | None, act: Callable[[], Any]) -> Any:
    """Returns what `act` returns. Its ValueError becomes the client's, which names the field that it begins with."""
    try:
        return act()
    except ValueError as error:
        message = re.sub(r"^(prompts?(\[\d+\])?: )?SamplingParams\.", "", str(error))
        named = re.match(r"(\w+)[=:\[]", message)
        raise invalid(named[1] if named else param, message) from None


def _params(given: Mapping[str, Any], kind: Kind) -> SamplingParams:
    options = {name: value for name, value in given.items() if name in _SAMPLING}
    if "logit_bias" in options:
        options["logit_bias"] = _biases(options["logit_bias"])
    for name, most in _MOST_ENTRIES.items():
        value = options.get(name, [])
        if not isinstance(value, list | str | dict) or (isinstance(value, dict) and name != "logit_bias"):
            raise invalid(name, f"{name}: must be a list")
        if not isinstance(value, str) and len(value) > most:
            raise invalid(name, f"{name}: has {len(value)} entries; give at most {most}")
    _check_lengths(options.get("bad_words", []))
    if kind == "chat":
        most = given.get("max_completion_tokens", given.get("max_tokens"))
        if given.get("max_tokens", most) != most:
            raise invalid("max_tokens", "max_tokens: differs from max_completion_tokens; give one of them")
        options["max_tokens"] = most
    options["logprobs"] = num_logprobs = _num_logprobs(given, kind)
    if num_logprobs is not None and not 0 <= num_logprobs <= MOST_TOP_LOGPROBS:
        name = "logprobs" if kind == "completion" else "top_logprobs"
        raise invalid(name, f"{name}={num_logprobs}: must be from 0 to {MOST_TOP_LOGPROBS}")
    params: SamplingParams = with_reason(None, lambda: SamplingParams(**options))
    return params


def _check_lengths(bad_words: str | list[object]) -> None:
    for index, word in enumerate([bad_words] if isinstance(bad_words, str) else bad_words):
        if isinstance(word, str) and len(word) > _MOST_CHARACTERS:
            start = f"{word[:20]}..."
            message = f"bad_words[{index}]={start!r}: has {len(word)} characters; give at most {_MOST_CHARACTERS}"
            raise invalid("bad_words", message)


def _biases(given: object) -> dict[int, Any]:
    if not isinstance(given, Mapping) or not all(re.fullmatch(r"\d{1,18}", name) for name in given):
        raise invalid("logit_bias", 'logit_bias: must be an object like {"53": -2.0}: token ids, and numbers')
    return {int(name): value for name, value in given.items()}


def _num_logprobs(given: Mapping[str, Any], kind: Kind) -> int | None:
    if kind == "completion":
        value: int | None = _value(given, "logprobs", int | None)
        return value
    num_top: int | None = _value(given, "top_logprobs", int | None)
    if not _flag(given, "logprobs"):
        if num_top:
            raise invalid("top_logprobs", "top_logprobs: needs logprobs=true")
        return None
    return num_top or 0


def _prompts(given: object) -> list[Prompt]:
    """One text, some, the token ids of one prompt, or of some."""

    def is_ids(value: object) -> bool:
        return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)

    if isinstance(given, str) or is_ids(given):
        return [given]  # type: ignore[list-item]
    if isinstance(given, list) and given and (all(isinstance(one, str) for one in given) or all(map(is_ids, given))):
        return given
    raise invalid("prompt", "prompt: give a text, a list of texts, a list of token ids, or a list of such lists")


def _conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    tools, choice = given.get("tools"), given.get("tool_choice", "auto")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(one, dict) for one in tools)):
        raise invalid("tools", "tools: must be a list of JSON schemas of functions")
    if choice not in ("auto", "none"):
        raise invalid("tool_choice", f"tool_choice={choice!r}: no grammar is compiled here; give auto or none")
    kwargs = given.get("chat_template_kwargs", {})
    with_reason("chat_template_kwargs", lambda: check_template_kwargs(kwargs))
    return {
        "messages": _with_arguments(given.get("messages")),
        "tools": tools if choice == "auto" else None,
        "template_kwargs": kwargs,
    }


def _with_arguments(messages: Any) -> Any:
    """Returns the messages with the arguments of tool calls as objects, which templates render; OpenAI's clients send
    them as JSON in a text. `ChatTemplate.render` checks the rest."""
    if not isinstance(messages, list):
        raise invalid("messages", 'messages: must be a list, as [{"role": "user", "content": "..."}]')
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"])
                except (ValueError, RecursionError):
                    raise invalid("messages", "messages: the arguments of a tool call must be JSON") from None
    return messages


def check_model(asked: Asked, name: str) -> None:
    """Raises `Refused` for another model than the one that is served."""
    if asked.model not in (None, name):
        message = f"model={asked.model!r}: is not served here; {name!r} is"
        raise Refused(404, message, param="model", code="model_not_found")
