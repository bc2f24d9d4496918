"""What `LLM` is given, checked on all ranks together before memory is taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.config import ModelConfig, engine_config, longest_sequence
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.kvcache.tiers import host_pool_bytes
from engines.memory.free_memory import FreeMemory, free_memory
from engines.models.tokenizer import load_tokenizer
from engines.parallel.collectives import Communicator, SingleRank, together
from engines.parallel.groups import GroupCache, all_layouts, num_torchrun_ranks, start_world
from engines.parallel.layout import Layout, nested_layout
from engines.replica.capacity import Capacity
from engines.replica.placement import Placement, check_groups
from engines.replica.preflight import check_engine, check_policy, usable_device
from engines.replica.replica import HiddenStop
from engines.rollout.generation import check_same_options
from engines.rollout.steps import Pace


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Of `LLM`, beside the model, the device and the engine's options."""

    world: GroupCache | None
    tensor_parallel_size: int
    layout: Layout | None
    schedule: SchedulePolicy | None
    layout_policy: LayoutPolicy | None
    pace: Pace | None
    hidden_stop: HiddenStop | None
    load: bool

    def start_world(self, device: str | torch.device | None) -> GroupCache | None:
        """The groups of torchrun's ranks, where replicas are asked for and no `world` is given."""
        if self.world is not None and not isinstance(self.world, GroupCache):
            raise ValueError(f"world={self.world!r}: give a GroupCache of the ranks, as docs/rollouts.md shows")
        has_replicas = self.tensor_parallel_size != 1 or isinstance(self.layout, Layout) or self.schedule is not None
        if self.world is not None or not has_replicas or num_torchrun_ranks() == 1:
            return None
        ranks = range(num_torchrun_ranks())
        first = self.layout or nested_layout(ranks, self.tensor_parallel_size)
        layouts = [first] if self.layout_policy is None else [first, *all_layouts(ranks)]
        return start_world(layouts, on_cuda=str(device or "cuda").startswith("cuda"))

    def check(self, groups: GroupCache | None) -> Layout:
        """The first layout. Raises ValueError for arguments that cannot be, or not together."""
        if self.schedule is not None:
            check_policy("schedule", self.schedule, "next")
        if self.layout_policy is not None:
            check_policy("layout_policy", self.layout_policy, "decide")
        for name, function in (("pace", self.pace), ("hidden_stop", self.hidden_stop)):
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r}: give a function")
        if not isinstance(self.load, bool):
            raise ValueError(f"load={self.load!r}: must be True or False")
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise ValueError(f"layout={self.layout!r}: give a Layout, as `nested_layout` makes them")
        tp_size = self.tensor_parallel_size
        if self.layout is not None and tp_size != 1:
            raise ValueError(f"tensor_parallel_size={tp_size}: the layout says it; leave one out")
        if groups is None and tp_size != 1:
            raise ValueError(f"tensor_parallel_size={tp_size}: one process has one shard; start ranks with torchrun")
        layout = self.layout or nested_layout(range(groups.world.size if groups is not None else 1), tp_size)
        check_groups(layout, groups)
        if self.schedule is not None and groups is None:
            raise ValueError("schedule: one process has nothing to dispatch to; give a world of ranks, or leave it out")
        if self.schedule is None and (self.layout_policy is not None or self.pace is not None):
            raise ValueError("layout_policy, pace: are for coordinated rollouts; give a schedule policy too")
        return layout

    def place(
        self, model: str | Path, device: str | torch.device | None, options: dict[str, Any], groups: GroupCache | None
    ) -> Placement:
        """Where this rank's engine goes; it is not built yet. All ranks call it together.

        Raises FileNotFoundError or ValueError, on every rank where one cannot have its part.
        """
        world: Communicator = groups.world if groups is not None else SingleRank()
        with together(world, "LLM"):
            config = engine_config("LLM", options)
            model_config = ModelConfig.from_pretrained(model)
            where = usable_device("LLM", device)
            longest_sequence(config, model_config)
            tokenizer = load_tokenizer(model, model_config)
            layout = self.check(groups)
            check_engine(config, model_config, where)
            hosts = groups.hosts if groups is not None else ("this host",)
            host = hosts[world.rank]
            kv_host_bytes = host_pool_bytes(config.kv_host_bytes, num_ranks=hosts.count(host))
            memory = free_memory(where, host)
        values: dict[str, object] = {"layout": layout, "load": self.load}
        values |= {f"EngineConfig.{name}": value for name, value in asdict(config).items()}
        values |= {f"ModelConfig.{name}": value for name, value in asdict(model_config).items()}
        for name in ("schedule", "layout_policy", "pace", "hidden_stop"):
            values[name] = getattr(self, name) is not None
        check_same_options(world, values)
        capacity = Capacity(
            model=model_config,
            config=config,
            device=where,
            free=FreeMemory.agree(world, memory),
            max_tp_size=groups.max_tp_size if groups is not None else 1,
            host_copy=self.layout_policy is not None,
        )
        return Placement(
            model,
            capacity,
            layout,
            groups=groups,
            tokenizer=tokenizer,
            kv_host_bytes=kv_host_bytes,
            hidden_stop=self.hidden_stop,
            regroups=self.layout_policy is not None,
        )
