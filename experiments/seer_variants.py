"""Seer's variants, live and paced: what each of them is, how baselines are tuned, and who runs when."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import convert

import engines
from engines.config import DType, Preemption
from engines.coordination.policies import SchedulePolicy
from engines.parallel.layout import nested_layout
from engines.sequence import SequenceId
from experiments import launch
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import AGAIN, interleave
from experiments.seer_baseline import (
    WAYS,
    BoundName,
    Simulation,
    Trial,
    Tuned,
    Tuning,
    assignments,
    best,
    bound,
    evenly,
    report,
)
from experiments.seer_report import (
    BOUND,
    BOUND_DRAFTS,
    CONTEXT,
    DIVIDED,
    FIXED,
    LADDER,
    ORACLE,
    SPECULATION,
    STATIC,
    UNGROUPED,
    UNTUNED,
    Done,
)
from research.seer.baselines import Divided
from research.seer.context_aware import ContextAware
from research.simulator.pace import WideReplica

if TYPE_CHECKING:
    from experiments.seer import SeerConfig

CAP, BLOCK_SIZE, MOST_SEQUENCES = 320, 16, 128
MAX_LEN = CAP + 64
PACED_CHUNK = 32
SLOTS = (8, 12, 16, 24, MOST_SEQUENCES)
"""Of a replica: what a baseline is tuned with."""
Other = Literal[
    "static by sequence",
    "on demand",
    "oracle",
    "divided, in turns",
    "speculation, no adaptation",
    "speculation, ungrouped",
    "context, as printed",
    "group static, speculation",
]
OTHERS: tuple[Other, ...] = get_args(Other)
DRAFTS = {"drafter": "grouped_suffix", "draft_server": True, "max_draft_tokens": 8}
UNGROUPED_DRAFTS = DRAFTS | {"drafter": "suffix", "draft_server": False}
FIXED_DRAFTS = DRAFTS | {"draft_lengths": "fixed"}
"""Fig. 11: drafts from the sequence's own tokens, and drafts that are always as long as they may be."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Groups of samples, and the replicas that generate them."""

    name: str
    widen: int
    dtype: DType
    groups: int
    group_size: int
    num_kv_tokens: int
    """Of a replica."""
    chunk_tokens: int
    """Unless the options name another."""
    preemption: Preemption
    """Where nothing is tuned."""
    others: tuple[Other, ...]
    """Variants besides the ladder, where the options name none."""
    pace: WideReplica | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def bench(self, model: Path, groups: engines.GroupCache) -> RealWorld:
        return RealWorld(
            model=str(model),
            groups=groups,
            pace=self.pace,
            options={
                "dtype": self.dtype,
                "block_size": BLOCK_SIZE,
                "max_num_seqs": MOST_SEQUENCES,
                "max_model_len": MAX_LEN,
                "preemption": self.preemption,
                "batch_invariant": self.dtype != "float64",
            },
        )

    def plain(self, num_ranks: int) -> Variant:
        return Variant(layout=nested_layout(range(num_ranks), 1), num_kv_tokens=self.num_kv_tokens)

    def variants(self, config: SeerConfig, num_ranks: int, lengths: dict[SequenceId, int]) -> dict[str, Variant]:
        """All that divide rollouts. `lengths` are the true ones, for the oracle."""
        options = config.chunks(self.chunk_tokens, seed=config.seed)

        def by(schedule: Callable[[], SchedulePolicy], **drafts: Any) -> Variant:
            return replace(self.plain(num_ranks), schedule=schedule, options=drafts)

        context = partial(ContextAware, options)
        return {
            DIVIDED: by(partial(Divided, options)),
            "divided, in turns": by(partial(Divided, options, takes_turns=True)),
            CONTEXT: by(context),
            "context, as printed": by(partial(ContextAware, replace(options, order="length"))),
            ORACLE: by(partial(ContextAware, options, lengths=lengths)),
            SPECULATION: by(context, **DRAFTS),
            UNGROUPED: by(context, **UNGROUPED_DRAFTS),
            FIXED: by(context, **FIXED_DRAFTS),
        }

    def simulation(self, workload: Workload, bench: RealWorld) -> Simulation:
        """`workload` has its lengths."""
        assert self.pace is not None
        names = ("block_size", "max_num_seqs", "preemption", "max_model_len")
        options = {name: bench.options[name] for name in names}
        world = SimulatedWorld(pace=self.pace, options=options, cluster={"records_steps": False})
        return Simulation(world=world, workload=workload, plain=self.plain(bench.groups.world.size))


def roll_out(config: SeerConfig, setting: Setting, bench: RealWorld, workload: Workload) -> Done:
    """Tunes the baselines and rolls out all variants: the ladder's take turns, the others come once."""
    world = bench.groups.world
    num_ranks = world.size
    plain = setting.plain(num_ranks)

    def call(variant: Variant) -> Rollout:
        return bench.roll_out(workload, variant)

    untuned = bound(plain, Trial(STATIC, Tuning(MOST_SEQUENCES, setting.preemption), config.seed))
    first = call(untuned)  # warms up, and shows the lengths
    names = [*LADDER, *(setting.others if config.others is None else config.others)]
    baselines = [name for name in BOUND if name in names]
    once = dict.fromkeys((name for name in names if name not in LADDER), 1)
    simulation: Simulation | None = None
    if setting.pace is None:
        tuned = {name: tune_live(lambda trial: call(bound(plain, trial)).seconds, name, config) for name in baselines}
    else:
        simulation = setting.simulation(replace(workload, lengths=first.lengths), bench)
        simulation = replace(simulation, processes=config.processes)
        tuned = convert(
            launch.on_rank_0(world, partial(simulation.tune, baselines, SLOTS, config.seed)), dict[BoundName, Tuned]
        )
    divided = setting.variants(config, num_ranks, first.lengths)
    variants = {name: [one] * config.turns for name, one in divided.items()}
    for name, one in tuned.items():
        picked = evenly(one.assignments, once.get(name, config.turns))
        variants[name] = [bound(plain, Trial(name, one.tuning, number)) for number in picked]
    trial = Trial(STATIC, tuned[STATIC].tuning, *evenly(tuned[STATIC].assignments, 1))
    variants[BOUND_DRAFTS] = [bound(plain, trial, **DRAFTS)]
    calls = {name: [partial(call, one) for one in variants[name][: once.get(name, config.turns)]] for name in names}
    if simulation is not None:
        calls[STATIC + AGAIN] = calls[STATIC][:1]  # a pace leaves little noise
    runs = interleave(calls, config.turns, name=setting.name, warm_up=False)
    done = Done(runs=runs, tuned=tuned, lengths=first.lengths)
    if simulation is None or world.rank:
        return done
    runs[UNTUNED], variants[UNTUNED] = [first], [untuned]
    return replace(done, sim_over_paced=simulation.over_paced(runs, variants))


def tune_live(seconds: Callable[[Trial], float], name: BoundName, config: SeerConfig) -> Tuned:
    """Returns a baseline with the best slots, and then the best way of preemption; each setting is tried once. In each
    turn another assignment counts."""

    def tried(settings: Iterable[Tuning]) -> dict[Tuning, list[float]]:
        return {one: [seconds(Trial(name, one, config.seed))] for one in settings}

    sweep = tried(Tuning(slots, "auto") for slots in SLOTS)
    sweep |= tried(Tuning(best(sweep).max_num_seqs, way) for way in WAYS)
    assigned = [*assignments(name, config.turns, config.seed)]
    return Tuned(tuning=best(sweep), assignments=assigned, seconds=[], report=report(sweep))
