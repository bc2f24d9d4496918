"""Hugging Face folders with random weights, so that all engines read the same weights; and the floor of a step."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from engines.rollout.generation import make_states
from engines.sequence import SamplingParams, SequenceState
from experiments.comparison.turns import timed
from research.workloads.shapes import SHAPES, DecoderShape

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import Qwen3Config

    from engines import LLM
    from engines.parallel.collectives import Communicator

Shape = Literal["0.8m", "25m", "200m", "8b"]
"""Names in `SHAPES`."""


@contextmanager
def checkpoint(
    model: str | DecoderShape, *, max_positions: int, dtype: str, world: Communicator | None = None
) -> Iterator[str]:
    """Yields the folder `model`, or for a shape a temporary folder with random weights.

    The ranks of a world enter and leave together, and share the folder.
    """
    shape = SHAPES.get(model) if isinstance(model, str) else model
    if shape is None:
        yield str(model)
        return
    from engines.parallel.collectives import SingleRank

    world = world or SingleRank()
    with tempfile.TemporaryDirectory(prefix="curtail-bench-") as mine:
        if world.rank == 0:
            save_random_model(Path(mine), shape, max_positions=max_positions, dtype=dtype)
        yield world.broadcast_bytes(mine.encode()).decode()
        world.barrier()


def save_random_model(folder: Path, shape: DecoderShape, *, max_positions: int, dtype: str = "float32") -> None:
    """Writes a Qwen3 of that shape with random weights, made on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    config = save_config(folder, shape, max_positions=max_positions)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def save_config(folder: Path, shape: DecoderShape, *, max_positions: int) -> Qwen3Config:
    """Writes the config of a Qwen3 of that shape, without weights."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.tied,
        # Ids that a peer may require; no benchmark lets them end a sequence.
        bos_token_id=0,
        eos_token_id=1,
    )
    config.save_pretrained(folder)
    return config


def random_weights(llm: LLM) -> Iterator[tuple[str, Tensor]]:
    """Yields random weights for `update_weights`, made on the engine's device: no file is read."""
    import torch

    from engines.models.parameters import logical_shapes

    dtype = getattr(torch, llm.config.dtype)
    generator = torch.Generator(llm.device).manual_seed(0)
    for name, size in logical_shapes(llm.model_config).items():
        yield name, torch.empty(size, dtype=dtype, device=llm.device).normal_(0, 0.02, generator=generator)


def random_prompts(count: int, length: int, vocab_size: int = 256, *, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(2, vocab_size, (count, length)).tolist()


def random_sequence(uid: int, *, num_tokens: int, length: int) -> SequenceState:
    """A sequence that generates `length` tokens. A uid always has the same prompt."""
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    return make_states(random_prompts(1, num_tokens, seed=uid), [params], [uid], run_seed=0, policy_step=0)[0]


def floor_seconds(shape: DecoderShape, dtype: str, *, steps: int, context_tokens: int, device: torch.device) -> float:
    """Seconds to read the weights `steps` times and the KV of `context_tokens` tokens once. The speed is measured here,
    on a plain read of as many bytes as the weights have, at most 4 GiB: from a cache if they fit in one."""
    import torch

    item = getattr(torch, dtype).itemsize
    weights = shape.num_matrix_parameters * item
    data = torch.ones(min(weights, 2**32) // 8, dtype=torch.int64, device=device)
    took = [timed(lambda: data.sum().item())[0] for _ in range(9)]
    num_bytes = steps * weights + context_tokens * shape.kv_elements_per_token * item
    return statistics.median(took) * num_bytes / data.nbytes
