"""One dense decoder for Llama, Qwen2/2.5 and Qwen3, which differ in fields of `ModelConfig`, not by class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engines.attention.batch import ForwardBatch
from engines.attention.choose import ChosenAttention, choose_backend
from engines.config import EngineConfig, ModelConfig
from engines.kvcache.paged import PagedKVCache
from engines.models.checksums import checksum_parts
from engines.models.invariant import check_products, project_invariant
from engines.models.kernels import ChosenKernels
from engines.models.parameters import DecoderParameters, LayerParameters, logical_views
from engines.models.projection import FewRows, Project, copy_dtype, pack, project
from engines.models.reshard import WeightMove, change_shapes, reshard_parameters
from engines.models.rope import RotaryTable
from engines.parallel.collectives import Communicator, TorchGroup
from engines.parallel.sharding import Shard, is_first_holder, shard_config, shard_slices, vocab_rows


class Decoder:
    """Runs forward passes over flat batches: writes the new tokens' KV and returns the requested logits."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        shard: Shard,
        tensor_parallel: Communicator,
        attention: ChosenAttention,
        kernels: ChosenKernels,
        batch_invariant: bool = False,
    ) -> None:
        """Rank i of `tensor_parallel` holds shard i. `batch_invariant` needs native kernels and attention. Raises
        ValueError when the model cannot be cut into these shards.
        """
        assert (shard.index, shard.count) == (tensor_parallel.rank, tensor_parallel.size)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.local = shard_config(config, shard)
        """The sizes of this shard."""
        self.parameters = DecoderParameters.allocate(self.local, dtype, device)
        self._forward_parameters = self.parameters
        self._rotary = RotaryTable(config.rope, config.head_dim, max_positions, dtype, device)
        self.kernels = kernels
        """Also those for sampling from the logits."""
        self._operations = kernels.operations
        self._is_batch_invariant = batch_invariant
        self._take_group(tensor_parallel, attention)
        self._project: Project = project_invariant if batch_invariant else project
        self._check_products = check_products if batch_invariant else None
        self._copy_dtype = copy_dtype(dtype, device)
        self._few_rows = None if kernels.library is None or batch_invariant else FewRows(kernels.library)

    def _take_group(self, tensor_parallel: Communicator, attention: ChosenAttention) -> None:
        if self._is_batch_invariant and isinstance(tensor_parallel, TorchGroup):
            tensor_parallel = tensor_parallel.in_rank_order()
        self._tensor_parallel = tensor_parallel
        self.attention_backend = attention.name
        """A name from `EngineConfig.attention`, but not "auto"."""
        self._backend = attention.backend

    def reshard(
        self, move: WeightMove, tensor_parallel: Communicator, config: EngineConfig, *, keep_weights: bool
    ) -> int:
        """Becomes this rank's shard after `move`; `prepare` must follow. Returns the bytes of weights that it lacked.

        Without `keep_weights` the weights are released, and must be loaded. All ranks of the move call it together.
        """
        self.release()
        self.shard = move.after[move.group.rank]
        num_bytes = 0
        if keep_weights:
            num_bytes = reshard_parameters(self.parameters, self.config, move)
        else:
            change_shapes(self.parameters, self.config, self.shard)
        self.local = shard_config(self.config, self.shard)
        self._take_group(tensor_parallel, choose_backend(config, self.local, self.device))
        return num_bytes

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype in which matrices are multiplied, except in products of few rows."""
        return self._copy_dtype or self.dtype

    def logical_views(self) -> dict[str, Tensor]:
        """Returns Hugging Face name -> this shard's part of the parameter, as `shard_slices` cuts it."""
        rows = vocab_rows(self.config, self.shard)
        return logical_views(self.parameters, self.local, rows.stop - rows.start)

    def checksum(self) -> int:
        """Returns the checksum of this shard's weights; the shards' sum, modulo 2^64, is the whole model's checksum."""
        return checksum_parts(
            (name, view, shard_slices(self.config, name, self.shard))
            for name, view in self.logical_views().items()
            if is_first_holder(self.config, name, self.shard)
        )

    def unpack(self) -> None:
        """Must be called before the parameters change: frees the copies, and allocates what `release` has freed."""
        self.release()
        if not self.parameters.embedding.untyped_storage().size():
            self.parameters.resize(full=True)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Must be called after the parameters have changed, before the next forward pass."""
        if self._copy_dtype is not None:
            self._forward_parameters = self.parameters  # frees the old copies first
            self._forward_parameters = pack(self.parameters, self._copy_dtype)
        if self._check_products is not None:
            self._check_products(self._forward_parameters)

    def release(self, *, weights: bool = False) -> None:
        """Frees the copies that `prepare` has made; with `weights` also the parameters, until they are loaded again."""
        self._forward_parameters = self.parameters
        if weights:
            self.parameters.resize(full=False)

    @property
    def capturable(self) -> bool:
        """Whether `hidden` of decodes can be captured in a CUDA graph."""
        on_device = self._tensor_parallel.name in ("single", "nccl")  # others go through the host
        return self.device.type == "cuda" and on_device and bool(getattr(self._backend, "capturable", False))

    def forward(self, batch: ForwardBatch, kv: PagedKVCache) -> Tensor:
        """Returns logits [len(batch.logit_rows), vocab_size] in the model's dtype."""
        return self.logits(self.hidden(batch, kv))

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, kv: PagedKVCache) -> Tensor:
        """Writes the new tokens' KV; returns the input of `logits`, [len(batch.logit_rows), hidden_size]."""
        plan = self._backend.plan(batch, kv.keys[0].shape[1])
        rotary = self._rotary.at(batch.positions)
        eps = self.config.rms_norm_eps
        add_norm = self._operations.add_rms_norm
        residual = self._embed(batch.tokens)
        x = self._operations.rms_norm(residual, self.parameters.layers[0].input_norm, eps)
        next_norms = [layer.input_norm for layer in self.parameters.layers[1:]] + [self.parameters.final_norm]
        parameters, project = self._products(len(batch.tokens))
        for layer, next_norm, k_cache, v_cache in zip(parameters.layers, next_norms, kv.keys, kv.values, strict=True):
            x = self._attention(layer, x, rotary, k_cache, v_cache, batch.slot_mapping, plan, project)
            x, residual = add_norm(x, residual, layer.post_attention_norm, eps)
            x, residual = add_norm(self._mlp(layer, x, project), residual, next_norm, eps)
        if len(batch.logit_rows) < len(x):
            x = x.index_select(0, batch.logit_rows)
        return x

    def _products(self, num_rows: int) -> tuple[DecoderParameters, Project]:
        """Returns the parameters, and the function that multiplies `num_rows` rows by them."""
        if self._few_rows is not None and num_rows <= self._few_rows.most_rows:
            return self.parameters, self._few_rows
        return self._forward_parameters, self._project

    def _embed(self, tokens: Tensor) -> Tensor:
        """Returns [T, hidden]. A shard has the rows of some token ids and zeros for others; an all-reduce adds them."""
        if self.shard.count == 1:
            return self.parameters.embedding.index_select(0, tokens)
        local = tokens - self.shard.index * self.local.vocab_size
        absent = (local < 0) | (local >= self.local.vocab_size)
        x = self.parameters.embedding.index_select(0, local.masked_fill_(absent, 0))
        return self._tensor_parallel.all_reduce(x.masked_fill_(absent[:, None], 0))

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Returns [R, vocab_size], with the same bits on every shard: each column is computed by one shard only."""
        parameters, project = self._products(len(x))
        logits = project(x, parameters.head, None)
        if self.shard.count > 1:
            logits = self._tensor_parallel.all_gather(logits).transpose(0, 1).flatten(1)
        return logits[:, : self.config.vocab_size]

    def _attention(
        self,
        layer: LayerParameters,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        plan: Any,
        project: Project,
    ) -> Tensor:
        heads = project(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        q = self._operations.rotate_and_store(
            heads, layer.qk_norm, rotary, slot_mapping, k_cache, v_cache, self.config.rms_norm_eps
        )
        out = self._backend.attention(q, k_cache, v_cache, plan).flatten(1)
        return self._row_parallel(out, layer.output, layer.output_bias, project)

    def _mlp(self, layer: LayerParameters, x: Tensor, project: Project) -> Tensor:
        inner = self._operations.silu_mul(project(x, layer.gate_up, layer.gate_up_bias))
        return self._row_parallel(inner, layer.down, layer.down_bias, project)

    def _row_parallel(self, x: Tensor, weight: Tensor, bias: Tensor | None, project: Project) -> Tensor:
        """Sums the shards' products of their columns of `weight` and of x; the bias is added once, after the sum."""
        out = self._tensor_parallel.all_reduce(project(x, weight, None))
        return out if bias is None else out + bias
