"""A server over a tiny model, in this process, for tests: real HTTP on a real socket."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai

from engines import LLM
from engines.serving.server import Server
from engines.serving.service import ServedModel, Service, ServingLimits


class Running:
    """A server that runs, its engine, and a client of it."""

    def __init__(self, llm: LLM, limits: dict[str, Any], api_key: str | None) -> None:
        self.llm = llm
        model = ServedModel(
            name="tiny",
            replica=llm.replica,
            template=replace(llm.chat_template, tokenizer=copy.deepcopy(llm.tokenizer)),
            max_model_len=llm.max_model_len,
            run_seed=0,
        )
        self.service = Service(model, ServingLimits(**limits))
        self.server = Server(self.service, port=0, api_key=api_key)
        self.url = self.server.address

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of the cache, and those that are free."""
        blocks = self.llm.replica.scheduler.blocks
        return blocks.num_blocks, blocks.num_free_blocks

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})


@contextmanager
def serving(llm: LLM, api_key: str | None = None, **limits: Any) -> Iterator[Running]:
    running, started = Running(llm, limits, api_key), threading.Event()
    thread = threading.Thread(target=running.server.run, args=(started.set,))
    thread.start()
    try:
        assert started.wait(60)
        yield running
    finally:
        running.server.stop()
        running.server.stop()
        thread.join()
