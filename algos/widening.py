"""The same function at many times the cost: a trained small model, widened.

A rollout benchmark needs responses that mean something *and* forward passes that cost something. Widening by f gives
the hidden size, the heads and the MLP f times their size (f^2 times the parameters), and changes no logit.
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
    """A wider model with the logits of `model`, in its dtype.

    Dimensions added to the residual stream hold zeros for ever, which would lower the mean square that its norms see
    by `factor`. So whatever writes to the stream (embedding, o_proj, down_proj) is scaled by sqrt(factor): the norms
    see the old mean square beside the old eps, and their weights divide the scale out again. (Scaling eps instead
    would spoil the q/k norms, which share it; they are over head_dim, which is kept, and do not change.)
    """
    scale = math.sqrt(factor)
    # A tied output head is scaled too, as the embedding it is; the norm before it takes that out as well.
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
            # What is added here reads zeros, or is silenced, so it may hold anything: it keeps its random values.
            # Zeros would be as right, but q/k norms of zero heads, and their times, are those of no real model.
            _corner(parameter, narrow[name]).copy_(narrow[name] / divisors.get(module, 1.0))
    # How to generate (its end-of-sequence ids) lies beside the config.
    wide.generation_config = model.generation_config
    return wide.eval()


def _widen_config(config: PretrainedConfig, factor: int) -> PretrainedConfig:
    wide = copy.deepcopy(config)
    # New KV heads come after the old ones with a query group as large, so old query heads keep their KV heads.
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(wide, name, getattr(config, name) * factor)
    return wide


def _corner(wide: Tensor, narrow: Tensor) -> Tensor:
    """The view of `wide` that starts at 0 in every dim and has the shape of `narrow`."""
    return wide[tuple(slice(size) for size in narrow.shape)]
