"""Checks before any allocation whether a run's engines fit in free memory, in each layout that they may have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engines.config import EngineConfig, ModelConfig, draft_model_config, longest_sequence
from engines.memory.free_memory import FreeMemory
from engines.memory.plan import MIB, MemoryPlan, draft_kv_blocks, kv_block_bytes, mib, plan_memory
from engines.models.parameters import DecoderParameters, logical_shapes
from engines.models.projection import copy_dtype, packed_bytes
from engines.parallel.layout import Layout
from engines.parallel.sharding import Shard, shard_config


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The memory that engines of this model and config need, and the memory that is free. The same on every rank."""

    model: ModelConfig
    config: EngineConfig
    device: torch.device
    free: FreeMemory
    max_tp_size: int = 1
    """See `Shard`."""

    @cached_property
    def draft(self) -> ModelConfig | None:
        """The draft model; None without one."""
        return draft_model_config(self.config, self.model)

    def plan(self, tp_size: int, *, drafts: bool = True) -> MemoryPlan:
        """Returns the plan of a rank in a replica of `tp_size` ranks; `drafts`: whether it has the draft model, if
        there is one. `kv_cache_bytes` must be a number."""
        assert self.config.kv_cache_bytes != "auto"
        return self._plan(tp_size, self.config.kv_cache_bytes, drafts=drafts)

    def _plan(self, tp_size: int, kv_cache_bytes: int, *, drafts: bool = True) -> MemoryPlan:
        shard = Shard(count=tp_size, max_count=self.max_tp_size)
        plan = self._plan_model(self.model, self.config, shard, kv_cache_bytes)
        if self.draft is None or not drafts:
            return plan
        num_blocks = plan.num_kv_tokens // self.config.block_size
        num_blocks = draft_kv_blocks(self.config, num_blocks, plan.max_model_len)
        num_bytes = num_blocks * kv_block_bytes(self.draft, self.config, 1)
        drafter = self._plan_model(self.draft, self.config.of_draft_model, Shard(count=1), num_bytes)
        return replace(plan, drafter=replace(drafter, libraries=0))

    def _plan_model(self, model: ModelConfig, config: EngineConfig, shard: Shard, kv_cache_bytes: int) -> MemoryPlan:
        dtype: torch.dtype = getattr(torch, config.dtype)
        local = shard_config(model, shard)
        parameters = DecoderParameters.allocate(local, dtype, torch.device("meta"))
        products = copy_dtype(dtype, self.device)
        return plan_memory(
            model,
            local,
            config,
            weights=sum(tensor.nbytes for tensor in parameters.tensors()),
            copies=packed_bytes(parameters, products) if products is not None else 0,
            loading=max(shape.numel() for shape in logical_shapes(model).values()) * max(4, dtype.itemsize),
            max_model_len=longest_sequence(self.config, self.model),
            kv_cache_bytes=kv_cache_bytes,
            device_type=self.device.type,
            wide=products.itemsize if products not in (None, dtype) else 0,
        )

    def check(self, layout: Layout) -> None:
        """Raises ValueError, with the numbers, when ranks sharing a memory need more in `layout` than it has free."""
        plans = {
            rank: self.plan(replica.tp_size, drafts=layout.has_draft_model(rank))
            for replica in layout.replicas
            for rank in replica.ranks
        }
        for name, free in self.free.num_bytes.items():
            here = [plan for rank, plan in plans.items() if self.free.names[rank] == name]
            needed = sum(plan.total for plan in here)
            if free is None or needed <= free:
                continue
            largest = max(here, key=lambda plan: plan.total)
            many = f"the {len(here)} ranks of {name} need {mib(needed)} MiB, one of them"
            who = "the engine needs" if len(here) == 1 else many
            raise ValueError(
                f"EngineConfig: {who} {mib(largest.total)} MiB: {largest.parts()}; available: {free // MIB} MiB. "
                f"Lower {largest.what_to_lower()}"
            )

    def with_kv_bytes(self, tp_sizes: Iterable[int]) -> Capacity:
        """Returns a copy with a number for `kv_cache_bytes="auto"`, the same for replicas of all these sizes.

        It is `memory_utilization` of a rank's share of the free memory, minus all else that the engine takes, a draft
        model's KV included; at most what `max_num_seqs` of the longest sequences fill. Raises ValueError when not even
        one block fits, or the free memory is not known.
        """
        if self.config.kv_cache_bytes != "auto":
            return self
        share = self.free.share
        if share is None:
            raise ValueError(
                f"EngineConfig.kv_cache_bytes='auto': what {self.device} has free cannot be known here; give a number"
            )
        budget = int(share * self.config.memory_utilization)
        blocks_of_longest = -(-longest_sequence(self.config, self.model) // self.config.block_size)
        block_bytes = {size: kv_block_bytes(self.model, self.config, size) for size in tp_sizes}
        draft_bytes = 0 if self.draft is None else kv_block_bytes(self.draft, self.config, 1)
        most = left = self.config.max_num_seqs * blocks_of_longest * max(block_bytes.values())
        for size in block_bytes:
            plan = self._plan(size, most)
            beside = replace(plan, kv_cache=0)
            if plan.drafter is not None:
                drafter = replace(plan.drafter, kv_cache=draft_kv_blocks(self.config, 0, 0) * draft_bytes)
                beside = replace(beside, drafter=drafter)
            both_bytes = block_bytes[size] + draft_bytes
            if budget - beside.total < both_bytes:
                raise ValueError(
                    f"EngineConfig.kv_cache_bytes='auto': memory_utilization={self.config.memory_utilization} of a "
                    f"rank's {share // MIB} MiB leaves no room for KV in a replica of {size} ranks, which needs "
                    f"{mib(beside.total)} MiB beside it: {beside.parts()}. Lower {beside.what_to_lower()}"
                )
            left = min(left, (budget - beside.total) * block_bytes[size] // both_bytes)
        return replace(self, config=replace(self.config, kv_cache_bytes=left))
