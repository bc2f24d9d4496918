"""Hugging Face folders with random weights, for benchmarks: every engine reads the same."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from research.workloads.shapes import DecoderShape


def save_random_model(folder: Path, shape: DecoderShape, *, max_positions: int, dtype: str = "float32") -> None:
    """Writes a Qwen3 of that shape. Made on the GPU where there is one."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=shape.tied,
        # Ids that a peer may want; no benchmark lets them end a sequence.
        bos_token_id=0,
        eos_token_id=1,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            Qwen3ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
