"""Heddle on 64 simulated GPUs: rollouts, schedulers, placements, and replicas of unequal size. Tier: sim.

    python experiments/heddle_sim.py --output heddle_sim.json

Three models, three agents (Figs. 12, 14, 15, 16). `allocation` has rollouts on equal replicas of 1, 2, 4 and 8 GPUs,
with the same placement, priorities and migration, over those on the replicas that are chosen from the lengths of an
earlier rollout; `equal_placed` is the best of these, and `unequal` has the sizes of Algorithm 2 alone. `oracle`,
`oracle_equal` and `oracle_unequal` have true lengths. `systems` has Verl, Verl* and Slime as the paper describes them:
cache affinity, hybrid, least load, turns in the order of their coming, and equal replicas.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from msgspec import Meta

from engines.constraints import Count, WholeNumber
from engines.parallel.layout import Layout
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import in_columns, short
from experiments.heddle_cases import Case
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
from experiments.processes import call_each
from research.heddle.allocation import Allocation, anneal, chosen, layout_of
from research.heddle.planning import priced
from research.heddle.priority import round_robin
from research.simulator.datasheets import QWEN3_8B, QWEN3_14B, QWEN3_32B, ModelShape
from research.workloads.agents import AGENTS, NUM_PROMPT_TOKENS, AgentName, Errors

ModelName = Literal["8b", "14b", "32b"]
SHAPES: Mapping[ModelName, tuple[ModelShape, int]] = {"8b": (QWEN3_8B, 1), "14b": (QWEN3_14B, 1), "32b": (QWEN3_32B, 2)}
"""And the TP size of the paper's baselines (§7.1)."""
PER_REPLICA = 100
"""Trajectories of a baseline's replica (§7.1)."""
GPUS_PER_HOST, TP_SIZES = 8, (1, 2, 4, 8)
SYSTEMS = {"verl": CACHE_AWARE, "verl*": HYBRID, "slime": LEAST_LOAD}
PRINTED = Tuned(threshold=0.0, skew=32.0)
"""As the paper has the baselines."""
SCHEDULERS = (FCFS, "rr", SJF)
BLIND = {"waits_s": 0.0, "patience_s": 0.0}
"""Options of systems that predict nothing, and so wait for no prediction."""
Run = tuple[ModelName, AgentName, str, int]
"""The last is the seed."""


@dataclass(frozen=True, kw_only=True)
class HeddleSimConfig(ResultOptions):
    """Simulate Heddle and what it is compared with."""

    models: Annotated[tuple[ModelName, ...], Meta(min_length=1, description="one or more models")] = get_args(ModelName)
    workloads: Annotated[tuple[AgentName, ...], Meta(min_length=1, description="one or more agents")] = tuple(AGENTS)
    gpus: Count = 64
    token_scale: Count = 256
    """Tokens of the models' trajectories per simulated token."""
    shrink: Count = 1
    """Divides the number of trajectories."""
    seed: WholeNumber = 1
    """Of the lengths; the earlier rollout has the next one."""
    seeds: Count = 1
    """Sets of lengths, from `seed` on. Ratios are means over them."""
    processes: Count | None = None
    """Rollouts that are simulated at the same time; by default one per core."""
    figure: Path | None = None
    """Draw the paper's Figs. 12, 14, 15 and 16 to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus % GPUS_PER_HOST:
            raise ValueError(f"gpus={self.gpus}: hosts have {GPUS_PER_HOST}; give a multiple")
        if self.token_scale > NUM_PROMPT_TOKENS:
            raise ValueError(
                f"token_scale={self.token_scale}: a prompt has {NUM_PROMPT_TOKENS} tokens, and needs one; give at most "
                f"{NUM_PROMPT_TOKENS}"
            )


@dataclass(frozen=True)
class Cell:
    """A model and an agent on these GPUs."""

    model: ModelName
    agent: AgentName
    config: HeddleSimConfig

    @cached_property
    def case(self) -> Case:
        shape, tp_size = SHAPES[self.model]
        per_gpu = max(1, PER_REPLICA // tp_size // self.config.shrink)
        return Case(
            name=self.agent,
            shape=shape,
            per_gpu=per_gpu,
            token_scale=self.config.token_scale,
            gpus_per_host=GPUS_PER_HOST,
        )

    @cached_property
    def num_kv_tokens(self) -> dict[int, int]:
        """What the GPUs hold beside the weights; a replica may hold less than the longest trajectory."""
        sizes = self.case.pace.num_kv_tokens(self.case.num_prompt_tokens + 1)
        return {size: count for size, count in sizes.items() if size in TP_SIZES}

    @property
    def equal_sizes(self) -> list[int]:
        """TP sizes of equal replicas: those at which one holds the longest trajectory."""
        return [size for size, count in self.num_kv_tokens.items() if count >= self.case.max_model_len]

    def deployed(self, layout: Layout, seed: int) -> Deployed:
        workload = self.case.workload(self.case.draw(self.config.gpus, seed))
        return Deployed(case=self.case, workload=workload, layout=layout, num_kv_tokens=self.num_kv_tokens)

    def allocated(self, lengths: Items[int], errors: Errors, choose: Callable[..., Allocation] = chosen) -> Layout:
        """Returns the layout for these lengths; with `anneal` that of Algorithm 2 alone. A layout needs a replica that
        holds the longest."""
        deployed = self.deployed(equal(self.config.gpus, max(self.num_kv_tokens)), self.config.seed)
        values = np.sort(np.asarray(lengths, float))[::-1]
        servers = {size: deployed.server_at(size, float(values.mean())) for size in self.num_kv_tokens}
        solve = priced(deployed.planner(errors))
        found = choose(values, self.config.gpus, servers, seed=self.config.seed, solve=solve)
        return layout_of(found.tp_sizes, gpus_per_host=GPUS_PER_HOST)

    def roll_out(self, name: str) -> dict[str, Any]:
        start = time.perf_counter()
        config, errors = self.config, Errors(residuals=fitted_residuals(TASKS[self.agent]))
        true = self.deployed(equal(config.gpus, max(self.num_kv_tokens)), config.seed).workload.lengths or {}
        earlier = self.deployed(equal(config.gpus, max(self.num_kv_tokens)), config.seed + 1).workload.lengths or {}
        base = SHAPES[self.model][1]
        policy, options = name, dict[str, Any]()
        match name:
            case "oracle":
                errors = Errors(kind="oracle")
                layout, policy = self.allocated([*true.values()], errors), HEDDLE
            case "unequal":
                layout, policy = self.allocated([*earlier.values()], errors, anneal), HEDDLE
            case "unequal-least_load":
                layout, policy = self.allocated([*earlier.values()], errors, anneal), LEAST_LOAD
            case "oracle-unequal":
                errors = Errors(kind="oracle")
                layout, policy = self.allocated([*true.values()], errors, anneal), HEDDLE
            case _ if name.startswith("oracle-fix"):
                errors = Errors(kind="oracle")
                layout, policy = equal(config.gpus, int(name.removeprefix("oracle-fix"))), HEDDLE
            case _ if name.startswith("fix"):
                layout, policy = equal(config.gpus, int(name.removeprefix("fix"))), HEDDLE
            case _ if name in SYSTEMS:
                layout, policy, options = equal(config.gpus, base), SYSTEMS[name], {"priority": round_robin, **BLIND}
            case "rr":
                layout, policy = self.allocated([*earlier.values()], errors), HEDDLE
                options = {"priority": round_robin, "waits_s": 0.0}
            case "fcfs":
                layout, options = self.allocated([*earlier.values()], errors), {"waits_s": 0.0}
            case _:
                layout = self.allocated([*earlier.values()], errors)
        done = self.deployed(layout, config.seed).simulate(policy, PRINTED, errors, **options)
        return {
            "seconds": done.makespan_s,
            "tp_sizes": sorted((spec.tp_size for spec in layout.replicas), reverse=True),
            "num_preempted": done.num_preempted,
            "tokens_per_second": sum(done.lengths.values()) * config.token_scale / done.makespan_s,
            "simulated_in": time.perf_counter() - start,
        }


def equal(num_gpus: int, tp_size: int) -> Layout:
    return layout_of((tp_size,) * (num_gpus // tp_size), gpus_per_host=GPUS_PER_HOST)


def simulate(config: HeddleSimConfig, run: Run) -> dict[str, Any]:
    return Cell(run[0], run[1], replace(config, seed=run[3])).roll_out(run[2])


def runs_of(config: HeddleSimConfig) -> list[Run]:
    runs: list[Run] = []
    for model in config.models:
        for agent in config.workloads:
            cell = Cell(model, agent, config)
            fixed = [f"{what}fix{size}" for what in ("", "oracle-") for size in cell.equal_sizes]
            names = [HEDDLE, "oracle", "unequal", "oracle-unequal", *fixed, *SYSTEMS]
            if model == "14b":
                names += [*SCHEDULERS, LEAST_LOAD, CACHE_AWARE, "unequal-least_load"]
            seeds = range(config.seed, config.seed + config.seeds)
            runs += [(model, agent, name, seed) for name in names for seed in seeds]
    return runs


def main() -> dict[str, Any]:
    config = launch.options(HeddleSimConfig)
    keys = runs_of(config)
    found = call_each(partial(simulate, config), keys, processes=config.processes, unit="rollout")
    done = dict(zip(keys, found, strict=True))
    cells = {model: {agent: describe(done, model, agent) for agent in config.workloads} for model in config.models}
    _print_table(cells)
    if config.figure is not None:
        from experiments.heddle_figures import draw_systems

        draw_systems(config.figure, cells, config.workloads)
    parts = {
        part: {model: {agent: one[part] for agent, one in some.items() if one[part]} for model, some in cells.items()}
        for part in ("allocation", "systems", "schedulers", "placement", "tp_sizes")
    }
    return report("heddle_sim", config, {"tier": "sim", **parts, "cells": cells}, hidden=["processes"])


def describe(done: Mapping[Run, dict[str, Any]], model: ModelName, agent: AgentName) -> dict[str, Any]:
    """Returns the seconds of all variants over Heddle's: the means over seeds; in `over_heddle` with the least and the
    most."""
    some: dict[str, list[dict[str, Any]]] = {}
    for (its, whose, name, _), one in done.items():
        if (its, whose) == (model, agent):
            some.setdefault(name, []).append(one)
    ratios = {
        name: [one["seconds"] / heddle["seconds"] for one, heddle in zip(of_seeds, some[HEDDLE], strict=True)]
        for name, of_seeds in some.items()
    }
    over = {name: short(statistics.fmean(of_seeds)) for name, of_seeds in ratios.items()}
    fixed = {name: over[name] for name in over if name.startswith("fix")}
    known = [over[name] for name in over if name.startswith("oracle-fix")]
    fixed |= {"equal_placed": min(fixed.values()), "unequal": over["unequal"], "oracle": over["oracle"]}
    fixed |= {"oracle_equal": min(known), "oracle_unequal": over["oracle-unequal"]}
    return {
        "allocation": fixed,
        "systems": {name: over[name] for name in SYSTEMS},
        "schedulers": {name: over[name] for name in SCHEDULERS if name in over},
        "placement": {name: over[name] for name in (LEAST_LOAD, CACHE_AWARE, "unequal-least_load") if name in over},
        "over_heddle": {name: [over[name], short(min(one)), short(max(one))] for name, one in ratios.items()},
        "tp_sizes": [one["tp_sizes"] for one in some[HEDDLE]],
        "variants": {
            name: [
                {key: short(value) if isinstance(value, float) else value for key, value in one.items()}
                for one in seeds
            ]
            for name, seeds in some.items()
        },
    }


def _print_table(cells: Mapping[ModelName, Mapping[AgentName, dict[str, Any]]]) -> None:
    lines = [["model", "agent", "over Heddle", "seconds"]]
    for model, some in cells.items():
        for agent, one in some.items():
            for part in ("allocation", "systems", "schedulers", "placement"):
                lines += [[model, agent, f"{part}: {name}", f"{value:g}"] for name, value in one[part].items()]
    print(in_columns(lines, str.ljust), file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
