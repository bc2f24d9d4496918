"""Hugging Face `generate` as the other side of a benchmark, and how many threads a side is best with."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from engines.config import DType


class HuggingFacePeer:
    """Pads all rows until the longest is done, as `generate` must."""

    def __init__(self, model: str | Path, dtype: DType, device: torch.device) -> None:
        self._device = device
        network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._network = network.eval().to(device)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Samples so many tokens behind each prompt, all of equal length; returns seconds."""
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


class _HiddenStop(StoppingCriteria):
    """Ends row i at its own length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


def best_threads(side: Callable[[], float], candidates: list[int]) -> int:
    """Warms the side up, and finds which number of threads it is fastest with."""
    seconds = {}
    for threads in candidates:
        torch.set_num_threads(threads)
        side()
        seconds[threads] = side()
    return min(seconds, key=seconds.__getitem__)
