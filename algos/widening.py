"""Widens a trained small model: the same function at many times the cost.

A rollout benchmark needs meaningful responses *and* expensive forward passes. Widening by f multiplies the hidden size,
the heads and the MLP by f (the parameters by f^2), and changes no logit.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from algos.publish import check_replaceable, only_writer, publish_directory, read_record
from engines.models.hugging_face import read_checkpoint

_SUPPORTED = ("llama", "qwen2", "qwen3")


def widen(source: str | Path, target: str | Path, factor: int) -> Path:
    """Publishes in `target` the checkpoint `source` (Llama, Qwen2, Qwen3), widened; returns `target`.

    hidden_size, intermediate_size and the numbers of query and KV heads grow `factor` times; head_dim, layers and
    vocabulary stay. Logits are equal up to rounding. The tokenizer is copied. An older widened model is replaced.
    """
    source, target = Path(source), Path(target)
    if factor < 2:
        raise ValueError(f"factor={factor}: must be at least 2")
    if not (source / "config.json").is_file():
        raise ValueError(f"source={str(source)!r}: no config.json there; give a Hugging Face checkpoint")
    if source.resolve() == target.resolve():
        raise ValueError(f"target={str(target)!r}: is the source; choose another directory")
    config = read_checkpoint(AutoConfig, source)
    if config.model_type not in _SUPPORTED:
        raise ValueError(f"source={str(source)!r}: model_type={config.model_type!r}; use one of {list(_SUPPORTED)}")
    with only_writer(target):
        check_replaceable(target)
        wide = widen_model(read_checkpoint(AutoModelForCausalLM, source, dtype="auto"), factor)

        def write(path: Path) -> None:
            wide.save_pretrained(path)
            if (source / "tokenizer_config.json").is_file():
                read_checkpoint(AutoTokenizer, source).save_pretrained(path)

        record = {"widened": {"source": str(source), "factor": factor, "source_record": read_record(source)}}
        publish_directory(target, record, write)
    return target


@torch.no_grad()
def widen_model(model: PreTrainedModel, factor: int) -> PreTrainedModel:
    """Returns a wider model with the logits of `model`, in its dtype.

    Dimensions added to the residual stream are always zero, so the mean square in its norms would be `factor` times
    smaller. Therefore the modules that write to the stream (embedding, o_proj, down_proj) are scaled by sqrt(factor):
    the norms then see the old mean square and the old eps, and their weights are divided by sqrt(factor). (Scaling eps
    instead would change the q/k norms, which share eps. They are over head_dim, which stays the same.)
    """
    scale = math.sqrt(factor)
    # A tied output head is the embedding, so it is scaled, too; the final norm is divided by that scale as well.
    final_scale = scale**2 if model.config.tie_word_embeddings else scale
    divisors = {"input_layernorm": scale, "post_attention_layernorm": scale, "norm": final_scale}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wide = AutoModelForCausalLM.from_config(
            _widen_config(model.config, factor), dtype=model.dtype, trust_remote_code=False
        )
    narrow = dict(model.named_parameters())
    for name, parameter in wide.named_parameters():
        module = name.split(".")[-2]
        if module in ("embed_tokens", "o_proj", "down_proj"):
            # Zeros keep the added residual dimensions at 0, and silence the added heads and MLP units.
            parameter.zero_()
            _corner(parameter, narrow[name]).copy_(narrow[name] * scale)
        else:
            # Weights added here read zeros or feed silenced units, so any values are correct: they stay random.
            # With zeros, the q/k norms of zero heads, and their times, would be unlike those of a real model.
            _corner(parameter, narrow[name]).copy_(narrow[name] / divisors.get(module, 1.0))
    # The generation settings (end-of-sequence ids) are not part of the config.
    wide.generation_config = model.generation_config
    return wide.eval()


def _widen_config(config: PretrainedConfig, factor: int) -> PretrainedConfig:
    wide = copy.deepcopy(config)
    # New KV heads come after the old ones and have query groups of the same size: old query heads keep their KV heads.
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(wide, name, getattr(config, name) * factor)
    return wide


def _corner(wide: Tensor, narrow: Tensor) -> Tensor:
    """The view of `wide` that starts at 0 in every dim and has the shape of `narrow`."""
    return wide[tuple(slice(size) for size in narrow.shape)]
