"""Heddle's priority, placement and migration against what they replace. Tiers: live and paced.

    torchrun --standalone --nproc-per-node 2 experiments/heddle.py --output heddle.json --figure figures

The live part has two ranks, which roll trajectories out at this machine's own speed; then it plans, and fits a
predictor. The paced part has eight ranks, each as an H100 with a 14B model: trajectories of three agents, whose tools
answer after Table 1's times, and KV caches for half of the demand. Predictions have the errors of the predictor that
`heddle_predicting.py` has fitted. In each comparison one mechanism is exchanged:

- priority: by what remains, against the order of submission (FCFS) and the shortest first (SJF);
- placement and migration: against least load, cache affinity, and both, all with the same priorities.

Ratios are the seconds of what is replaced over Heddle's. Every variant must draw the same tokens. Prints tables to
stderr and one JSON object to stdout.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

import engines
from engines.constraints import Positive
from engines.coordination.policies import SchedulePolicy
from experiments import launch
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.parts import run_parts
from experiments.comparison.real import RealWorld
from experiments.comparison.results import longer_than_paced, track
from experiments.comparison.rollouts import Rollout, Variant
from experiments.comparison.turns import AGAIN, interleave, make_row, short, table
from experiments.heddle_cases import Case, singles
from experiments.heddle_live import LiveConfig, live_part
from experiments.heddle_report import exposed_s, queue_of_longest
from experiments.heddle_tuning import (
    CACHE_AWARE,
    FCFS,
    HEDDLE,
    HYBRID,
    LEAST_LOAD,
    SJF,
    TASKS,
    Deployed,
    Tuned,
    fitted_residuals,
)
from experiments.pat_cases import PACED_MODEL
from research.heddle.policy import HeddlePolicy
from research.workloads.agents import AGENTS, AgentName, Errors

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

SCALES: Mapping[AgentName, tuple[int, int, int]] = {"coding": (20, 64, 5), "search": (24, 32, 4), "math": (16, 96, 6)}
"""Trajectories of a rank; tokens of the 14B model for which one here stands; and trajectories, so that there are about
100 for each GPU (§7). A turn then has many steps, and its tool lasts longer than what the host does between two."""
MAIN: Mapping[AgentName, tuple[str, ...]] = {
    "coding": (HEDDLE, FCFS, SJF),
    "search": (HEDDLE, LEAST_LOAD, CACHE_AWARE, HYBRID),
    "math": (HEDDLE,),
}
"""What is measured in each turn; the others once."""


@dataclass(frozen=True, kw_only=True)
class HeddleConfig(LiveConfig):
    """Compare Heddle's decisions with those that they replace."""

    scale: Positive = 1.5
    """Seconds here per second of the H100: larger where this machine is too slow to follow."""
    workloads: Annotated[tuple[AgentName, ...], Meta(min_length=1, description="one or more agents")] = tuple(AGENTS)
    """Agents of the paced part."""
    full: bool = False
    """Measure every variant in each turn, with twice as many trajectories, each of which stands for half as many."""


def main() -> dict[str, Any] | None:
    return run_parts("heddle", HeddleConfig, live=live_part, paced=paced_part, summary=summary)


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The result's first fields."""
    cases: dict[str, dict[str, Any]] = measured.get("paced", {}).get("cases", {})
    live = measured.get("live", {})
    equal = [one["tokens_equal"] for one in [*cases.values(), *([live] if live else [])]]
    found: dict[str, Any] = {"tokens_equal": all(equal)}
    found |= {name: live[name] for name in ("dp_exact", "dp_ms", "annealing_gap", "predictor") if name in live}
    for name in ("queue_of_longest", "exposed_s", "num_migrations", "num_preempted", "a_a", "sim_error"):
        if cases:
            found[name] = {case: one[name] for case, one in cases.items()}
    if cases:
        found["steps_longer_than_paced"] = max(one["steps_longer_than_paced"] for one in cases.values())
        found["reference"] = {case: one["reference"] for case, one in cases.items() if one["reference"]}
    return found


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A case on this job's ranks, which call its methods together."""

    deployed: Deployed
    world: RealWorld
    tuned: Tuned

    def variant(self, name: str, errors: Errors, num_kv_tokens: int | None = None) -> Variant:
        one = self.deployed if num_kv_tokens is None else replace(self.deployed, num_kv_tokens={1: num_kv_tokens})
        return one.case.variant(
            one.layout,
            one.num_kv_tokens[1],
            one.schedule(name, self.tuned, errors),
            one.workload.turns,
            errors,
            priority_margin=math.inf if name == FCFS else 0.0,
        )

    def roll_out(self, name: str, errors: Errors, num_kv_tokens: int | None = None) -> tuple[Rollout, HeddlePolicy]:
        variant, made = self.variant(name, errors, num_kv_tokens), list[Any]()

        def make() -> SchedulePolicy:
            made.append(variant.schedule())
            return made[-1]

        return self.world.roll_out(self.deployed.workload, replace(variant, schedule=make)), made[0]


def paced_part(config: HeddleConfig, world: TorchGroup) -> dict[str, Any]:
    import torch

    from algos.tokenizer import byte_tokenizer

    torch.set_num_threads(1)
    groups = engines.GroupCache(world, [singles(world.size)])
    found: dict[str, Any] = {}
    cases = [paced_case(name, config) for name in config.workloads]
    longest, shape = max(case.max_model_len for case in cases), replace(PACED_MODEL, vocab=len(byte_tokenizer()))
    with checkpoint(shape, max_positions=longest, dtype="float64", world=world) as model:
        if not world.rank:
            byte_tokenizer().save_pretrained(model)  # trajectories read and observe text
        world.barrier()
        for case in cases:
            start = time.monotonic()
            real = RealWorld(model=model, groups=groups, pace=case.pace, options=case.options() | {"dtype": "float64"})
            measured = measure(config, case, real)
            if not world.rank:
                found[case.name] = measured | {"seconds": short(time.monotonic() - start)}
    groups.close()
    return {"paced": {"tier": "paced", **tables(found), "cases": found}}


def paced_case(name: AgentName, config: HeddleConfig) -> Case:
    per_gpu, token_scale, sequence_scale = SCALES[name]
    if config.full:
        per_gpu, sequence_scale = 2 * per_gpu, max(1, sequence_scale // 2)
    return Case(
        name=name,
        per_gpu=max(2, per_gpu // config.shrink),
        token_scale=token_scale,
        sequence_scale=sequence_scale,
        scale=config.scale,
    )


def tables(found: dict[str, Any]) -> dict[str, Any]:
    """The main ratios, and nothing else."""
    names = {"priority": (FCFS, SJF), "placement": (LEAST_LOAD, CACHE_AWARE, HYBRID)}
    return {
        part: {case: {name: one["ratios"][name] for name in some} for case, one in found.items()}
        for part, some in names.items()
    }


def measure(config: HeddleConfig, case: Case, real: RealWorld) -> dict[str, Any]:
    """Returns the results of an agent; on other ranks than the first, nothing."""
    num_ranks, world = real.groups.world.size, real.groups.world
    groups = case.draw(num_ranks, config.seed)
    prompts = random_prompts(len(groups), case.num_prompt_tokens, seed=config.seed)
    workload = case.workload(groups, prompts)
    deployed = Deployed(
        case=case,
        workload=workload,
        layout=singles(num_ranks),
        num_kv_tokens={1: case.num_kv_tokens(num_ranks, groups)},
    )
    fitted, oracle = Errors(residuals=fitted_residuals(TASKS[case.name])), Errors(kind="oracle")
    tuned = Tuned(**launch.on_rank_0(world, lambda: asdict(deployed.tune(fitted))))
    bench = Bench(deployed=deployed, world=real, tuned=tuned)
    names = [HEDDLE, FCFS, SJF, LEAST_LOAD, CACHE_AWARE, HYBRID]
    policies: list[HeddlePolicy] = []

    def run(name: str, errors: Errors = fitted, num_kv_tokens: int | None = None) -> Rollout:
        rollout, policy = bench.roll_out(name, errors, num_kv_tokens)
        if name == HEDDLE:
            policies.append(policy)
        return rollout

    calls = {
        name: [partial(run, name)] * (config.turns if config.full or name in MAIN[case.name] else 1) for name in names
    }
    runs = interleave(calls, config.turns, name=case.name, warm_up=False)
    for_all = case.num_prompt_tokens * len(workload.lengths or {}) + sum(
        turn.num_generated + turn.num_observed for group in groups for turns in group for turn in turns
    )
    extra: dict[str, Rollout] = {}
    if case.name == "coding":
        extra = {f"{name}, oracle": run(name, oracle) for name in (HEDDLE, FCFS, SJF, LEAST_LOAD)}
        extra |= {f"{name}, KV for all": run(name, fitted, for_all) for name in (HEDDLE, FCFS)}
    elif case.name == "search":
        extra = {f"{name}, oracle": run(name, oracle) for name in (HEDDLE, LEAST_LOAD)}
    if world.rank:
        return {}
    if config.wandb != "off":
        track(f"heddle-{case.name}", runs)
    if config.figure is not None:
        from experiments.heddle_figures import draw_case

        draw_case(config.figure / f"heddle_{case.name}.png", case.name, runs, extra)
    simulated = {name: deployed.makespans(name, tuned, fitted) for name in (HEDDLE, LEAST_LOAD)}
    return describe(deployed, runs, extra, policies, simulated) | {"tuned": asdict(tuned)}


def describe(
    deployed: Deployed,
    runs: dict[str, list[Rollout]],
    extra: dict[str, Rollout],
    policies: list[HeddlePolicy],
    simulated: Mapping[str, list[float]],
) -> dict[str, Any]:
    row = make_row(deployed.case.name, {name: [one.makespan_s for one in some] for name, some in runs.items()})
    print(table([row]), file=sys.stderr, flush=True)
    ours = runs[HEDDLE]
    queues = {name: statistics.median(queue_of_longest(one) for one in runs[name]) for name in (HEDDLE, FCFS)}
    reference = {
        name: short(extra[f"{name}, {what}"].makespan_s / extra[f"{HEDDLE}, {what}"].makespan_s)
        for what in ("oracle", "KV for all")
        for name in (FCFS, SJF, LEAST_LOAD)
        if f"{name}, {what}" in extra
    }
    moves = [policy.counters for policy in policies][: len(ours)]
    everything = [one for some in runs.values() for one in some] + [*extra.values()]
    return {
        "tokens_equal": len({one.digest for one in everything}) == 1,
        "ratios": row["ratios"],
        "a_a": row["a_a"],
        "reference": reference,
        "queue_of_longest": short(queues[HEDDLE] / queues[FCFS]) if queues[FCFS] else None,
        "exposed_s": {
            name: short(statistics.fmean(exposed_s(one.turns)[name] for one in ours) / deployed.clock)
            for name in ("prediction", "migration")
        },
        "num_migrations": statistics.median(one.num_migrations for one in moves),
        "num_yielded": statistics.median(one.num_yielded for one in moves),
        "num_preempted": {
            name: short(statistics.median(one.num_preempted for one in some))
            for name, some in runs.items()
            if not name.endswith(AGAIN)
        },
        "sim_error": {
            name: short(abs(statistics.median(some) / statistics.median(one.makespan_s for one in runs[name]) - 1))
            for name, some in simulated.items()
        },
        "sim_ms": {name: [short(1000 * some[0]), short(1000 * some[-1])] for name, some in simulated.items()},
        "num_tokens": sum(ours[0].lengths.values()),
        "row": row,
        **longer_than_paced(deployed.case.name, everything),
    }


if __name__ == "__main__":
    launch.run(main)
