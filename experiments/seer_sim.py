"""Seer's scheduling (Tables 5 and 6, Figs. 8 and 10) on simulated GPUs. Tier: sim.

    python experiments/seer_sim.py --output seer_sim.json

The tasks of Table 5 with all their GPUs and sequences: groups bound to instances (the baseline), divided rollout, with
context-aware scheduling, with drafts, and with an oracle of the lengths; and harder baselines that bind single
sequences. What binds sequences runs with its best slots and way of preemption, which a coarser simulation finds, and
with several assignments. `--chunk-tokens` counts tokens of the paper. The paper does not print the distribution of the
lengths, and its models are no dense decoders: docs/seer.md has what is assumed. A sequence has a sixteenth of its
tokens, each of which is priced as sixteen. In the other cases context should not help. Prints tables, and one JSON
object, in which `paper` has the paper's figures beside ours. A rollout that is simulated again is the same, so A/A is
1.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from msgspec import Meta

from engines.constraints import Count, Positive
from engines.coordination.policies import SchedulePolicy
from engines.parallel.layout import ReplicaSpec, contiguous_layout
from engines.rollout.pace import Path as KVPath
from engines.sequence import SequenceId
from experiments import launch, seer_baseline, seer_paper
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.rollouts import Variant, Workload, hidden_lengths
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import in_columns, median_and_range
from experiments.policies import ChunkFields, schedule_policy
from experiments.processes import call_each
from experiments.seer_baseline import WAYS, BoundName, Tuning
from research.seer.baselines import Divided
from research.seer.context_aware import ContextAware, ContextOptions
from research.simulator.cluster import Overheads
from research.simulator.datasheets import H800, QWEN_72B, Device, ModelShape
from research.simulator.drafts import SEER_TABLE_2, DraftAcceptance
from research.simulator.latency import LatencyProfile
from research.simulator.links import HostLinks
from research.simulator.pace import ProfilePace
from research.workloads.lengths import GroupedLengths, LogNormalLengths

BLOCK_SIZE, SLOTS, PROMPT = 256, 1024, 1024
RESERVE = 0.35
"""Share of a GPU's memory that weights and KV may not use: training, which has the same GPUs, keeps some. Assumed."""
BOUND: tuple[BoundName, ...] = get_args(BoundName)
BASE, CONTEXT, ORACLE = BOUND[0], "context", "oracle"
DRAFTING, UNGROUPED, FIXED = DRAFTED = ("drafts", "drafts, ungrouped", "drafts, no adaptation")
ASSIGNMENTS = 3
"""Of the sequences to instances, with each draw of the lengths."""
SHARES = (1, 1.5, 2, 3, 4)
"""A baseline is tuned with as many slots as an instance has sequences, divided by one of these."""
COARSER, TRIALS = 4, 2
"""The tuning simulates a part of the instances, with coarser tokens, and this many draws."""
CaseName = Literal["moonlight", "qwen2-vl-72b", "kimi-k2", "independent", "chunk of mean", "kv for all"]


def _sparse(device: Device, *, active: float, gpus: int = 1) -> Device:
    """`gpus` of them as one, on which the products of a mixture of experts take what its active share takes. A batch
    uses all experts, so that all weights are read."""
    return replace(
        device,
        name=f"{gpus} x {device.name}",
        peak_flops=gpus * device.peak_flops / active,
        memory_bandwidth=gpus * device.memory_bandwidth,
        memory_bytes=gpus * device.memory_bytes,
    )


# Dense stand-ins with the bytes of the weights (Table 5) and of a token's KV (576 elements a layer, as MLA keeps them).
MOONLIGHT = ModelShape(
    name="Moonlight", num_layers=27, hidden=2048, intermediate=90_670, num_heads=16, num_kv_heads=2, head_dim=144,
    vocab=163_840, qkv_bias=False, source="moonshotai/Moonlight-16B-A3B: layers, hidden, vocab"
)  # fmt: skip
KIMI_K2 = ModelShape(
    name="Kimi-K2", num_layers=61, hidden=7168, intermediate=377_600, num_heads=64, num_kv_heads=8, head_dim=36,
    vocab=163_840, qkv_bias=False, source="moonshotai/Kimi-K2-Base: layers, hidden, vocab; 1 TB as bf16"
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task of Table 5, in tokens of the paper."""

    name: CaseName
    device: Device
    shape: ModelShape
    tp_size: int
    instances: int
    groups: int
    group_size: int
    cap: int
    correlation: float = 0.9
    """Of the logarithms of the lengths of two members of a group: assumed to be high (Fig. 4). Assumed, too, are the
    lengths' median, a quarter of the cap, and sigma, 0.8: tens of thousands of tokens on average (§2.2)."""
    chunk: int = 8192
    kv_for_all: bool = False
    """Whether all sequences fit at once."""

    def slots(self) -> list[int]:
        """Of an instance: what a baseline is tuned with."""
        most = -(-self.groups // self.instances) * self.group_size
        return [round(most / share) for share in SHARES]


TASKS = (
    Case(
        name="moonlight", device=_sparse(H800, active=3 / 16), shape=MOONLIGHT, tp_size=1,
        instances=32, groups=400, group_size=8, cap=65_536,
    ),
    Case(
        name="qwen2-vl-72b", device=H800, shape=QWEN_72B, tp_size=8,
        instances=16, groups=600, group_size=16, cap=40_960,
    ),
    Case(
        name="kimi-k2", device=_sparse(H800, active=32 / 500, gpus=4), shape=KIMI_K2, tp_size=8,
        instances=8, groups=800, group_size=8, cap=98_304,
    ),
)  # fmt: skip
CASES = {
    case.name: case
    for case in (
        *TASKS,
        replace(TASKS[0], name="independent", correlation=0.0),
        replace(TASKS[0], name="chunk of mean", chunk=21_845),
        replace(TASKS[0], name="kv for all", kv_for_all=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class SeerSimConfig(ResultOptions, ChunkFields):
    """Simulate Seer's scheduling."""

    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(CASES)
    """Tasks, and cases in which context should not help."""
    seeds: Count = 5
    """Draws of the lengths, and of what is random in policies; medians are reported, with the range."""
    token_scale: Count = 16
    """Tokens of the paper that a token stands for, and takes the time of; 1 simulates whole lengths."""
    shrink: Count = 1
    """Simulate one in this many instances, with their part of the groups; of few instances, a result says little."""
    kv_bandwidth: Positive = 50.0
    """GB/s at which a GPU stores and loads KV, and as many between hosts."""
    also: tuple[str, ...] = ()
    """Other policies to simulate, each without tuning: divided, seer, ..., or a class of your own as FILE.py:Class."""
    drafts: bool = False
    """Also simulate drafts, as in Fig. 11, which takes a few times as long."""
    processes: Count | None = None
    """Rollouts that are simulated at the same time; by default one per core."""
    figure: Path | None = None
    """Draw the paper's Figs. 7, 8 and 10, and with `--drafts` 11, to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest = min(CASES[name].instances for name in self.cases)
        if self.shrink > fewest:
            raise ValueError(f"shrink={self.shrink}: the smallest case has {fewest} instances; give at most as many")
        if self.token_scale > PROMPT:
            raise ValueError(
                f"token_scale={self.token_scale}: a prompt has {PROMPT} tokens, and needs one; give at most {PROMPT}"
            )
        for name in self.also:
            schedule_policy("also", name, ContextOptions(), {})
        block = self.block_size * self.token_scale
        for case in map(CASES.__getitem__, self.cases):
            if not block <= (self.chunk_tokens or case.chunk) <= case.cap:
                raise ValueError(
                    f"chunk_tokens={self.chunk_tokens or case.chunk}: must be from {block}, a block of KV at "
                    f"token_scale={self.token_scale}, to {case.cap}, what a sequence of {case.name!r} may generate"
                )

    @property
    def block_size(self) -> int:
        return max(1, BLOCK_SIZE // self.token_scale)

    def context(self, case: Case, seed: int) -> ContextOptions:
        """In tokens of the simulation."""
        options = self.chunks(case.chunk, seed=seed)
        return replace(options, chunk_tokens=options.chunk_tokens // self.token_scale)


class _Counting:
    """A pace that adds up the seconds of all KV transfers; replicas wait for some, and most run beside steps."""

    def __init__(self, pace: ProfilePace) -> None:
        self._pace = pace
        self.transfer_s = 0.0
        self.step, self.draft, self.switch = pace.step, pace.draft, pace.switch

    def transfer(self, spec: ReplicaSpec, num_tokens: int, path: KVPath) -> float:
        seconds = self._pace.transfer(spec, num_tokens, path)
        self.transfer_s += seconds
        return seconds


class _Run(NamedTuple):
    """A rollout."""

    case: CaseName
    name: str
    seed: int
    """Of the lengths, and of what is random in policies."""
    assignment: int = 0
    tuning: Tuning = Tuning(SLOTS, "recompute")


def main() -> dict[str, Any]:
    config = launch.options(SeerSimConfig)
    sweeps = _sweep(config)
    names = [*_policies(CASES["moonlight"], config, {}, 0), *(DRAFTED if config.drafts else ())]
    keys = [_Run(*one) for one in itertools.product(config.cases, names, range(config.seeds))]
    for (case, name), tried in sweeps.items():
        for seed in range(config.seeds):
            tuning, several = seer_baseline.best(tried), seer_baseline.assignments(name, ASSIGNMENTS)
            keys += [_Run(case, name, seed, number, tuning) for number in several]
    done = call_each(partial(_simulate, config), keys, processes=config.processes, unit="rollout")
    runs: dict[CaseName, dict[str, dict[int, list[dict[str, float]]]]] = {case: {BASE: {}} for case in config.cases}
    for key, one in zip(keys, done, strict=True):
        runs[key.case].setdefault(key.name, {}).setdefault(key.seed, []).append(one)
    rows = [describe(case, some) for case, some in runs.items()]
    for row in rows:
        row["tuned"] = {
            name: seer_baseline.report(tried) for (case, name), tried in sweeps.items() if case == row["case"]
        }
    _print_table(rows)
    print(seer_paper.table([one for row in rows for one in row["paper"]]), file=sys.stderr)
    if config.figure is not None:
        _draw(config.figure, rows)
    return report("seer_sim", config, {"tier": "sim", "rows": rows}, hidden=["processes"])


def _sweep(config: SeerSimConfig) -> dict[tuple[CaseName, BoundName], dict[Tuning, list[float]]]:
    """Returns the seconds of each baseline's rollouts with each setting, in a smaller and coarser simulation."""
    fewest = min(CASES[name].instances for name in config.cases)
    blocks = min((config.chunk_tokens or CASES[name].chunk) // BLOCK_SIZE for name in config.cases)
    coarse = replace(
        config,
        token_scale=max(config.token_scale, min(COARSER * config.token_scale, PROMPT, BLOCK_SIZE * blocks)),
        shrink=min(COARSER * config.shrink, fewest),
    )
    keys = [
        _Run(case, name, seed, seed, Tuning(*tuning))
        for case, name in itertools.product(config.cases, BOUND)
        for tuning in itertools.product(CASES[case].slots(), WAYS)
        for seed in range(min(TRIALS, config.seeds))
    ]
    done = call_each(partial(_simulate, coarse), keys, processes=config.processes, unit="tuning rollout")
    found: dict[tuple[CaseName, BoundName], dict[Tuning, list[float]]] = {}
    for key, one in zip(keys, done, strict=True):
        some = found.setdefault((key.case, cast(BoundName, key.name)), {})
        some.setdefault(key.tuning, []).append(one["seconds"])
    return found


def describe(case: CaseName, runs: dict[str, dict[int, list[dict[str, float]]]]) -> dict[str, Any]:
    """Returns medians over the seeds and assignments, each with its range. Ratios are to the baseline's median over the
    assignments, with the same seed's lengths; the range of the baseline's own is what assignments differ by.

    `runs`: variant -> seed -> a rollout for each assignment.
    """
    base, context, oracle = (
        {seed: _median(some) for seed, some in runs[name].items()} for name in (BASE, CONTEXT, ORACLE)
    )
    variants = {}
    for name, by_seed in runs.items():
        pairs = [(seed, one) for seed, some in by_seed.items() for one in some]
        variants[name] = {
            "throughput": median_and_range([base[seed]["seconds"] / one["seconds"] for seed, one in pairs]),
            "tail": median_and_range([one["tail_s"] / base[seed]["tail_s"] for seed, one in pairs]),
            "of_oracle": median_and_range([oracle[seed]["seconds"] / one["seconds"] for seed, one in pairs]),
            "over_context": median_and_range([context[seed]["seconds"] / one["seconds"] for seed, one in pairs]),
            **{key: median_and_range([one[key] for _, one in pairs]) for key in pairs[0][1]},
        }
    shown = {
        seer_paper.DIVIDED: ("divided", "throughput"),
        seer_paper.CONTEXT: (CONTEXT, "throughput"),
        seer_paper.TAIL: (CONTEXT, "tail"),
        seer_paper.OF_ORACLE: (CONTEXT, "of_oracle"),
        seer_paper.DRAFTS: (DRAFTING, "throughput"),
        **{figure: (name, "over_context") for figure, name in zip(seer_paper.FIG_11, DRAFTED, strict=True)},
    }
    ours = {figure: variants[name][key][0] for figure, (name, key) in shown.items() if name in variants}
    paper = seer_paper.compare(case, ours) if case in seer_paper.PAPER else []
    return {"case": case, "variants": variants, "paper": paper}


def _median(some: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in some) for key in some[0]}


def _policies(
    case: Case, config: SeerSimConfig, lengths: dict[SequenceId, int], seed: int
) -> dict[str, Callable[[], SchedulePolicy]]:
    """Returns those that divide rollouts."""
    context = config.context(case, seed)
    return {
        "divided": lambda: Divided(context),
        "divided, in turns": lambda: Divided(context, takes_turns=True),
        CONTEXT: lambda: ContextAware(context),
        ORACLE: lambda: ContextAware(context, lengths=lengths),
        **{name: schedule_policy("also", name, context, lengths) for name in config.also},
    }


def _simulate(config: SeerSimConfig, run: _Run) -> dict[str, float]:
    """Returns what one rollout did."""
    case, scale = CASES[run.case], config.token_scale
    num_instances, prompt, cap = case.instances // config.shrink, PROMPT // scale, case.cap // scale
    alone = LogNormalLengths(median=case.cap / 4 / scale, sigma=0.8, cap=cap)
    num_groups = case.groups * num_instances // case.instances
    grouped = GroupedLengths(lengths=alone, correlation=case.correlation)
    groups = grouped.draw(num_groups, case.group_size, run.seed)
    workload, lengths = Workload.forced(groups, num_prompt_tokens=prompt, most=cap), hidden_lengths(groups)
    schedule: Callable[[], SchedulePolicy]
    if run.name in BOUND:
        schedule = partial(seer_baseline.policy, run.name, ASSIGNMENTS * run.seed + run.assignment)
    else:
        schedule = _policies(case, config, lengths, run.seed)[CONTEXT if run.name in DRAFTED else run.name]
    profile = LatencyProfile(device=case.device, shape=case.shape, tp_size=case.tp_size)
    room = profile.kv_tokens_capacity(RESERVE) // scale
    usual = HostLinks()
    host, network = (replace(one, bandwidth=1e9 * config.kv_bandwidth) for one in (usual.host, usual.network))
    links = replace(usual, host=host, network=network)
    pace = _Counting(ProfilePace(device=case.device, shape=case.shape, links=links, token_scale=scale))
    world = SimulatedWorld(
        pace=pace,
        options={
            **run.tuning._asdict(),
            "max_num_batched_tokens": 2 * SLOTS,
            "block_size": config.block_size,
            "max_model_len": prompt + cap,
        },
        num_kv_tokens={case.tp_size: sum(lengths.values()) + len(lengths) * prompt if case.kv_for_all else room},
        # A sequence's own tokens are all in which an ungrouped drafter looks.
        drafts=DraftAcceptance(table={0: SEER_TABLE_2[0]} if run.name == UNGROUPED else SEER_TABLE_2),
        cluster={"gpus_per_host": 8, "overheads": Overheads(message_s=0.0005 / scale), "records_steps": False},
    )
    drafts: dict[str, Any] = {"drafter": "grouped_suffix", "max_draft_tokens": 8, "draft_server": True}
    drafts["draft_lengths"] = "fixed" if run.name == FIXED else "adaptive"
    layout = contiguous_layout(range(num_instances * case.tp_size), case.tp_size)
    variant = Variant(layout=layout, schedule=schedule, options=drafts if run.name in DRAFTED else {})
    start = time.perf_counter()
    done = world.roll_out(workload, variant)
    return {
        "seconds": done.seconds * scale,
        "tokens_per_second": sum(lengths.values()) / done.seconds,
        "tail_s": done.tail_seconds * scale,
        "preempted": done.num_preempted,
        "kv_share": pace.transfer_s / num_instances / done.seconds,
        "simulated_in": time.perf_counter() - start,
    }


def _draw(path: Path, rows: list[dict[str, Any]]) -> None:
    from experiments.figures import draw_tasks

    with_drafts = DRAFTING in rows[0]["variants"]
    ends, context = (BASE, DRAFTING if with_drafts else CONTEXT), (BASE, "divided", CONTEXT, ORACLE)
    panels = [
        ("Fig. 7: throughput", "output tokens per second", "tokens_per_second", ends),
        ("Figs. 7 and 8: total time", "seconds", "seconds", ends),
        ("Fig. 8: tail latency", "seconds of the last tenth", "tail_s", ends),
        ("Fig. 10a: throughput", f"times that of {BASE}", "throughput", context),
        ("Fig. 10b: tail latency", f"times that of {BASE}", "tail", context),
    ]
    if with_drafts:
        panels.append(("Fig. 11: drafts", f"throughput, times that of {CONTEXT}", "over_context", (CONTEXT, *DRAFTED)))
    drawn = [
        (title, unit, {name: {row["case"]: row["variants"][name][key] for row in rows} for name in names})
        for title, unit, key, names in panels
    ]
    draw_tasks(path, "Seer: throughput, tails, what context and drafts give", drawn, "sim")


def _print_table(rows: list[dict[str, Any]]) -> None:
    keys = ("tail", "of_oracle", "over_context", "preempted", "kv_share")
    lines = [["case", "variant", "throughput", "(range)", *keys, "tuned"]]
    for row in rows:
        for name, one in row["variants"].items():
            middle, low, high = one["throughput"]
            tuned = row["tuned"].get(name, {}).get("setting", "")
            values = [f"{one[key][0]:g}" for key in keys]
            lines.append([row["case"], name, f"{middle:g}", f"{low:g}-{high:g}", *values, tuned])
    print(in_columns(lines), file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
