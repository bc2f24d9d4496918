"""A served model as the event loop sees it: which requests are accepted, and what has come for each. Torch-free.

All of this runs in the event loop's thread, but for the engine's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from engines.constraints import Count, Seconds, check_fields
from engines.models.chat import ChatTemplate
from engines.replica.replica import Replica
from engines.sequence import SamplingParams
from engines.serving.engine_thread import Beside, EngineThread, Event, Failed, Job, Left, Load, Tokens
from engines.serving.metrics import Metrics, Sample
from engines.serving.refusals import Refused, invalid
from engines.serving.requests import Asked, Kind, check_model, read_body, with_reason


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is served. Nobody else may use the replica and the tokenizer meanwhile."""

    name: str
    replica: Replica
    template: ChatTemplate
    """With a tokenizer of its own, as the replica uses its tokenizer in another thread."""
    max_model_len: int
    run_seed: int
    """Of requests without a seed of their own: each draws other tokens."""


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What one server takes on."""

    max_sequences: Count = 512
    """Most completions that run or wait at a time; a request beyond them gets 429. `n` counts."""
    max_body_bytes: Count = 8 * 2**20
    """A longer body gets 413."""
    max_unread_tokens: Count = 4096
    """Tokens per completion that may wait for a client that reads its stream slowly; with more, its request is
    aborted."""
    stall_s: Seconds = 30.0
    """Seconds in which a client must send its body, and must take what was sent; else its request is aborted."""
    drain_s: Seconds = 60.0
    """Seconds that running requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_fields(self)


class Lending(Protocol):
    """`Lender` is one."""

    @property
    def tenant(self) -> Beside: ...

    def lend(self, body: bytes) -> None: ...

    def status(self) -> dict[str, Any]: ...

    def samples(self) -> list[Sample]: ...

    def close(self) -> None: ...


class Call:
    """An accepted request, until its answer has been written."""

    def __init__(self, service: Service, job: Job, arrived: float) -> None:
        self._service, self.job, self._arrived = service, job, arrived
        self.has_left = self.is_stalled = False
        self._tokens: dict[int, Tokens] = {}
        """Not yet written, one entry per completion."""
        self._reason = ""
        self._num_unread = 0
        self._news = asyncio.Event()
        self._first: dict[int, float] = {}

    @property
    def num_sequences(self) -> int:
        return sum(one.n for one in self.job.params)

    def hear(self, event: Event, now: float) -> None:
        if isinstance(event, Tokens):
            self._measure(event, now)
            self._keep(event)
        elif isinstance(event, Failed):
            self._reason = event.reason
        else:
            self.has_left = True
        self._news.set()

    def fail(self, reason: str) -> None:
        self._reason = reason
        self._news.set()

    def _keep(self, event: Tokens) -> None:
        self._num_unread += len(event.token_ids)
        most = self._service.limits.max_unread_tokens * self.num_sequences
        if self._num_unread > most and not self.is_stalled:
            self.is_stalled = True
            self._service.close(self)  # at once: what writes the answer may be waiting for the client
        if self.is_stalled:
            return
        if (kept := self._tokens.get(event.index)) is None:
            self._tokens[event.index] = event
            return
        kept.token_ids += event.token_ids
        kept.logprobs += event.logprobs
        kept.top_logprobs += event.top_logprobs
        kept.completion = event.completion

    def _measure(self, event: Tokens, now: float) -> None:
        metrics = self._service.metrics
        if not self._first:
            metrics.ttft.add(now - self._arrived)
        first = self._first.setdefault(event.index, now)
        metrics.num_generated_tokens += len(event.token_ids)
        if event.completion is not None:
            num_tokens = len(event.completion.token_ids)
            if not self.job.streams:
                metrics.num_generated_tokens += num_tokens
            if num_tokens > 1:
                metrics.tpot.add((now - first) / (num_tokens - 1))

    async def take(self) -> list[Tokens]:
        """Waits for tokens, and returns all that have come. Raises `Refused` when no more can come, `Stalled` when too
        many have."""
        await self._news.wait()
        self._news.clear()
        if self.is_stalled:
            raise Stalled
        if self._reason:
            raise Refused(500, self._reason)
        tokens, self._tokens, self._num_unread = list(self._tokens.values()), {}, 0
        return tokens


class Stalled(Exception):
    """The client does not read."""


class Service:
    """Accepts requests for a served model while there is room, and until it drains."""

    def __init__(
        self, model: ServedModel, limits: ServingLimits | None = None, *, lender: Lending | None = None
    ) -> None:
        """`lender` has the model of a rollout, which steps beside the served one."""
        self.lender = lender
        self.model, self.limits = model, limits or ServingLimits()
        self.metrics = Metrics()
        self.created = int(time.time())
        self.is_draining = False
        self._calls: dict[Job, Call] = {}
        self._num_sequences = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        beside = None if lender is None else lender.tenant
        self._engine = EngineThread(model.replica, run_seed=model.run_seed, tell=self._tell, beside=beside)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        """One thread: the tokenizer is not used by two at a time."""

    @property
    def load(self) -> Load:
        return self._engine.load

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()
        if self.lender is not None:
            self.lender.close()
        self._encoder.shutdown(wait=False)

    def check_open(self) -> None:
        """Raises `Refused` while no request is accepted."""
        if self.load.broken:
            raise Refused(503, self.load.broken, code="engine_broken")
        if self.is_draining:
            raise Refused(503, "the server is shutting down", code="draining")

    async def read(self, body: bytes, kind: Kind) -> tuple[Asked, list[list[int]]]:
        """Returns what a body asks for, and the token ids of its prompts, which another thread makes of text. Raises
        `Refused`."""

        def read() -> tuple[Asked, list[list[int]]]:
            asked = read_body(body, kind)
            check_model(asked, self.model.name)
            return asked, asked.encode(self.model.template)

        return await asyncio.get_running_loop().run_in_executor(self._encoder, read)

    def call(self, asked: Asked, prompts: list[list[int]], arrived: float) -> Call:
        """Hands a request to the engine; the caller must `close` it. Raises `Refused`."""
        num_sequences = asked.params.n * len(prompts)
        if num_sequences > self.limits.max_sequences:
            raise invalid("n", f"n: {num_sequences} completions are more than this server runs at a time; ask for less")
        params = []
        for index, tokens in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            params.append(with_reason("prompt", partial(self._checked, asked.params, tokens, name)))
        self.check_open()
        if self._num_sequences + num_sequences > self.limits.max_sequences:
            raise Refused(429, "the server has as many requests as it takes; try again", code="overloaded")
        job = Job(prompts=prompts, params=params, streams=asked.streams)
        self._calls[job] = call = Call(self, job, arrived)
        self._num_sequences += num_sequences
        self.metrics.num_prompt_tokens += sum(map(len, prompts))
        self._engine.submit(job)
        return call

    def _checked(self, params: SamplingParams, tokens: list[int], name: str) -> SamplingParams:
        """Raises ValueError for a prompt that cannot run here."""
        if params.max_tokens is None:
            blocks = self.model.replica.scheduler.blocks
            most = min(self.model.max_model_len, blocks.most_blocks * blocks.block_size)
            params = replace(params, max_tokens=max(1, most - len(tokens)))
        self.model.replica.check(tokens, params, name)
        return params

    def close(self, call: Call) -> None:
        """Forgets a call, and aborts what still runs of it. Its room is free when the engine has let go of it."""
        if not call.has_left:
            self._engine.abort(call.job)

    def fail_all(self, reason: str) -> None:
        for call in list(self._calls.values()):
            call.fail(reason)

    def _tell(self, events: list[tuple[Job, Event]]) -> None:
        """Called by the engine's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._hear, events)

    def _hear(self, events: list[tuple[Job, Event]]) -> None:
        now = time.monotonic()
        for job, event in events:
            self._calls[job].hear(event, now)
            if isinstance(event, Left):
                self._num_sequences -= self._calls.pop(job).num_sequences
