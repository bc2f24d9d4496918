"""Checks what an `LLM` is given; builds this rank's engine in the run's layout, and regroups it for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engines.adapter_config import base_folder, checkpoint_folder
from engines.config import EngineConfig, ModelConfig, draft_model_config, engine_config, longest_sequence
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.kvcache.files import FileKVStore
from engines.kvcache.page_storage import Pages
from engines.kvcache.store import KVStore
from engines.kvcache.tiers import TieredKVStore, host_pool_bytes, make_kv_store
from engines.memory.free_memory import FreeMemory, Memory, free_memory
from engines.memory.plan import MemoryPlan
from engines.models.loader import check_adapter
from engines.models.tokenizer import check_draft_tokenizer, detokenizer, load_tokenizer, with_end_token
from engines.parallel.collectives import Communicator, SingleRank, together
from engines.parallel.groups import GroupCache, all_layouts, num_torchrun_ranks, start_world
from engines.parallel.layout import Layout, ReplicaSpec, drafters_of, joint_groups, nested_layout
from engines.parallel.owned_files import at_end
from engines.parallel.sharding import check_shardable, is_shardable
from engines.replica.capacity import Capacity
from engines.replica.endings import HiddenStop
from engines.replica.engine import LocalEngine, kv_capacity
from engines.replica.preflight import check_engine, check_policy, usable_device
from engines.replica.regroup import Joint
from engines.rollout.draft_ranks import DraftRanks
from engines.rollout.generation import check_same_options
from engines.rollout.pace import Pace, of_pace
from engines.sequence import SequenceId
from engines.speculation.choose import Connect
from engines.speculation.drafter import Drafter, DraftPass
from engines.speculation.history import DraftHistory
from engines.speculation.marginal_gain import MarginalGain, check_draft_policy
from engines.speculation.policy import DraftPolicy
from engines.speculation.remote import RemoteDrafter
from engines.vllm_options import translate

MakePages = Callable[[ModelConfig, EngineConfig, torch.device], Pages]
"""Makes the pages for the KV cache of this model, with options whose `kv_cache_bytes` is a number."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `LLM`, except the model, the device and the engine's options."""

    world: GroupCache | None
    tensor_parallel_size: int
    layout: Layout | None
    schedule: SchedulePolicy | None
    layout_policy: LayoutPolicy | None
    pace: Pace | None
    hidden_stop: HiddenStop | None
    draft_policy: DraftPolicy
    own_drafter: Callable[[], Drafter] | None
    load: bool
    base_model: str | Path | None = None
    pages: MakePages | None = None

    def start_world(self, device: str | torch.device | None) -> GroupCache | None:
        """Makes the groups of torchrun's ranks if replicas are asked for and no `world` is given; else returns None."""
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
        """Returns the first layout. Raises ValueError for invalid arguments, or an invalid combination of them."""
        if self.schedule is not None:
            check_policy("schedule", self.schedule, "next")
        if self.layout_policy is not None:
            check_policy("layout_policy", self.layout_policy, "decide")
        if self.pace is not None:
            for method in ("step", "draft", "transfer", "switch"):
                check_policy("pace", self.pace, method)
        if self.hidden_stop is not None and not callable(self.hidden_stop):
            raise ValueError(f"hidden_stop={self.hidden_stop!r}: give a function")
        if not isinstance(self.load, bool):
            raise ValueError(f"load={self.load!r}: must be True or False")
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise ValueError(f"layout={self.layout!r}: give a Layout, as `nested_layout` makes them")
        tp_size = self.tensor_parallel_size
        if self.layout is not None and tp_size != 1:
            raise ValueError(f"tensor_parallel_size={tp_size}: the layout says it; leave one out")
        if groups is None and tp_size != 1:
            raise ValueError(f"tensor_parallel_size={tp_size}: one process has one shard; start ranks with torchrun")
        roles = [spec.role for spec in self.layout.replicas] if self.layout is not None else []
        if "draft" in roles and self.schedule is None:
            raise ValueError("layout: a replica has role='draft', which needs a coordinated rollout; give a schedule")
        layout = self.layout or nested_layout(range(groups.world.size if groups is not None else 1), tp_size)
        _check_groups(layout, groups)
        if self.schedule is not None and groups is None:
            raise ValueError("schedule: one process has nothing to dispatch to; give a world of ranks, or leave it out")
        if self.schedule is None and (self.layout_policy is not None or self.pace is not None):
            raise ValueError("layout_policy, pace: are for coordinated rollouts; give a schedule policy too")
        if self.pages is not None and groups is not None:
            raise ValueError("pages: are for one process alone; leave out the world, or pages")
        return layout


class Placement:
    """Checks layouts, builds this rank's engine in a layout, and keeps the weights from which it is built.

    Every rank makes one, and all ranks call the same methods.
    """

    def __init__(
        self,
        source: str | Path,
        device: str | torch.device | None,
        given: Arguments,
        options: dict[str, Any],
        groups: GroupCache | None,
    ) -> None:
        """`source` is the checkpoint, `options` are the fields of `EngineConfig`. Allocates no memory yet.

        Raises FileNotFoundError or ValueError, or RuntimeError if only other ranks' checks fail: all ranks raise.
        """
        self._groups = groups
        self._world: Communicator = groups.world if groups is not None else SingleRank()
        self.config: EngineConfig
        self.model: ModelConfig
        self.layout: Layout
        """The first layout."""
        with together(self._world, "LLM"):
            if isinstance(source, str | Path):
                source = checkpoint_folder(source)
            memory = self._check(source, device, given, options)
        check_same_options(self._world, self._options(given))
        regroups = given.layout_policy is not None
        sizes = {replica.tp_size for replica in self.layout.replicas}
        if regroups and groups is not None:
            sizes |= {size for size in groups.replica_sizes if is_shardable(self.model, size)}
        self._capacity = Capacity(
            model=self.model,
            config=self.config,
            device=self.device,
            free=FreeMemory.agree(self._world, memory),
            max_tp_size=groups.max_tp_size if groups is not None else 1,
        ).with_kv_bytes(sorted(sizes))
        self.config = self._capacity.config
        self._num_kv_tokens = {size: kv_capacity(self.model, self.config, size) for size in sorted(sizes)}
        """Tokens that the KV cache holds, by the sizes of replicas that this run may have."""
        self._capacity.check(self.layout)
        self._given = given
        self.source = source
        self.draft_ranks: DraftRanks | None = None
        """Those of this run; None where no rank only drafts."""
        self._present = self.layout
        self.connect_drafts: Connect | None = None
        """Makes a replica's client of the draft server; None without one."""
        self.draft_history = DraftHistory(num_bytes) if (num_bytes := self.config.draft_history_bytes) else None
        """Completions of earlier rollouts, for drafts; it survives regroups and `sleep`."""
        self.kv_store: KVStore | None = None
        """Where the engines made here store the KV of preempted sequences."""
        self.engine: LocalEngine

    def _check(
        self, source: str | Path, device: str | torch.device | None, given: Arguments, options: dict[str, Any]
    ) -> Memory:
        """Returns this rank's free memory. Raises FileNotFoundError or ValueError for what cannot run on this rank."""
        self.config = engine_config("LLM", translate(options))
        base = given.base_model
        self.model = ModelConfig.from_pretrained(source if base is None else base_folder(source, base))
        check_adapter(source, base)
        self.device = usable_device("LLM", device)
        self.max_model_len = longest_sequence(self.config, self.model)
        self.tokenizer = load_tokenizer(source, self.model, base)
        self.model = with_end_token(self.model, self.tokenizer)
        self.layout = given.check(self._groups)
        check_draft_policy(self.config, given.draft_policy)
        if (given.own_drafter is not None) != (self.config.drafter == "own"):
            raise ValueError(
                f"own_drafter={given.own_drafter!r}, EngineConfig.drafter={self.config.drafter!r}: drafter='own' needs "
                f"a function that makes the drafter; give both, or neither"
            )
        if any(spec.role == "draft" for spec in self.layout.replicas) and self.config.drafter == "none":
            raise ValueError("layout: a replica has role='draft', and EngineConfig.drafter='none'; give a drafter")
        if given.pace is not None and self.config.drafter != "none":
            given.pace.draft(self.layout.replicas[0], self.config.draft_method, [DraftPass(1)])  # raises, if it cannot
        hosts = self._groups.hosts if self._groups is not None else ("this host",)
        host = hosts[self._world.rank]
        self._kv_host_bytes = host_pool_bytes(self.config.kv_host_bytes, num_ranks=hosts.count(host))
        check_engine(self.config, self.model, self.device)
        check_draft_tokenizer(self.config, self.tokenizer)
        return free_memory(self.device, host)

    def _options(self, given: Arguments) -> dict[str, object]:
        """Returns the options that must be the same on all ranks, by name."""
        values: dict[str, object] = {"layout": self.layout, "load": given.load}
        values |= {f"EngineConfig.{name}": value for name, value in asdict(self.config).items()}
        values |= {f"ModelConfig.{name}": value for name, value in asdict(self.model).items()}
        draft = draft_model_config(self.config, self.model)
        values["EngineConfig.draft_model's config.json"] = None if draft is None else asdict(draft)
        for name in ("schedule", "layout_policy", "pace", "hidden_stop"):
            values[name] = getattr(given, name) is not None
        values["draft_policy"] = given.draft_policy is not MarginalGain
        values["own_drafter"] = given.own_drafter is not None
        return values

    def make_kv_store(self, token: str) -> FileKVStore | TieredKVStore:
        """Makes the KV store with the tiers that the options name; `token` is the run's. Its files are removed, at the
        latest, when this object is collected or the process ends."""
        store = make_kv_store(
            token,
            host_bytes=self._kv_host_bytes,
            disk_bytes=self.config.kv_disk_bytes,
            disk_parent=self.config.kv_disk_folder,
        )
        at_end(self, store.close)
        return store

    @property
    def memory(self) -> MemoryPlan:
        return self._capacity.plan(self.engine.spec.tp_size, drafts=self._present.has_draft_model(self._world.rank))

    def check(self, before: Layout, layout: Layout, longest: int = 0) -> None:
        """Raises ValueError for a layout that this run cannot regroup to from `before`, or whose largest replica cannot
        hold a sequence of `longest` tokens, or of the model's context if that is less."""
        _check_groups(layout, self._groups)
        for replica in layout.replicas:
            check_shardable(self.model, replica.tp_size)
            if self._given.layout_policy is not None and replica.tp_size not in self._num_kv_tokens:
                raise ValueError(
                    f"layout: replica {replica.id} has {replica.tp_size} ranks, and the KV cache is checked for those "
                    f"of {sorted(self._num_kv_tokens)}; add the layout to GroupCache's"
                )
        longest = min(longest, self.max_model_len)
        if longest > (held := self._longest(layout)):
            raise ValueError(
                f"layout: its largest replica holds KV of {held} tokens, and an unfinished sequence may reach {longest}"
                f"; give a larger replica"
            )
        self._capacity.check(layout)
        if self.draft_ranks is None and any(spec.role == "draft" for spec in layout.replicas):
            raise ValueError("layout: a replica has role='draft', and the first layout had none; begin with one")
        if not self.can_regroup(before, layout):
            raise ValueError(
                f"layout: ranks {joint_groups(before, layout)} would exchange weights, and not all of these groups "
                f"were made at start; add both layouts to GroupCache's"
            )

    def build(self, layout: Layout) -> None:
        """Builds this rank's engine in the layout: allocates its memory, but does not load the weights."""
        spec = layout.replica_of(self._world.rank)
        assert spec is not None
        self.engine = LocalEngine(
            self.model,
            self.config,
            spec=spec,
            max_tp_size=self._capacity.max_tp_size,
            tensor_parallel=self._groups.get(spec.ranks) if self._groups is not None else SingleRank(),
            max_model_len=self.max_model_len,
            device=self.device,
            detokenize=detokenizer(self.tokenizer),
            hidden_stop=self._given.hidden_stop,
            max_kv_tokens=self._max_kv_tokens(layout),
            kv_store=self.kv_store,
            draft_policy=of_pace(self._given.draft_policy, self._given.pace, spec, self.config),
            connect_drafts=self.connect_drafts,
            own_drafter=self._given.own_drafter,
            remote=self._remote(layout, spec),
            draft_history=self.draft_history,
            pages=None if self._given.pages is None else self._given.pages(self.model, self.config, self.device),
        )

    def _remote(self, layout: Layout, spec: ReplicaSpec) -> RemoteDrafter | None:
        self._present = layout
        return None if self.draft_ranks is None else self.draft_ranks.connect(layout, spec, self.model.vocab_size)

    def _longest(self, layout: Layout) -> int:
        """Returns the tokens that the largest rollout replica holds."""
        sizes = {one.tp_size for one in layout.replicas}
        held = {size: kv_capacity(self.model, self.config, size) for size in sizes}
        return max(held[one.tp_size] for one in layout.replicas if one.role == "rollout")

    def _max_kv_tokens(self, layout: Layout) -> int | None:
        """The longest sequence that the largest replica holds in each layout that a rollout begun in this one may have;
        None where nobody could hand it over to that replica."""
        if self._given.schedule is None or self._groups is None:
            return None
        largest = set() if self._given.layout_policy is None else set(self._groups.largest_sizes)
        others = [self._num_kv_tokens[size] for size in largest & self._num_kv_tokens.keys()]
        return min([self._longest(layout), *others])

    def settle(self, before: Layout, after: Layout) -> None:
        """After a regroup between rollouts, on all ranks: also where only other ranks' places have changed, the
        replica takes what the largest one holds, and drafts with those that draft now."""
        spec = after.replica_of(self._world.rank)
        self.engine.replica.limit(self._max_kv_tokens(after))
        assert spec is not None
        if spec == before.replica_of(self._world.rank) and drafters_of(before, spec) != drafters_of(after, spec):
            self.engine.draft_with(self._remote(after, spec))

    def can_regroup(self, before: Layout, after: Layout) -> bool:
        """Whether the ranks can exchange the weights and KV that they lack in the other layout."""
        return self._groups is not None and self._groups.joins(before, after)

    def regroup(self, before: Layout, after: Layout, places: Mapping[SequenceId, int]) -> LocalEngine:
        """Gives this rank's engine its place in another layout; see `LocalEngine.regroup`. All ranks whose replicas
        change call it together; others need not."""
        assert self._groups is not None
        rank = self._world.rank
        spec = after.replica_of(rank)
        joint = next((ranks for ranks in joint_groups(before, after) if rank in ranks), None)
        if spec is not None and joint is not None:
            group = self._groups.get(joint)
            self.engine.regroup(
                Joint.of(group, joint, before, after, max_tp_size=self._capacity.max_tp_size),
                self._groups.get(spec.ranks),
                places,
                draft_policy=of_pace(self._given.draft_policy, self._given.pace, spec, self.config),
                max_kv_tokens=self._max_kv_tokens(after),
                remote=self._remote(after, spec),
            )
        return self.engine

    def update(self, load: Callable[[LocalEngine], int | None]) -> int:
        """Lets `load` give the engine new weights; returns their checksum, which `load` may know. If one rank fails,
        all raise and none has weights."""
        try:
            if self.config.drafter == "model":
                with together(self._world, "update_weights"):  # before the stream, in which the ranks may meet
                    self.engine.load_draft_model()
            with together(self._world, "update_weights"):
                checksum = load(self.engine)
            return self.engine.checksum() if checksum is None else checksum
        except BaseException:
            self.engine.has_weights = False
            raise


def _check_groups(layout: Layout, groups: GroupCache | None) -> None:
    if groups is not None:
        groups.check(layout)
    else:
        layout.check_places(1)
