"""Serves a Hugging Face checkpoint over OpenAI's HTTP API, until SIGTERM or Ctrl-C.

    python experiments/serve.py runs/models/tiny --port 8000
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" -d '{"prompt": "12+34="}'

It prints one line with the address when it is ready. At its end it lets running requests finish, and prints their
counts as JSON. docs/serving.md says what requests may hold.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from engines.constraints import Int64, check_fields
from engines.lifetime import imports
from experiments import launch
from experiments.engine_options import EngineOptions
from experiments.lending import LendingOptions, SharedMemory

KEY_VARIABLE = "CURTAIL_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3) over OpenAI's HTTP API: /v1/completions,
    /v1/chat/completions, /v1/models, /health and /metrics."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint, or of a LoRA adapter in peft's format, or a name of the hub (Qwen/Qwen3-0.6B: from its
    local cache, or downloaded)."""
    base_model: Path | None = None
    """Folder of an adapter's base, or a name of the hub; by default what the adapter names."""
    served_model_name: str | None = None
    """What requests call the model; by default MODEL as it was given."""
    host: str = "127.0.0.1"
    """Address to listen at. One that other machines can reach needs a key."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    api_key: Path | None = None
    """File that holds the key which clients must send; without it the environment's CURTAIL_API_KEY, if it is set. (A
    key on the command line could be seen by other users.)"""
    run_seed: Int64 | None = None
    """Seed of requests that have none of their own; by default another one for each start."""
    max_sequences: int = 512
    """Most completions that run or wait at a time; requests beyond them get 429 with Retry-After."""
    max_body_mib: int = 8
    """Longest body of a request; longer ones get 413."""
    max_unread_tokens: int = 4096
    """Tokens per completion that may wait for a client that reads its stream slowly; with more, its request is
    aborted."""
    stall_s: float = 30.0
    """Seconds in which a client must send its body, and must take what was sent; else its request is aborted."""
    drain_s: float = 60.0
    """Seconds that running requests have to finish after SIGTERM; new ones get 503 meanwhile."""
    lending: Annotated[LendingOptions, tyro.conf.arg(name="")] = field(default_factory=LendingOptions)
    engine: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        check_fields(self, "")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port={self.port}: must be from 0 to 65535")

    def key(self) -> str | None:
        """Returns the key. Raises ValueError for a file without one."""
        if self.api_key is None:
            return os.environ.get(KEY_VARIABLE) or None
        if not self.api_key.is_file():
            raise ValueError("--api-key: there is no such file; give the path of a file that holds the key")
        if not (key := self.api_key.read_text().strip()).isascii() or not key:
            raise ValueError(f"api_key={str(self.api_key)!r}: holds no key of ASCII characters")
        return key


def main() -> dict[str, Any]:
    config = launch.options(ServeConfig)
    key = config.key()
    launch.end_on_signals(lambda: "interrupted: nothing was served")
    return serve(config, key)


def serve(config: ServeConfig, key: str | None) -> dict[str, Any]:
    import copy  # the imports take seconds; --help and typos need not wait
    import secrets

    try:
        with imports():
            from engines import LLM
            from engines.serving.server import Server, bind
            from engines.serving.service import ServedModel, Service, ServingLimits
    except ModuleNotFoundError as error:
        raise ValueError(f'serve.py: {error}; pip install "curtail[serve]"') from None
    if launch.num_ranks() > 1:
        raise ValueError("serve.py: serves with one rank; start it without torchrun")
    limits = ServingLimits(
        max_sequences=config.max_sequences,
        max_body_bytes=config.max_body_mib * 2**20,
        max_unread_tokens=config.max_unread_tokens,
        stall_s=config.stall_s,
        drain_s=config.drain_s,
    )
    bound = bind(config.host, config.port, api_key=key)
    launch.share_cores()
    run_seed = secrets.randbits(63) if config.run_seed is None else config.run_seed
    shared = None if config.lending.rollout_model is None else SharedMemory(config.lending)
    llm = LLM(
        config.model,
        base_model=config.base_model,
        pages=None if shared is None else shared.pages,
        **asdict(replace(config.engine, seed=run_seed)),
    )
    launch.tell_engine(llm)
    lender = None if shared is None else shared.lender(llm)
    model = ServedModel(
        name=config.served_model_name or str(config.model),
        replica=llm.replica,
        template=replace(llm.chat_template, tokenizer=copy.deepcopy(llm.tokenizer)),
        max_model_len=llm.max_model_len,
        run_seed=run_seed,
    )
    service = Service(model, limits, lender=lender)
    server = Server(service, bound, api_key=key)
    num_lost = server.run(lambda: print(f"serving {model.name} at {server.address}/v1", flush=True))
    llm.close()
    return {"experiment": "serve", "requests": dict(service.metrics.requests), "lost": num_lost}


if __name__ == "__main__":
    launch.run(main)
