"""What divided rollout, context and grouped drafts gain (Seer, Table 6), on a trained model that ends by itself.

    python experiments/seer.py
    python experiments/seer.py --parts paced --turns 1 --figure .

Parts: `live`, on two ranks at this machine's own speed; `paced`, on eight ranks that rank 0 then starts, each of which
stands for eight GPUs of a named kind, with a token for 128. The ladder adds one after the other to groups that are
bound to replicas: chunks that go on anywhere, context-aware scheduling, and drafts from a group's other members. Each
of the other variants is compared with the ladder's best or with what it differs from in one thing. What binds sequences
to replicas runs with its best slots and its best way of preemption, and with several assignments: see
`seer_baseline.py`. Makes the models if need be. Tables go to stderr, one JSON object to stdout. docs/seer.md shows and
explains a result. A chunk has at most 64 tokens in the live part, where its end costs much of a step, and 32 in the
paced part, unless `--chunk-tokens` says otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from msgspec import Meta, convert

import engines
from engines.config import DType, ModelConfig, Preemption
from engines.constraints import Count
from engines.coordination.policies import SchedulePolicy
from engines.parallel.layout import nested_layout
from engines.sequence import Finished, SamplingParams, SequenceId
from experiments import launch
from experiments.comparison.parts import PartsConfig, run_parts
from experiments.comparison.real import RealWorld
from experiments.comparison.results import track
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import AGAIN, interleave, short
from experiments.policies import ChunkFields
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
    describe,
    draw,
)
from experiments.trained import dtype, encode, make_model, prompts
from research.seer.baselines import Divided
from research.seer.context_aware import ContextAware
from research.simulator.pace import ProfilePace, WideReplica

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

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
TASK = "qwen2-vl-72b"
"""Of the paper: the one whose GPUs and model the paced ranks stand for."""
PROFILE = "h800-72b-tp8"
Negative = Literal["independent", "chunk of mean", "kv for all"]
NEGATIVES: tuple[Negative, ...] = get_args(Negative)


@dataclass(frozen=True, kw_only=True)
class SeerConfig(PartsConfig, ChunkFields):
    """Measure rollouts in chunks that go on anywhere, the longest first."""

    models: Path = Path("runs/models")
    """Folder of the models: tiny, and the same function at several times the cost. What is missing is made."""
    temperatures: Annotated[tuple[float, ...], Meta(min_length=1, description="one or more")] | None = None
    """Of sampling; by default 1, with `--full` also 0.6."""
    full: bool = False
    """Also measure the second temperature, and all variants."""
    others: tuple[Other, ...] | None = None
    """Variants besides the ladder, each of which is measured once; by default the first six in the paced part, and with
    `--full` all in both parts."""
    negatives: tuple[Negative, ...] | None = None
    """Cases of the paced part in which context should not help: lengths that are independent within groups, chunks as
    long as the mean length, and KV for all sequences at once. By default none, with `--full` all."""
    processes: Count | None = None
    """Simulations at a time while the paced part's baselines are tuned; by default one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chunks(BLOCK_SIZE, seed=self.seed).check(block_size=BLOCK_SIZE, max_tokens=CAP)
        for temperature in self.temperatures or ():
            SamplingParams(temperature=temperature)  # raises ValueError


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


def main() -> dict[str, Any] | None:
    return run_parts("seer", SeerConfig, live=live, paced=paced_part)


def live(config: SeerConfig, world: TorchGroup) -> dict[str, Any]:
    setting = Setting(
        name="live",
        widen=8,
        dtype=dtype(),
        groups=max(2, 24 // config.shrink),
        group_size=8,
        num_kv_tokens=1280,
        chunk_tokens=64,
        preemption="auto",
        others=OTHERS if config.full else (),
    )
    found = {"live": {"tier": "live", **measure(config, setting, world)}}
    if world.rank == 0:
        found["fleet"] = {"tier": "paced", **lose_a_replica(config)}
    world.barrier()
    return found


def stand_in(scale: float) -> WideReplica:
    """Eight GPUs, with a token for 128."""
    return WideReplica(ProfilePace.of(PROFILE, scale=scale, token_scale=128), 8)


def lose_a_replica(config: SeerConfig) -> dict[str, Any]:
    """Four replicas without a torchrun world, one of which is killed once a quarter of the sequences has ended."""
    model = make_model(config.models)
    params = SamplingParams(max_tokens=CAP, n=8)
    work = Workload(prompts=encode(model, prompts(max(2, 16 // config.shrink))), params=params)
    options: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MOST_SEQUENCES,
        "max_model_len": MAX_LEN,
        "dtype": "float64",
    }
    num_bytes = 1600 * ModelConfig.from_pretrained(model).kv_bytes_per_token(8)

    def roll_out(is_killed: bool) -> tuple[float, list[Any], int]:
        ended: list[Finished] = []

        def hear(finished: Finished) -> None:
            ended.append(finished)
            if is_killed and len(ended) == len(states) // 4:
                os.kill(fleet.launcher.pids()[min(fleet.coordinator.standing_by)], signal.SIGKILL)

        from engines.fleet.fleet import Fleet

        with Fleet(
            model,
            num_replicas=4,
            schedule_policy=ContextAware(config.chunks(PACED_CHUNK, seed=config.seed)),
            pace=stand_in(config.scale),
            kv_cache_bytes=num_bytes,
            **options,
        ) as fleet:
            fleet.wait_for_replicas(4)
            states = work.states()
            start = time.monotonic()
            fleet.roll_out(states, on_finished=hear)
            seconds = time.monotonic() - start
            tokens = sorted((one.state.sequence_id, one.completion.token_ids) for one in ended)
            return seconds, tokens, len(fleet.coordinator.lost)

    (whole, tokens, _), (later, others, num_lost) = roll_out(is_killed=False), roll_out(is_killed=True)
    return {
        "tokens_equal": tokens == others,
        "not_exercised": [] if num_lost else ["no replica was lost"],
        "seconds": [whole, later],
        "later": short(later / whole - 1),
    }


def paced_part(config: SeerConfig, world: TorchGroup) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    wide = stand_in(PACED_SCALE * config.scale)
    setting = Setting(
        name="paced",
        widen=1,
        dtype="float64",
        groups=max(2, 48 // config.shrink),
        group_size=16,
        num_kv_tokens=1600,
        chunk_tokens=PACED_CHUNK,
        preemption="recompute",
        others=OTHERS if config.full else OTHERS[:6],
        pace=wide,
        facts={"profile": PROFILE, "scale": wide.pace.scale, "token_scale": wide.pace.token_scale},
    )
    return {"paced": {"tier": "paced", **measure(config, setting, world)}}


PACED_SCALE = 4.0
"""Seconds here per second of the profile with which 8 processes on 2 cores can follow: with half of it they are late
with 13 to 21 % of the steps."""


def measure(config: SeerConfig, setting: Setting, world: TorchGroup) -> dict[str, Any]:
    """Returns, for the first temperature and under `T=...` for the others, what `describe` does."""
    model = Path(launch.on_rank_0(world, lambda: str(make_model(config.models, setting.widen))))
    asked = encode(model, prompts(setting.groups))
    groups = engines.GroupCache(world, [nested_layout(range(world.size), 1)])
    bench, found = setting.bench(model, groups), dict[str, Any]()
    usual: tuple[Workload, dict[SequenceId, int]] | None = None
    for temperature in config.temperatures or ((1.0, 0.6) if config.full else (1.0,)):
        start = time.monotonic()
        params = SamplingParams(max_tokens=CAP, n=setting.group_size, temperature=temperature)
        work, name = Workload(prompts=asked, params=params), f"{setting.name}, T={temperature:g}"
        done = roll_out(config, setting, bench, work)
        usual = usual or (work, done.lengths)
        if world.rank == 0:
            one = setting.facts | describe(name, done, task=TASK if setting.pace is not None else None)
            one["seconds"] = round(time.monotonic() - start, 1)
            found |= {f"T={temperature:g}": one} if found else one
            if config.figure is not None:
                draw(config.figure / f"seer_{setting.name}_{temperature:g}.png", done.runs, setting.name)
            if config.wandb != "off":
                track(f"seer-{setting.name}-T={temperature:g}", done.runs)
    if setting.pace is not None and usual is not None:
        for case in (NEGATIVES if config.full else ()) if config.negatives is None else config.negatives:
            done = roll_out(*negative(case, config, setting, bench, *usual))
            if world.rank == 0:
                found.setdefault("negatives", {})[case] = setting.facts | describe(case, done)
    groups.close()
    return found


def negative(
    case: Negative,
    config: SeerConfig,
    setting: Setting,
    bench: RealWorld,
    workload: Workload,
    lengths: dict[SequenceId, int],
) -> tuple[SeerConfig, Setting, RealWorld, Workload]:
    """Returns the arguments of `roll_out` for a case in which context should not help; `lengths`: the model's own."""
    config = replace(config, turns=1, others=("static by sequence",))
    if case == "independent":
        mixed = random.Random(config.seed).sample([*lengths.values()], len(lengths))
        params = replace(workload.params, ignore_eos=True)
        workload = replace(workload, params=params, lengths=dict(zip(lengths, mixed, strict=True)))
    elif case == "chunk of mean":
        longest = statistics.fmean(lengths.values()) / (1 - config.spread / 2)
        config = replace(config, chunk_tokens=min(CAP, max(BLOCK_SIZE, round(longest))))
    else:
        num_groups = -(-len(workload.prompts) // bench.groups.world.size)
        setting = replace(setting, num_kv_tokens=num_groups * setting.group_size * MAX_LEN)
    return config, setting, bench, workload


if __name__ == "__main__":
    launch.run(main)
