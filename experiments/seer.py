"""What divided rollout, context and grouped drafts gain (Seer, Table 6), on a trained model that ends by itself.

    torchrun --standalone --nproc-per-node 2 experiments/seer.py
    python experiments/seer.py --parts paced --turns 1 --figure .

Parts: `live`, on two ranks at this machine's own speed; `paced`, on eight ranks that rank 0 then starts, each of which
stands for eight GPUs of a named kind, with a token for 128. The ladder adds one after the other to groups that are
bound to replicas: chunks that go on anywhere, context-aware scheduling, and drafts from a group's other members. Each
of the other variants is compared with the ladder's best or with what it differs from in one thing. Makes the models if
need be. A table goes to stderr, one JSON object to stdout. docs/seer.md shows and explains a result.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import torch
from msgspec import Meta

from engines import SamplingParams
from engines.config import DType, EngineConfig, ModelConfig
from engines.constraints import Count, Fraction, WholeNumber
from engines.coordination.policies import OnDemand, SchedulePolicy, Static
from engines.fleet.fleet import Fleet
from engines.parallel.groups import GroupCache
from engines.parallel.layout import nested_layout
from engines.rollout.pace import Pace
from engines.rollout.telemetry import busy_share
from engines.sequence import Finished, SequenceId
from experiments import drafting, launch, paced
from experiments.bench import harness
from experiments.paced import Bench, PacedConfig, Rollout, Variant, Workload
from research.seer.baselines import Divided, GroupStatic
from research.seer.context_aware import ContextAware, ContextOptions
from research.simulator.cluster import Cluster, ClusterConfig
from research.simulator.latency import profile
from research.simulator.pace import ProfilePace, WideReplica

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

CAP, BLOCK_SIZE, MOST_SEQUENCES = 320, 16, 128
MAX_LEN = CAP + 64
PACED_CHUNK = 32
STATIC, DIVIDED, CONTEXT, SPECULATION = LADDER = ("group static", "divided", "context", "speculation")
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
Negative = Literal["independent", "chunk of mean", "kv for all"]
NEGATIVES: tuple[Negative, ...] = get_args(Negative)
BOUND, ORACLE = OTHERS[:2], OTHERS[2]
"""Harder baselines, which bind single sequences; and the true lengths."""
DRAFTS = {"drafter": "grouped_suffix", "max_draft_tokens": 16}


@dataclass(frozen=True, kw_only=True)
class SeerConfig(PacedConfig):
    """Measure rollouts in chunks that go on anywhere, the longest first."""

    models: Path = Path("runs/models")
    """Folder of the models: tiny, and the same function at several times the cost. What is missing is made."""
    temperatures: Annotated[tuple[float, ...], Meta(min_length=1, description="one or more")] | None = None
    """Of sampling; by default 1, with `--full` also 0.6."""
    full: bool = False
    """Also measure the second temperature, and all variants."""
    others: tuple[Other, ...] | None = None
    """Variants besides the ladder, each of which is measured once; by default the first four in the paced part, and
    with `--full` all in both parts."""
    negatives: tuple[Negative, ...] | None = None
    """Cases of the paced part in which context should not help: lengths that are independent within groups, chunks as
    long as the mean length, and KV for all sequences at once. By default none, with `--full` all."""
    chunk_tokens: Count | None = None
    """Most tokens that a sequence generates before it comes back; by default 64 in the live part, where a chunk's end
    costs much of a step, and 32 in the paced part."""
    follow_ups: WholeNumber = 4
    """Sequences that a replica may hold behind those for which it has room; see `ChunkOptions`."""
    spread: Fraction = 0.5
    """Share by which the shortest chunk is shorter than the longest; see `ChunkOptions`."""
    figure: Path | None = None
    """Draw KV use, running sequences and preemptions of the ladder into this folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chunks(BLOCK_SIZE).check(block_size=BLOCK_SIZE, max_tokens=CAP)
        for temperature in self.temperatures or ():
            SamplingParams(temperature=temperature)  # raises ValueError
        if self.figure is not None and not self.figure.is_dir():
            raise ValueError(f"figure={str(self.figure)!r}: there is no such folder; make it")

    def chunks(self, usual: int) -> ContextOptions:
        return ContextOptions(
            chunk_tokens=self.chunk_tokens or usual, follow_ups=self.follow_ups, spread=self.spread, seed=self.seed
        )


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
    preemption: str
    others: tuple[Other, ...]
    """Variants besides the ladder, where the options name none."""
    pace: Pace | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def bench(self, model: Path, groups: GroupCache) -> Bench:
        return Bench(
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

    def variants(
        self, config: SeerConfig, num_ranks: int, lengths: Callable[[], dict[SequenceId, int]]
    ) -> dict[str, Variant]:
        """The ladder, and the others. `lengths` are the true ones, for the oracle."""
        options = config.chunks(self.chunk_tokens)
        seeds = itertools.count(config.seed)  # the baseline's luck is not that of one seed
        plain = Variant(layout=nested_layout(range(num_ranks), 1), num_kv_tokens=self.num_kv_tokens)

        def by(schedule: Callable[[], SchedulePolicy], **drafts: Any) -> Variant:
            return replace(plain, schedule=schedule, options=drafts)

        context = partial(ContextAware, options)
        return {
            STATIC: by(lambda: GroupStatic(next(seeds))),
            DIVIDED: by(partial(Divided, options)),
            "divided, in turns": by(partial(Divided, options, takes_turns=True)),
            CONTEXT: by(context),
            SPECULATION: by(context, **DRAFTS),
            "static by sequence": by(Static),
            "on demand": by(OnDemand),
            "oracle": by(lambda: ContextAware(options, lengths=lengths())),
            "context, as printed": by(partial(ContextAware, replace(options, order="length"))),
            "speculation, no adaptation": by(
                context, drafter="grouped_suffix", max_draft_tokens=8, draft_lengths="fixed"
            ),
            "speculation, ungrouped": by(context, **DRAFTS | {"drafter": "suffix"}),
            "group static, speculation": by(lambda: GroupStatic(next(seeds)), **DRAFTS),
        }


def main() -> dict[str, Any] | None:
    return paced.run("seer", SeerConfig, live=live, paced=paced_part)


def live(config: SeerConfig, world: TorchGroup) -> dict[str, Any]:
    setting = Setting(
        name="live",
        widen=8,
        dtype=drafting.dtype(),
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
    one = profile("h800-72b-tp8")
    return WideReplica(ProfilePace(device=one.device, shape=one.shape, scale=scale, token_scale=128), one.tp_size)


def lose_a_replica(config: SeerConfig) -> dict[str, Any]:
    """Four replicas without a torchrun world, one of which is killed once a quarter of the sequences has ended."""
    model = drafting.make_model(config.models)
    params = SamplingParams(max_tokens=CAP, n=8)
    work = Workload(prompts=drafting.encode(model, drafting.prompts(max(2, 16 // config.shrink))), params=params)
    options: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MOST_SEQUENCES,
        "max_model_len": MAX_LEN,
        "dtype": "float64",
    }
    num_bytes = 1600 * ModelConfig.from_pretrained(model).kv_bytes_per_token(8)

    def roll_out(is_killed: bool) -> tuple[float, list[Any]]:
        ended: list[Finished] = []

        def hear(finished: Finished) -> None:
            ended.append(finished)
            if is_killed and len(ended) == len(states) // 4:
                os.kill(fleet.launcher.pids()[min(fleet.coordinator.standing_by)], signal.SIGKILL)

        with Fleet(
            model,
            num_replicas=4,
            schedule_policy=ContextAware(config.chunks(PACED_CHUNK)),
            pace=stand_in(config.scale),
            kv_cache_bytes=num_bytes,
            **options,
        ) as fleet:
            fleet.wait_for_replicas(4)
            states = work.states()
            start = time.monotonic()
            fleet.roll_out(states, on_finished=hear)
            return time.monotonic() - start, sorted((one.state.sequence_id, one.completion.token_ids) for one in ended)

    (whole, tokens), (lost, others) = roll_out(is_killed=False), roll_out(is_killed=True)
    return {"tokens_equal": tokens == others, "seconds": [whole, lost], "later": harness.short(lost / whole - 1)}


def paced_part(config: SeerConfig, world: TorchGroup) -> dict[str, Any]:
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
        others=OTHERS if config.full else OTHERS[:4],
        pace=wide,
        facts={"profile": "h800-72b-tp8", "scale": wide.pace.scale, "token_scale": wide.pace.token_scale},
    )
    return {"paced": {"tier": "paced", **measure(config, setting, world)}}


PACED_SCALE = 2.0
"""Seconds here per second of the profile with which 8 processes on 2 cores can follow."""


def measure(config: SeerConfig, setting: Setting, world: TorchGroup) -> dict[str, Any]:
    """Returns, for the first temperature and under `T=...` for the others, what `describe` does."""
    model = Path(launch.on_rank_0(world, lambda: str(drafting.make_model(config.models, setting.widen))))
    prompts = drafting.encode(model, drafting.prompts(setting.groups))
    groups = GroupCache(world, [nested_layout(range(world.size), 1)])
    bench, found = setting.bench(model, groups), dict[str, Any]()
    usual: tuple[Workload, dict[SequenceId, int]] | None = None
    for temperature in config.temperatures or ((1.0, 0.6) if config.full else (1.0,)):
        start = time.monotonic()
        params = SamplingParams(max_tokens=CAP, n=setting.group_size, temperature=temperature)
        work = Workload(prompts=prompts, params=params)
        runs, variants = roll_out(config, setting, bench, work)
        usual = usual or (work, runs[STATIC][0].lengths)
        if world.rank == 0:
            one = describe(f"{setting.name}, T={temperature:g}", runs, setting)
            if setting.pace is not None:
                one["sim_over_paced"] = simulated(setting, work, runs, variants)
            one["seconds"] = round(time.monotonic() - start, 1)
            found |= {f"T={temperature:g}": one} if found else one
            if config.figure is not None:
                draw(config.figure / f"seer_{setting.name}_{temperature:g}.png", runs, setting.name)
            if config.wandb != "off":
                paced.track(f"seer-{setting.name}-T={temperature:g}", runs)
    if setting.pace is not None and usual is not None:
        for case in (NEGATIVES if config.full else ()) if config.negatives is None else config.negatives:
            some = roll_out(*negative(case, config, setting, bench, *usual))[0]
            if world.rank == 0:
                found.setdefault("negatives", {})[case] = describe(case, some, setting)
    groups.close()
    return found


def negative(
    case: Negative,
    config: SeerConfig,
    setting: Setting,
    bench: Bench,
    workload: Workload,
    lengths: dict[SequenceId, int],
) -> tuple[SeerConfig, Setting, Bench, Workload]:
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


def roll_out(
    config: SeerConfig, setting: Setting, bench: Bench, workload: Workload
) -> tuple[dict[str, list[Rollout]], dict[str, Variant]]:
    """Returns the rollouts of each variant, and these: the ladder's take turns, the others come once."""

    lengths: dict[SequenceId, int] = {}  # known to the oracle once the baseline has run

    def call(variant: Variant) -> Rollout:
        rollout = bench.roll_out(workload, variant)
        lengths.update(rollout.lengths)
        return rollout

    known = setting.variants(config, bench.groups.world.size, lambda: lengths)
    variants = {one: known[one] for one in (*LADDER, *(setting.others if config.others is None else config.others))}
    if setting.pace is None:
        call(variants[STATIC])  # warms up
    calls = {one: partial(call, variant) for one, variant in variants.items()}
    once = dict.fromkeys((one for one in variants if one not in LADDER), 1)
    return harness.interleave(calls, config.turns, name=setting.name, warm_up=False, most_turns=once), variants


def simulated(
    setting: Setting, workload: Workload, runs: dict[str, list[Rollout]], variants: dict[str, Variant]
) -> dict[str, float]:
    """Returns, for each variant without drafts, the seconds of a simulated rollout of the same lengths over the
    measured ones; of the baseline, the median over as many groupings."""
    assert setting.pace is not None
    lengths, found = runs[STATIC][0].lengths, {}
    for name, variant in variants.items():
        if variant.options:
            continue
        cluster = ClusterConfig(
            layout=variant.layout,
            engine=EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=MOST_SEQUENCES, preemption="recompute"),
            pace=setting.pace,
            num_kv_tokens={1: variant.num_kv_tokens},
            max_model_len=MAX_LEN,
            records_steps=False,
        )
        seconds = [
            Cluster(cluster, schedule_policy=variant.schedule(), lengths=lengths).roll_out(workload.states()).makespan
            for _ in range(3 if name == STATIC else 1)
        ]
        measured = statistics.median(run.seconds for run in runs[name])
        found[name] = harness.short(statistics.median(seconds) / measured)
    return found


def describe(name: str, runs: dict[str, list[Rollout]], setting: Setting) -> dict[str, Any]:
    """Returns the results of one temperature. `throughput` and `variants` are ratios to the ladder's first, of all
    whose groupings the median counts; `tail` is the time of the last tenth as a share of the first's."""
    row = harness.compare(name, {one: [run.seconds for run in some] for one, some in runs.items()})
    print(harness.table([row]), file=sys.stderr, flush=True)
    runs = {**runs, STATIC: runs[STATIC] + runs[STATIC + harness.AGAIN]}
    seconds = {one: statistics.median(run.seconds for run in some) for one, some in runs.items()}
    tails = {one: statistics.median(run.tail_seconds for run in some) for one, some in runs.items()}
    faster = {one: harness.short(seconds[STATIC] / took) for one, took in seconds.items()}
    context_over = {one: harness.short(took / seconds[CONTEXT]) for one, took in seconds.items()}
    lengths = [*runs[STATIC][0].lengths.values()]
    slow = {"steps_longer_than_paced": paced.longer_than_paced(run for some in runs.values() for run in some)}
    return {
        **setting.facts,
        "tokens_equal": len({run.digest for some in runs.values() for run in some}) == 1,
        "throughput": {one: faster[one] for one in LADDER[1:]},
        "tail": {one: harness.short(tails[one] / tails[STATIC]) for one in LADDER[1:]},
        "tail_share": {one: harness.short(tails[one] / seconds[one]) for one in LADDER},
        "variants": {one: faster[one] for one in runs if one not in LADDER and not one.endswith(harness.AGAIN)},
        "of_oracle": context_over.get(ORACLE),
        "over_bound": {one: context_over[one] for one in BOUND if one in context_over},
        "preemptions": {one: statistics.median(run.num_preempted for run in some) for one, some in runs.items()},
        "kv": {one: kv_moved(some[0]) for one, some in runs.items() if not one.endswith(harness.AGAIN)},
        "tokens_per_step": {one: harness.short(some[0].tokens_per_step) for one, some in runs.items()},
        "num_steps": {one: statistics.median(len(run.steps) for run in some) for one, some in runs.items()},
        "busy_share": {one: harness.short(statistics.median(map(busy, some))) for one, some in runs.items()},
        "num_sequences": len(lengths),
        "mean_length": harness.short(statistics.fmean(lengths)),
        "a_a": row["a_a"],
        **(slow if setting.pace is not None else {}),
        "row": row,
    }


def busy(run: Rollout) -> float:
    """Returns the share of the rollout that a replica spends in steps, on average over the replicas."""
    return statistics.fmean(busy_share(run.steps, {step.replica_id for step in run.steps}).values())


def kv_moved(run: Rollout) -> dict[str, float]:
    """Returns how many tokens' KV was stored for each token generated, how many sequences brought their KV along and
    how many had lost it, and the share of what was loaded that was read while others stepped."""
    stored, loaded, fetched, imported, recomputed = (
        sum(getattr(moves, name) for moves in run.kv_moves)
        for name in ("stored_tokens", "loaded_tokens", "fetched_tokens", "num_imported", "num_recomputed")
    )
    return {
        "stored_per_token": harness.short(stored / sum(run.lengths.values())),
        "imported": imported,
        "recomputed": recomputed,
        "hidden": harness.short(fetched / loaded) if loaded else 0.0,
    }


def draw(path: Path, runs: dict[str, list[Rollout]], tier: str) -> None:
    from experiments.figures import draw_instances

    tails = {one: runs[one][0].ends[-1] - runs[one][0].tail_seconds for one in LADDER}
    draw_instances(path, {one: runs[one][0].steps for one in LADDER}, tails, tier)


if __name__ == "__main__":
    launch.run(main)
