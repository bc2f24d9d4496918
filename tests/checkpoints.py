"""Random tiny Hugging Face checkpoints of every family and odd shape, for parity and equality tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

EOS = 1
_SHAPE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    # Wide enough that logits differ by several units: sampling is neither uniform nor greedy.
    "initializer_range": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

_LLAMA = (LlamaConfig, LlamaForCausalLM)
_QWEN2 = (Qwen2Config, Qwen2ForCausalLM)
_QWEN3 = (Qwen3Config, Qwen3ForCausalLM)

FAMILIES = {
    "llama2": (*_LLAMA, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": (*_LLAMA, {"rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "llama-linear-rope": (*_LLAMA, {"rope_parameters": _LINEAR, "tie_word_embeddings": True}),
    "llama-biases": (*_LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": (*_LLAMA, {"head_dim": 32}),
    "qwen2": (*_QWEN2, {"tie_word_embeddings": True}),
    "qwen2-untied-mqa": (*_QWEN2, {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen3": (*_QWEN3, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-odd": (
        *_QWEN3,
        {"head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 52, "attention_bias": True},
    ),
}


def save_checkpoint(
    directory: Path, family: str, *, seed: int = 0, shard_size: str = "1GB", **changed: int
) -> torch.nn.Module:
    """Writes a random checkpoint and returns the transformers model it holds, in fp32. `changed`: of the shape."""
    config_class, model_class, changes = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SHAPE, **changes, **changed}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialised to 0 and 1, which would hide mistakes
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model.eval()


def save_text_checkpoint(directory: Path, num_heads: int = 2, *, num_kv_heads: int = 1, is_chat: bool = False) -> None:
    """A random tiny Qwen3 over bytes, with its tokenizer; ends a completion about once in 60 tokens."""
    from algos.tokenizer import EOS_TOKEN_ID, PAD_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    byte_tokenizer(is_chat=is_chat).save_pretrained(directory)
