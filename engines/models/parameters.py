"""A decoder's parameters as the forward pass needs them, and the logical (Hugging Face) views of the same memory.

q, k, v are one matrix, gate and up another. Each logical tensor, or a shard's part of it, is a slice of a fused tensor.
Checkpoint loading, weight sync and checksums use the views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """One decoder layer. Matrices are [out, in]; biases and q/k norms are None where the family has none.

    `qk_norm` is [2, head_dim]: the norm of queries, then that of keys.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in vars(self).values() if tensor is not None]


@dataclass(frozen=True, kw_only=True)
class DecoderParameters:
    """All parameters; `head` is `embedding` when they are tied."""

    embedding: Tensor
    layers: list[LayerParameters]
    final_norm: Tensor
    head: Tensor

    @staticmethod
    def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderParameters:
        """Uninitialised memory for every parameter."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def bias(present: bool, size: int) -> Tensor | None:
            return empty(size) if present else None

        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        query = config.num_heads * head_dim
        qkv = query + 2 * config.num_kv_heads * head_dim
        layers = [
            LayerParameters(
                input_norm=empty(hidden),
                qkv=empty(qkv, hidden),
                qkv_bias=bias(config.qkv_bias, qkv),
                qk_norm=empty(2, head_dim) if config.qk_norm else None,
                output=empty(hidden, query),
                output_bias=bias(config.output_bias, hidden),
                post_attention_norm=empty(hidden),
                gate_up=empty(2 * inner, hidden),
                gate_up_bias=bias(config.mlp_bias, 2 * inner),
                down=empty(hidden, inner),
                down_bias=bias(config.mlp_bias, hidden),
            )
            for _ in range(config.num_layers)
        ]
        embedding = empty(config.vocab_size, hidden)
        head = embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        return DecoderParameters(embedding=embedding, layers=layers, final_norm=empty(hidden), head=head)

    def resize(self, *, full: bool) -> None:
        """Releases the memory of all tensors, whose contents are lost; with `full`, allocates it again."""
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if full else 0)

    def tensors(self) -> list[Tensor]:
        """Every fused tensor once."""
        layers = [tensor for layer in self.layers for tensor in layer.tensors()]
        head = [] if self.head is self.embedding else [self.head]
        return [self.embedding, *layers, self.final_norm, *head]


def logical_views(parameters: DecoderParameters, config: ModelConfig, vocab_rows: int) -> dict[str, Tensor]:
    """Returns Hugging Face name -> its part of a fused tensor. A tied head has no name of its own.

    `config` has the sizes of `parameters`, a shard's or a whole model's; rows beyond `vocab_rows` are padding.
    """
    views = {
        "model.embed_tokens.weight": parameters.embedding[:vocab_rows],
        "model.norm.weight": parameters.final_norm,
    }
    if parameters.head is not parameters.embedding:
        views["lm_head.weight"] = parameters.head[:vocab_rows]
    for index, layer in enumerate(parameters.layers):
        views |= layer_views(layer, index, config)
    return views


def layer_views(layer: LayerParameters, index: int, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the part of `logical_views` that belongs to layer number `index`."""
    query = config.num_heads * config.head_dim
    key_value = config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    named = {
        prefix + "input_layernorm.weight": layer.input_norm,
        prefix + "post_attention_layernorm.weight": layer.post_attention_norm,
        attention + "q_norm.weight": None if layer.qk_norm is None else layer.qk_norm[0],
        attention + "k_norm.weight": None if layer.qk_norm is None else layer.qk_norm[1],
        attention + "o_proj.weight": layer.output,
        attention + "o_proj.bias": layer.output_bias,
        mlp + "down_proj.weight": layer.down,
        mlp + "down_proj.bias": layer.down_bias,
    }
    for fused, names, sizes in (
        ((layer.qkv, layer.qkv_bias), [attention + f"{p}_proj" for p in "qkv"], [query, key_value, key_value]),
        ((layer.gate_up, layer.gate_up_bias), [mlp + "gate_proj", mlp + "up_proj"], [config.intermediate_size] * 2),
    ):
        for tensor, kind in zip(fused, ("weight", "bias"), strict=True):
            if tensor is not None:
                parts = zip(names, tensor.split(sizes), strict=True)
                named.update({f"{name}.{kind}": part for name, part in parts})
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def logical_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Returns Hugging Face name -> shape of the whole parameter."""
    parameters = DecoderParameters.allocate(config, torch.float32, torch.device("meta"))
    return {name: view.shape for name, view in logical_views(parameters, config, config.vocab_size).items()}
