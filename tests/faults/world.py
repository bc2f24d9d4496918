"""Schedules in a torchrun world of four ranks: moves, regroups, pauses, phases, late and repeated messages.

In some, one rank's KV cache holds half of the longest sequence; layouts then have a replica of two or four ranks.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from engines import parallel
from engines.config import EngineConfig, ModelConfig
from engines.control.ends import Notice
from engines.control.transport import Client, Server
from engines.coordination.requests import RequestRegroup
from engines.kvcache.tiers import make_kv_store
from engines.models.loader import checkpoint_tensors
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout, ReplicaSpec, joint_groups
from engines.parallel.owned_files import DEV_SHM
from engines.replica.engine import LocalEngine
from engines.replica.regroup import Joint
from engines.rollout import worker_core, world
from engines.sequence import SequenceId
from tests.faults.channel import Faults, FaultyClient, FaultyServer
from tests.faults.oracle import MAX_LEN, NUM_VERSIONS, Environments, Oracle, engine_options
from tests.faults.requests import Caller, count_decisions, num_handed_over, random_policy, random_predictor
from tests.worlds import run_world

NUM_RANKS = 4
TIMEOUT_S = 30.0
"""Before it, a wait that leads to nothing names who was waited for."""


def run_world_schedules(oracle: Path, seeds: list[int]) -> dict[str, Any]:
    """Runs them in one set of processes; returns the sums of what happened. Raises RuntimeError naming the seed."""
    results = run_world(_rank, NUM_RANKS, str(oracle), seeds, timeout=60.0 + 20.0 * len(seeds))
    total = Counter(results[0]["counts"])
    for other in results[1:]:
        total.update({key: other["counts"].get(key, 0) for key in _OF_RANKS})
    return {**total, "longest_s": round(max(results[0]["seconds"]), 2), "seconds": round(sum(results[0]["seconds"]), 1)}


_OF_RANKS = ("kv_exported", "kv_refused", "kv_imported", "kv_recomputed", "preemptions", "switched", "kept", "kv_bytes")


def _rank(oracle_directory: str, seeds: list[int]) -> dict[str, Any]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = TorchGroup(timeout_s=TIMEOUT_S)
    every = [*combinations(range(NUM_RANKS), 2), tuple(range(NUM_RANKS))]
    one_host = GroupCache(group, every, timeout_s=TIMEOUT_S)
    parallel.groups._host = lambda: f"host {group.rank // 2}"
    two_hosts = GroupCache(group, every, timeout_s=TIMEOUT_S)
    worker_core.REPORT_EVERY_S = 0.01  # more to repeat, and more moments to act at
    oracle = Oracle(oracle_directory)
    counts: Counter[str] = Counter()
    seconds = []
    for seed in seeds:
        start = time.monotonic()
        try:
            groups = two_hosts if random.Random(f"hosts/{seed}").random() < 0.25 else one_host
            _Schedule(seed, oracle, groups, counts).run()
        except BaseException as error:
            raise RuntimeError(
                f"world schedule {seed}: {error}\nreplay: python -m tests.faults --world 1 --first-seed {seed}"
            ) from error
        seconds.append(time.monotonic() - start)
    one_host.close()
    two_hosts.close()
    dist.destroy_process_group()
    return {"counts": dict(counts), "seconds": seconds}


def wide_layout(rng: random.Random, epoch: int) -> Layout:
    """As `random_layout`, with a replica of more than one rank."""
    layout = random_layout(rng, epoch)
    return layout if any(spec.tp_size > 1 for spec in layout.replicas) else wide_layout(rng, epoch)


def random_layout(rng: random.Random, epoch: int) -> Layout:
    """Replicas of one, two or four ranks in any combination; some ranks may be idle."""
    if rng.random() < 0.2:
        return Layout(epoch=epoch, replicas=(ReplicaSpec(id=0, ranks=tuple(range(NUM_RANKS))),))
    ranks = rng.sample(range(NUM_RANKS), NUM_RANKS)
    replicas: list[tuple[int, ...]] = []
    while ranks:
        size = rng.choice([1, 2]) if len(ranks) > 1 else 1
        members, ranks = tuple(sorted(ranks[:size])), ranks[size:]
        if rng.random() < 0.85 or not (replicas or ranks):
            replicas.append(members)
    # Ids that come again: a replica that is the same in both layouts is left alone.
    return Layout(epoch=epoch, replicas=tuple(ReplicaSpec(id=ranks[0], ranks=ranks) for ranks in replicas))


class _RandomPace:
    """A `Pace`: some steps take up to 10 ms longer, and nothing else does."""

    def __init__(self, rng: random.Random, share_slow: float) -> None:
        self._rng, self._share_slow = rng, share_slow

    def step(self, *_: object) -> float:
        return self._rng.uniform(0.0, 0.01) if self._rng.random() < self._share_slow else 0.0

    def transfer(self, *_: object) -> float:
        return 0.0

    def switch(self, *_: object) -> float:
        return 0.0

    def draft(self, *_: object) -> float:
        return 0.0


class _Schedule:
    """What all ranks draw alike from the seed, and this rank's part of it."""

    def __init__(self, seed: int, oracle: Oracle, groups: GroupCache, counts: Counter[str]) -> None:
        self._seed, self._oracle, self._groups, self._counts = seed, oracle, groups, counts
        self._rank = groups.world.rank
        rng = self._rng = random.Random(f"world/{seed}")
        options, self._draw_layout = engine_options(rng), random_layout
        if rng.random() < 0.5:
            options["kv_cache_bytes"] //= 2
            self._draw_layout = wide_layout
            counts["unequal"] += not self._rank
        self._config = EngineConfig(**options)
        self._layout = self._draw_layout(rng, 0)
        self._versions = [rng.randrange(NUM_VERSIONS)]
        while rng.random() < 0.5 and len(self._versions) < 3:
            self._versions.append((self._versions[-1] + rng.randint(1, 2)) % NUM_VERSIONS)
        self._kv_store_bytes = rng.choice([2**30, 2**30, 2**18, 0])
        self._share_slow = rng.choice([0.0, 0.05, 0.2])
        self._share_acts = rng.choice([0.1, 0.3, 0.6])
        faults = {"late": rng.choice([0.0, 0.1, 0.5]), "repeated": rng.choice([0.0, 0.1, 0.3])}
        self._own = random.Random(f"world/{seed}/{self._rank}")
        self._faults = Faults(rng=self._own, **faults)
        self._engine: LocalEngine | None = None
        self._version = self._versions[0]
        self._caller: Caller | None = None

    def run(self) -> None:
        # Where `RolloutWorld` makes its ends.
        world.Client = lambda *args, **options: FaultyClient(Client(*args, **options), self._faults)  # type: ignore
        world.Server = lambda *args, **options: FaultyServer(  # type: ignore
            Server(*args, **options), self._faults, self._on_notice
        )
        policy = random_policy(self._own)
        rollout = world.RolloutWorld(
            self._groups,
            self._layout,
            engine=self._build(self._layout),
            regroup=self._regroup_engine,
            can_regroup=self._groups.joins,
            schedule_policy=policy,
            pace=_RandomPace(self._own, self._share_slow),
            make_kv_store=partial(make_kv_store, host_bytes=self._kv_store_bytes, disk_bytes=0, disk_parent=None),
        )
        self._coordinator = rollout.coordinator
        self._kv_token = getattr(rollout._kv_store, "_local", rollout._kv_store).token
        for index, version in enumerate(self._versions):
            if index and self._engine is not None:
                self._engine.load(checkpoint_tensors(self._oracle.checkpoint(version)), version)
            self._version = version
            self._roll_out(rollout, version)
        self._count_moves()
        self._counts["schedules"] += 1
        self._groups.world.barrier()
        deadline = time.monotonic() + 10.0
        if self._rank == 0:
            assert self._coordinator is not None
            self._counts["refused"] += len(self._coordinator.refused)
            self._counts["regroups"] += self._coordinator.core.layout.epoch
            count_decisions(self._coordinator.core, policy, self._counts)
            self._counts.update(self._faults.counts)
        left = self._kv_files()
        while left and time.monotonic() < deadline:  # what another host was asked to drop goes a moment later
            time.sleep(0.01)
            left = self._kv_files()
        assert not left, f"KV that nobody will read is left: {left}"
        self._groups.world.barrier()
        rollout.close()

    def _roll_out(self, rollout: world.RolloutWorld, version: int) -> None:
        states = self._oracle.states(version, self._rng, self._rng.randint(2, 30))
        if self._coordinator is None:
            rollout.roll_out(states, policy_version=version)
        else:
            caller = self._caller = Caller(self._coordinator, states, self._own, self._counts)
            environments = Environments(random.Random(f"environments/{version}"))
            out = rollout.roll_out(
                list(caller.first),
                policy_version=version,
                on_finished=caller.on_finished,
                turns=environments.turns(random_predictor(self._own)),
            )
            environments.close()
            self._counts["trajectories"] += sum(one.state.in_turns for one in out)
            self._caller = None
            self._oracle.check(version, caller.submitted, caller.aborted, out)
            assert len(caller.submitted) == len(states)
            self._counts["sequences"] += len(states)
            self._counts["phases"] += 1
            self._coordinator.core.check_integrity()
        if self._engine is not None:
            scheduler = self._engine.replica.scheduler
            assert not self._engine.replica.has_work
            assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks, "blocks are not given back"

    def _regroup_engine(self, before: Layout, after: Layout, places: Mapping[SequenceId, int]) -> LocalEngine | None:
        if not self._groups.joins(before, after):
            return self._build(after)
        ranks = next((ranks for ranks in joint_groups(before, after) if self._rank in ranks), None)
        if ranks is None:  # idle in both layouts
            return self._engine
        assert self._engine is not None
        spec = after.replica_of(self._rank)
        assert spec is not None
        joint = Joint.of(self._groups.get(ranks), ranks, before, after, max_tp_size=NUM_RANKS)
        self._engine.regroup(joint, self._groups.get(spec.ranks), places, max_kv_tokens=MAX_LEN)
        self._counts["switched"] += 1
        self._counts["kept"] += len(places)
        self._counts["kv_bytes"] += self._engine.switch.kv_bytes if self._engine.switch is not None else 0
        return self._engine

    def _build(self, layout: Layout) -> LocalEngine | None:
        self._count_moves()
        self._engine = None
        spec = layout.replica_of(self._rank)
        if spec is not None:
            model = ModelConfig.from_pretrained(self._oracle.checkpoint(0))
            self._engine = LocalEngine(
                model,
                self._config,
                spec=spec,
                max_tp_size=NUM_RANKS,
                tensor_parallel=self._groups.get(spec.ranks),
                max_model_len=model.max_position_embeddings,
                device=torch.device("cpu"),
                detokenize=None,
                max_kv_tokens=MAX_LEN,
            )
            self._engine.load(checkpoint_tensors(self._oracle.checkpoint(self._version)), self._version)
        return self._engine

    def _count_moves(self) -> None:
        if self._engine is None or self._engine.tensor_parallel.rank:
            return
        moves, scheduler = self._engine.replica.kv_moves, self._engine.replica.scheduler
        for name in ("exported", "refused", "imported", "recomputed"):
            self._counts[f"kv_{name}"] += getattr(moves, f"num_{name}")
        self._counts["preemptions"] += scheduler.num_preemptions

    def _on_notice(self, notice: Notice | None) -> None:
        """On rank 0, as each message comes: perhaps something is asked for."""
        caller = self._caller
        if caller is None or notice is None:
            return
        assert self._coordinator is not None
        self._counts["handed_over"] += num_handed_over(self._coordinator.core, notice)
        if self._own.random() > self._share_acts:
            return
        core, rng = self._coordinator.core, self._own
        if core.phase is None:
            return
        act = rng.choices(
            [
                partial(caller.move_some, [spec.id for spec in core.layout.replicas]),
                caller.submit_more,
                self._regroup,
                lambda: time.sleep(rng.uniform(0, 0.02)),
                caller.abort_one,
                core.check_integrity,
                self._lose_kv,
            ],
            weights=[6, 1, 1.5, 2, 0.3, 1, 0.5],
        )[0]
        act()

    def _kv_files(self) -> list[Path]:
        return sorted(DEV_SHM.glob(f"*{self._kv_token}*"))

    def _lose_kv(self) -> None:
        """Exported KV disappears before anybody has read it."""
        if files := self._kv_files():
            self._own.choice(files).unlink(missing_ok=True)
            self._counts["kv_files_lost"] += 1

    def _regroup(self) -> None:
        assert self._coordinator is not None
        core = self._coordinator.core
        if not core.regrouping:
            layout = self._draw_layout(self._own, core.layout.epoch + 1)
            ids, replicas = list(core._books.sequences), [spec.id for spec in layout.replicas]
            some = self._own.sample(ids, self._own.randint(0, len(ids)))
            places = {id_: self._own.choice(replicas) for id_ in some}
            with_kv = self._own.random() < 0.8
            self._coordinator.post(RequestRegroup(layout=layout, with_kv=with_kv, places=places))
