"""The JSON of answers, whole or in chunks, as OpenAI's API and vLLM's additions to it (token ids) have them.
Torch-free.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from engines.sequence import Completion, Ranked
from engines.serving.engine_thread import Tokens
from engines.serving.requests import Asked
from engines.serving.text import TextStream, byte_test

Decode = Callable[..., str]
_HALF = "\ufffd"


class Answer:
    """Makes the JSON of one request's answer."""

    def __init__(self, asked: Asked, model: str, prompts: list[list[int]], tokenizer: Any) -> None:
        """`tokenizer`: the checkpoint's, or None, and then there is no text."""
        self._asked, self._prompts = asked, prompts
        self._is_chat = asked.kind == "chat"
        prefix, name = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": model}
        self._decode: Decode = (lambda _, **__: "") if tokenizer is None else tokenizer.decode
        self._is_byte = (lambda _: False) if tokenizer is None else byte_test(tokenizer)
        self._texts: dict[int, TextStream] = {}
        self._offsets: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}
        self.completions: dict[int, Completion] = {}

    @property
    def num_choices(self) -> int:
        return self._asked.params.n * len(self._prompts)

    @property
    def is_complete(self) -> bool:
        return len(self.completions) == self.num_choices

    def take(self, tokens: Tokens) -> None:
        """Keeps a completion for `whole`."""
        if tokens.completion is not None:
            self.completions[tokens.index] = tokens.completion
            self._num_tokens[tokens.index] = len(tokens.completion.token_ids)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, completion in sorted(self.completions.items()):
            choice = self._choice(index, completion.token_ids, completion.logprobs, completion.top_logprobs)
            if self._is_chat:
                choice["message"] = {"role": "assistant", "content": completion.text}
            else:
                choice["text"] = completion.text
            if self._asked.returns_token_ids and not self._is_chat:
                choice["prompt_token_ids"] = self._prompts[index // self._asked.params.n]
            choices.append(choice | _ending(completion))
        answer = {**self._head, "choices": choices, "usage": self.usage()}
        if self._asked.returns_token_ids and self._is_chat:
            answer["prompt_token_ids"] = self._prompts[0]
        return answer

    def usage(self) -> dict[str, int]:
        num_prompt, num_new = sum(map(len, self._prompts)), sum(self._num_tokens.values())
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def last_chunk(self) -> dict[str, Any]:
        """What `stream_options.include_usage` asks for."""
        return {**self._chunk_head(), "choices": [], "usage": self.usage()}

    def chunks(self, tokens: Tokens) -> list[dict[str, Any]]:
        """Returns the chunks that say what these tokens add; none if that is nothing yet."""
        index, is_first = tokens.index, tokens.index not in self._texts
        if is_first:
            self._texts[index] = self._text_stream()
        stream = self._texts[index]
        self._num_tokens[index] = self._num_tokens.get(index, 0) + len(tokens.token_ids)
        if tokens.completion is not None:
            self.completions[index] = tokens.completion
            part = stream.end(tokens.completion.text)
        else:
            part = stream.add(tokens.token_ids)
        found = []
        if is_first and self._is_chat:
            found.append(self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}}))
        wants_each = self._asked.returns_token_ids or self._asked.params.logprobs is not None
        if part or tokens.completion is not None or wants_each:
            choice: dict[str, Any] = {"delta": {"content": part}} if self._is_chat else {"text": part}
            choice |= self._choice(index, tokens.token_ids, tokens.logprobs, tokens.top_logprobs)
            found.append(self._chunk(choice | _ending(tokens.completion)))
        if is_first and self._asked.returns_token_ids:
            holder = found[0] if self._is_chat else found[0]["choices"][0]
            holder["prompt_token_ids"] = self._prompts[index // self._asked.params.n]
        return found

    def _text_stream(self) -> TextStream:
        params = self._asked.params
        decode = partial(self._decode, skip_special_tokens=params.skip_special_tokens)
        return TextStream(decode, params.stop, self._is_byte)

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._is_chat else dict(self._head)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.includes_usage else {}
        choice = {"logprobs": None, "finish_reason": None, **choice}
        return {**self._chunk_head(), "choices": [choice], **usage}

    def _choice(
        self, index: int, token_ids: list[int], logprobs: list[float], top_logprobs: list[list[Ranked]]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "logprobs": None}
        if self._asked.params.logprobs is not None:
            log = self._chat_logprobs if self._is_chat else partial(self._completion_logprobs, index)
            found["logprobs"] = log(token_ids, logprobs, top_logprobs)
        if self._asked.returns_token_ids:
            found["token_ids"] = token_ids
        return found

    def _completion_logprobs(
        self, index: int, token_ids: list[int], logprobs: list[float], top_logprobs: list[list[Ranked]]
    ) -> dict[str, Any]:
        """Of tokens with the same text, `top_logprobs` has the sampled one, or else the most likely one."""
        words, offsets = [self._decode([token]) for token in token_ids], []
        for word in words:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(word)
        top = []
        for word, value, entry in zip(words, logprobs, top_logprobs, strict=True):
            by_text: dict[str, float] = {}
            for token, other in _ranked(entry):
                by_text.setdefault(self._decode([token]), other)
            top.append(by_text | {word: value})
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": words, "top_logprobs": top}

    def _chat_logprobs(
        self, token_ids: list[int], logprobs: list[float], top_logprobs: list[list[Ranked]]
    ) -> dict[str, Any]:
        most = self._asked.params.logprobs or 0
        content = [
            {**self._named(token, value), "top_logprobs": [self._named(*one) for one in _ranked(entry)[:most]]}
            for token, value, entry in zip(token_ids, logprobs, top_logprobs, strict=True)
        ]
        return {"content": content}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._decode([token])
        return {"token": word, "logprob": logprob, "bytes": None if _HALF in word else list(word.encode())}


def _ranked(entry: list[Ranked]) -> list[tuple[int, float]]:
    """A token itself and the others that were asked for, the most likely first."""
    return [(token, value) for token, value, _ in sorted(entry, key=lambda one: one[2])]


def _ending(completion: Completion | None) -> dict[str, Any]:
    """OpenAI's reason, and vLLM's: the stop string or token that ended it."""
    if completion is None:
        return {}
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
