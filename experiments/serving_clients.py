"""Clients of a serving endpoint: bodies that are no requests, and requests that are timed. Torch-free."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from openai import AsyncOpenAI

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_MESSAGES = [{"role": "user", "content": "12+34="}]
_JUNK: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: {},
    lambda _: [[]],
    lambda _: {"a": {"b": [1, None]}},
    lambda rng: -rng.randint(2, 10**30),
    lambda _: 1e300,
    lambda _: "\x00",
    lambda _: [None, "x", 5, {}],
)
_FIELDS = {
    COMPLETIONS: ("prompt", "n", "max_tokens", "temperature", "top_p", "min_p", "seed", "logprobs", "min_tokens"),
    CHAT: ("messages", "tools", "top_logprobs", "max_completion_tokens", "chat_template_kwargs", "tool_choice"),
}
_BOTH = ("stop_token_ids", "logit_bias", "stream", "return_token_ids", "ignore_eos", "model", "repetition_penalty")
_NO_OBJECTS = (b"[" * 50_000, b'{"a":' * 9_000, b"null", b"[]", b'"x"', b"7", b"\xef\xbb\xbf{}", b"{}")


def malformed(rng: random.Random) -> tuple[str, bytes]:
    """Returns a path, and a body that is no request for it."""
    path = rng.choice((COMPLETIONS, CHAT))
    body: dict[str, Any] = {"prompt": "1+2="} if path == COMPLETIONS else {"messages": _MESSAGES}
    data = json.dumps({**body, "max_tokens": 5}).encode()
    kind = rng.randrange(6)
    if kind == 0:
        return path, data[: rng.randrange(len(data))]
    if kind == 1:
        return path, data[:-5] + rng.randbytes(rng.randint(1, 50)) + b"\xff" + data[-5:]
    if kind == 2:
        return path, rng.choice(_NO_OBJECTS)
    if kind == 3:
        body["".join(rng.choices("abcxyz_", k=8))] = rng.choice(_JUNK)(rng)
    elif kind == 4:
        body = {"max_tokens": 5}
    else:
        name = rng.choice(_FIELDS[path] + _BOTH)
        value = rng.choice(_JUNK)(rng)
        is_fine = isinstance(value, dict | str) and name in ("logit_bias", "chat_template_kwargs", "prompt")
        body[name] = 5 if is_fine else value
    return path, json.dumps(body).encode()


@dataclass(kw_only=True)
class Timed:
    """A streamed completion as its client saw it."""

    prompt: list[int]
    num_tokens: int
    """Asked for."""
    seed: int
    leaves_at: int | None = None
    """The client closes the connection once it has so many tokens."""
    token_ids: list[int] = field(default_factory=list)
    start_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    error: str = ""

    @property
    def outcome(self) -> Literal["killed", "ok", "failed"]:
        if self.leaves_at is not None:
            return "failed" if self.error else "killed"
        return "ok" if not self.error and len(self.token_ids) == self.num_tokens else "failed"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.start_s

    @property
    def tpot_s(self) -> float:
        """Seconds between two tokens, on average."""
        return (self.last_s - self.first_s) / max(1, len(self.token_ids) - 1)

    async def run(self, client: AsyncOpenAI, model: str) -> None:
        self.start_s = time.monotonic()
        own = {"ignore_eos": True, "return_token_ids": True}
        try:
            stream = await client.completions.create(
                model=model, prompt=self.prompt, max_tokens=self.num_tokens, seed=self.seed, stream=True, extra_body=own
            )
            async for chunk in stream:
                if not chunk.choices:
                    continue
                self.last_s = time.monotonic()
                self.first_s = self.first_s or self.last_s
                self.token_ids += getattr(chunk.choices[0], "token_ids", None) or []
                if self.leaves_at is not None and len(self.token_ids) >= self.leaves_at:
                    await stream.close()
                    return
        except Exception as error:  # whatever a client meets is a failed request
            self.error = f"{type(error).__name__}: {error}"
