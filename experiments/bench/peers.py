"""Other engines as sides of a bench: Hugging Face's `generate` and its continuous batching, and vLLM's process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from engines.config import DType
from engines.models.hugging_face import read_checkpoint

Side = Callable[[list[list[int]], list[int]], float]
"""Samples `lengths[i]` tokens after prompt i; returns seconds."""
START_S = 300.0
"""Most seconds to wait for a peer's start, and for each of its answers."""


class HuggingFacePeer:
    """Hugging Face's `generate`, which pads all rows until the longest is done."""

    def __init__(self, model: str | Path, dtype: DType, device: torch.device) -> None:
        self._device = device
        network = read_checkpoint(AutoModelForCausalLM, model, dtype=getattr(torch, dtype))
        self._network = network.eval().to(device)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Samples `max(lengths)` tokens after each prompt; returns seconds."""
        self._network.generation_config = settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=0, eos_token_id=None
        )
        ids = torch.tensor(prompts, device=self._device)
        ends = torch.tensor(lengths, device=self._device) + ids.shape[1]
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([_HiddenStop(ends)]),
            )
        out.cpu()  # waits for the device
        seconds = time.perf_counter() - start
        assert out.shape[1] == int(ends.max()), "generate did not run to the longest row"
        return seconds


class ContinuousBatchingPeer:
    """transformers' own continuous batching over a paged cache. It knows each length."""

    def __init__(self, model: str | Path, dtype: DType, device: torch.device, num_tokens: int) -> None:
        """`num_tokens`: tokens that the cache must hold, which is all sequences at full length."""
        network = read_checkpoint(AutoModelForCausalLM, model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        self._network = network.eval().to(device)
        self._num_tokens = num_tokens

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Samples `lengths[i]` tokens after prompt i; returns seconds, which exclude the start of its manager."""
        settings = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1)
        sizes = ContinuousBatchingConfig(num_blocks=self._num_tokens // 256 + len(prompts), page_size=256)
        with self._network.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=sizes, timeout=5
        ) as manager:
            start = time.perf_counter()
            wanted = {
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1): length
                for prompt, length in zip(prompts, lengths, strict=True)
            }
            while wanted:
                result = manager.get_result(timeout=START_S)
                if result is None:
                    raise RuntimeError(f"transformers' continuous batching gave nothing for {START_S:g} s, or ended")
                if result.is_finished():
                    assert len(result.generated_tokens) == wanted.pop(result.request_id), result.error
            return time.perf_counter() - start


class _HiddenStop(StoppingCriteria):
    """Ends row i at its own length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


@contextmanager
def vllm_peer(python: Path, model: str, dtype: DType, *, max_model_len: int, max_num_seqs: int) -> Iterator[Side]:
    """vLLM in a process of another Python, whose script is `vllm_peer.py`. It knows each length."""
    options = {"model": model, "dtype": dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(Path(__file__).with_name("vllm_peer.py")), json.dumps(options)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=os.environ | settings, stdin=pipe, stdout=pipe, stderr=log) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def read() -> dict[str, Any]:
            ready, _, _ = select.select([answers], [], [], START_S)
            line = answers.readline() if ready else b""
            if not line:
                log.seek(0)
                end = log.read()[-1500:].decode(errors="replace")
                problem = "has ended" if ready else f"gave no answer for {START_S:g} s"
                raise ValueError(f"vllm_python: vLLM {problem}; its last words:\n{end}")
            return dict(json.loads(line))

        def generate(prompts: list[list[int]], lengths: list[int]) -> float:
            questions.write(json.dumps({"prompts": prompts, "lengths": lengths}).encode() + b"\n")
            questions.flush()
            return float(read()["seconds"])

        try:
            read()
            yield generate
        finally:
            process.kill()
