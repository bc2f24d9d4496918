"""Whether a run's engines fit in the memory that is free, in each layout that they may have, before any is taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from engines.config import EngineConfig, ModelConfig, longest_sequence
from engines.memory.free_memory import FreeMemory
from engines.memory.plan import MIB, MemoryPlan, kv_block_bytes, mib, plan_memory
from engines.models.projection import copy_dtype
from engines.parallel.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What engines of this model and config take, and what there is. The same on every rank."""

    model: ModelConfig
    config: EngineConfig
    device: torch.device
    free: FreeMemory
    max_tp_size: int = 1
    """See `Shard`."""
    host_copy: bool = False
    """Whether each host keeps a copy of the weights to regroup from."""

    def plan(self, tp_size: int, rank: int = 0) -> MemoryPlan:
        """Of `rank`, in a replica of `tp_size`. `kv_cache_bytes` must be a number by now."""
        assert self.config.kv_cache_bytes != "auto"
        return self._plan(tp_size, self.config.kv_cache_bytes, self.free.names.count(self.free.names[rank]))

    def _plan(self, tp_size: int, kv_cache_bytes: int, num_host_ranks: int) -> MemoryPlan:
        copies = copy_dtype(getattr(torch, self.config.dtype), self.device)
        return plan_memory(
            self.model,
            self.config,
            tp_size=tp_size,
            max_tp_size=self.max_tp_size,
            max_model_len=longest_sequence(self.config, self.model),
            kv_cache_bytes=kv_cache_bytes,
            device_type=self.device.type,
            copy_dtype=None if copies is None else str(copies).removeprefix("torch."),
            num_host_ranks=num_host_ranks if self.host_copy else None,
        )

    def check(self, layout: Layout) -> None:
        """Raises ValueError, with the numbers, where a memory has less than its ranks take in `layout`."""
        plans = {rank: self.plan(replica.tp_size, rank) for replica in layout.replicas for rank in replica.ranks}
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
        """With a number for `kv_cache_bytes="auto"`: what `memory_utilization` of a rank's share of the free memory
        leaves beside the rest, and no more than `max_num_seqs` of the longest sequences fill.

        One for replicas of all these sizes. Raises ValueError where nothing is left, or free memory is not known.
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
        most = left = self.config.max_num_seqs * blocks_of_longest * max(block_bytes.values())
        for size in block_bytes:
            plan = self._plan(size, most, min(map(self.free.names.count, self.free.names)))
            beside = plan.total - plan.kv_cache
            if budget - beside < block_bytes[size]:
                without = replace(plan, kv_cache=0)
                raise ValueError(
                    f"EngineConfig.kv_cache_bytes='auto': memory_utilization={self.config.memory_utilization} of a "
                    f"rank's {share // MIB} MiB leaves no room for KV in a replica of {size} ranks, which needs "
                    f"{mib(beside)} MiB beside it: {without.parts()}. Lower {without.what_to_lower()}"
                )
            left = min(left, budget - beside)
        return replace(self, config=replace(self.config, kv_cache_bytes=left))
