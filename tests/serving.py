"""A server over a tiny model, in this process, for tests: real HTTP on a real socket."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai

from engines import LLM
from engines.sequence import SequenceState
from engines.serving.lending import Lender
from engines.serving.server import Server, bind
from engines.serving.service import ServedModel, Service, ServingLimits


def until(happened: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end, f"waited for a minute: {what}"
        time.sleep(0.002)


class Gate:
    """A hidden stop that ends nothing: the step that draws token number `place` of a sequence waits for that event."""

    def __init__(self, *places: int) -> None:
        self.events = {place: threading.Event() for place in places}
        self.waits_at = 0

    def __call__(self, state: SequenceState) -> bool:
        event = self.events.get(state.num_generated)
        if event is not None and not event.is_set():
            self.waits_at = state.num_generated
            assert event.wait(60), f"nobody opened the gate at {state.num_generated}"
            self.waits_at = 0
        return False

    def open(self, place: int) -> None:
        self.events[place].set()


class Running:
    """A server that runs, its engine, and a client of it."""

    def __init__(
        self, llm: LLM, name: str, limits: dict[str, Any], api_key: str | None, lender: Lender | None = None
    ) -> None:
        self.llm = llm
        model = ServedModel(
            name=name,
            replica=llm.replica,
            template=replace(llm.chat_template, tokenizer=copy.deepcopy(llm.tokenizer)),
            max_model_len=llm.max_model_len,
            run_seed=0,
        )
        self.service = Service(model, ServingLimits(**limits), lender=lender)
        self.server = Server(self.service, bind(port=0), api_key=api_key)
        self.url = self.server.address

    @property
    def outcomes(self) -> dict[str, int]:
        """How requests have ended, by outcome."""
        return dict(self.service.metrics.requests)

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of the cache, and those that are free."""
        blocks = self.llm.replica.scheduler.blocks
        return blocks.num_blocks, blocks.num_free_blocks

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})


@contextmanager
def serving(
    llm: LLM, *, name: str = "tiny", api_key: str | None = None, lender: Lender | None = None, **limits: Any
) -> Iterator[Running]:
    running, started = Running(llm, name, limits, api_key, lender), threading.Event()
    thread = threading.Thread(target=running.server.run, args=(started.set,))
    thread.start()
    try:
        assert started.wait(60)
        yield running
    finally:
        running.server.stop()
        running.server.stop()
        thread.join()
