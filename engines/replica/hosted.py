"""A model on this rank, and all that it needs to run: a target, or a small model that drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engines.attention.choose import choose_backend, setting_of
from engines.config import EngineConfig, ModelConfig
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.page_storage import Pages
from engines.kvcache.paged import PagedKVCache
from engines.memory.free_memory import free_memory
from engines.models.decoder import Decoder
from engines.models.kernels import choose_kernels
from engines.parallel.collectives import Communicator
from engines.parallel.sharding import Shard, shard_config
from engines.replica.row_times import RowTimes
from engines.replica.runner import ModelRunner
from engines.sampling.edits import Editor


@dataclass(frozen=True, kw_only=True)
class HostedModel:
    """A shard of a model's weights, a KV cache, who holds its blocks, and what runs passes over both."""

    decoder: Decoder
    kv: PagedKVCache
    blocks: BlockManager
    runner: ModelRunner
    row_times: RowTimes
    editor: Editor
    config: EngineConfig
    max_model_len: int

    @classmethod
    def make(
        cls,
        model: ModelConfig,
        config: EngineConfig,
        *,
        shard: Shard,
        tensor_parallel: Communicator,
        max_model_len: int,
        device: torch.device,
        num_kv_tokens: int,
        editor: Editor,
        pages: Pages | None = None,
    ) -> HostedModel:
        """Allocates the memory; the weights are loaded later. With `pages` the KV cache lies there, and
        `num_kv_tokens` has no effect. Raises ValueError when the model cannot be cut into these shards, the pages have
        no size for it, or there is no memory for the KV cache."""
        local = shard_config(model, shard)
        dtype: torch.dtype = getattr(torch, config.dtype)
        decoder = Decoder(
            model,
            dtype=dtype,
            device=device,
            max_positions=max_model_len,
            shard=shard,
            tensor_parallel=tensor_parallel,
            attention=choose_backend(config, local, device),
            kernels=choose_kernels(config.kernels, setting_of(config, local, device)),
            batch_invariant=config.batch_invariant,
        )
        try:
            kv = PagedKVCache(
                num_layers=model.num_layers,
                num_blocks=num_kv_tokens // config.block_size,
                block_size=config.block_size,
                num_kv_heads=local.num_kv_heads,
                head_dim=model.head_dim,
                dtype=dtype,
                device=device,
                pages=pages,
            )
        except RuntimeError as error:  # what torch's allocators raise; on a CPU it has no narrower type
            raise ValueError(
                f"EngineConfig.kv_cache_bytes={config.kv_cache_bytes}: {device} has {free_memory(device).free} bytes "
                f"free; give less"
            ) from error
        return cls(
            decoder=decoder,
            kv=kv,
            blocks=BlockManager(kv.num_blocks, config.block_size) if kv.pages is None else kv.pages.share.blocks,
            runner=ModelRunner(decoder, kv, config, max_model_len, editor),
            row_times=RowTimes(
                decoder, kv, config, max_model_len, tensor_parallel, num_kv_tokens=kv.num_blocks * config.block_size
            ),
            editor=editor,
            config=config,
            max_model_len=max_model_len,
        )

    def placed(self, blocks: BlockManager, tensor_parallel: Communicator, num_kv_tokens: int) -> HostedModel:
        """Returns the model after its weights and its KV cache have taken the shape of another place."""
        shared = (self.decoder, self.kv, self.config, self.max_model_len)
        return replace(
            self,
            blocks=blocks,
            runner=ModelRunner(*shared, self.editor),
            row_times=RowTimes(*shared, tensor_parallel, num_kv_tokens=num_kv_tokens),
        )

    def sleep(self, *, weights: bool) -> None:
        """Releases the KV cache; with `weights` also the weights. No sequence may hold blocks."""
        self.runner.drop_graphs()  # memory that is allocated again has another address
        self.kv.release()
        if weights:
            self.decoder.release(weights=True)

    def wake_up(self) -> None:
        self.kv.restore()
