"""This rank's engine in the layout that the run has, and all that is needed to make it again in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.config import EngineConfig, ModelConfig, longest_sequence
from engines.kvcache.tiers import TieredKVStore, make_kv_store
from engines.kvcache.transfer import HostKVStore, KVStore
from engines.memory.plan import MemoryPlan
from engines.models.host_weights import HostWeights
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import detokenizer
from engines.parallel.collectives import Communicator, SingleRank, together
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout
from engines.parallel.sharding import check_shardable
from engines.replica.capacity import Capacity
from engines.replica.engine import LocalEngine, kv_capacity
from engines.replica.replica import HiddenStop


class Placement:
    """Checks layouts, builds this rank's part of one, and keeps the weights to build it from.

    All ranks make one, and make the same calls.
    """

    def __init__(
        self,
        source: str | Path,
        capacity: Capacity,
        layout: Layout,
        *,
        groups: GroupCache | None,
        tokenizer: Any,
        kv_host_bytes: int,
        hidden_stop: HiddenStop | None,
        regroups: bool,
    ) -> None:
        """`source` is the checkpoint. With `regroups` the run may go to other layouts of the groups' sizes.

        Raises ValueError where `layout` does not fit in the memory that is free. Takes none yet.
        """
        self._groups = groups
        self._world: Communicator = groups.world if groups is not None else SingleRank()
        sizes = {replica.tp_size for replica in layout.replicas}
        if regroups and groups is not None:
            sizes |= {size for size in groups.replica_sizes if _can_be_cut(capacity.model, size)}
        self._capacity = capacity.with_kv_bytes(sorted(sizes))
        self.config: EngineConfig = self._capacity.config
        self.model: ModelConfig = self._capacity.model
        self.device = self._capacity.device
        self.tokenizer = tokenizer
        self.layout = layout
        """The first one."""
        self._num_kv_tokens = {size: kv_capacity(self.model, self.config, size) for size in sorted(sizes)}
        """By the sizes of replicas that this run may have."""
        self._capacity.check(layout)
        self._kv_host_bytes = kv_host_bytes
        self._hidden_stop = hidden_stop
        self.kv_store: KVStore | None = None
        """What the engines made here keep the KV of preempted sequences in."""
        self.host_weights: HostWeights | None = None
        self.weights: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: checkpoint_tensors(source)
        """Whole weights, to build this rank's part of another layout from."""
        self.engine: LocalEngine

    def make_kv_store(self, token: str) -> HostKVStore | TieredKVStore:
        """The tiers that the options name; `token` is the run's."""
        return make_kv_store(
            token,
            host_bytes=self._kv_host_bytes,
            disk_bytes=self.config.kv_disk_bytes,
            disk_parent=self.config.kv_disk_folder,
        )

    @property
    def memory(self) -> MemoryPlan:
        return self._capacity.plan(self.engine.spec.tp_size, self._world.rank)

    def check(self, layout: Layout) -> None:
        """Raises ValueError for a layout that this run cannot go to."""
        check_groups(layout, self._groups)
        for replica in layout.replicas:
            check_shardable(self.model, replica.tp_size)
            if replica.tp_size not in self._num_kv_tokens:
                raise ValueError(
                    f"layout: replica {replica.id} has {replica.tp_size} ranks, and the KV cache is checked for those "
                    f"of {sorted(self._num_kv_tokens)}; add the layout to GroupCache's, and give LLM a layout_policy"
                )
        self._capacity.check(layout)
        if self.weights is _no_whole_weights:
            raise ValueError("layout: whole weights are kept after an update only with a layout_policy; give LLM one")

    def build(self, layout: Layout) -> None:
        """Takes the memory; the weights are not there yet."""
        spec = layout.replica_of(self._world.rank)
        assert spec is not None
        self.engine = LocalEngine(
            self.model,
            self.config,
            spec=spec,
            max_tp_size=self._capacity.max_tp_size,
            tensor_parallel=self._groups.get(spec.ranks) if self._groups is not None else SingleRank(),
            max_model_len=longest_sequence(self.config, self.model),
            device=self.device,
            detokenize=detokenizer(self.tokenizer),
            hidden_stop=self._hidden_stop,
            max_kv_tokens=min(self._num_kv_tokens.values()),
        )
        self.engine.replica.kv_store = self.kv_store

    def rebuild(self, layout: Layout) -> LocalEngine:
        """This rank's part of another layout, weights included, made after the one it had is given up."""
        version = self.engine.replica.policy_version
        self.engine.sleep(weights=True)
        self.build(layout)
        self.engine.load(self.weights(), version)
        return self.engine

    def share_weights(self) -> None:
        """Makes room for a copy of the weights on each host, so that layouts may change after an update, too."""
        assert self._groups is not None
        self.host_weights = HostWeights(self._groups, self.model, self.config.dtype)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Where one rank fails all raise, and none has weights."""
        kept = self.host_weights
        self.weights = kept.tensors if kept is not None else _no_whole_weights
        try:
            with together(self._world, "update_weights"):
                self.engine.load(kept.keep(weights) if kept is not None else weights, version)
        except BaseException:
            self.engine.has_weights = False
            raise

    def close(self) -> None:
        if self.host_weights is not None:
            self.host_weights.close()


def check_groups(layout: Layout, groups: GroupCache | None) -> None:
    """Raises ValueError for a layout that `groups`, or one process without any, cannot form."""
    if groups is not None:
        groups.check(layout)
    else:
        layout.check_places(1)


def _no_whole_weights() -> Iterable[tuple[str, Tensor]]:
    raise RuntimeError("regroup: whole weights are kept after an update only with a layout_policy; give LLM one")


def _can_be_cut(model: ModelConfig, tp_size: int) -> bool:
    try:
        check_shardable(model, tp_size)
    except ValueError:
        return False
    return True
