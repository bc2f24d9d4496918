"""ROSE on simulated GPUs: a rollout on GPUs of its own, and on those of serving replicas (§4.1). Tier: sim.

    python experiments/rose_sim.py --output rose_sim.json --figure rose_sim.png

Trajectories of turns and tools, in groups, run on dedicated replicas of Llama-3.1-8B on H100s, and beside Qwen3-8B on
serving replicas. SLOs are fixed from serving alone: 1.6 times its P99 TTFT and 4 times its median gap between tokens.
Policies are those of rose.py (Fig. 9). By cell, `slo` has the latencies of the requests that came during the rollout;
`harvest` the rollout's tokens on serving replicas, over those that it would draw without requests in the seconds in
which the serving model did not step; `speedup` how many times as fast the rollout is as on the dedicated replicas, by
`alone`. `unused` is a bound: the serving replicas serve nothing.

`sharing` has the rungs of Table 2, without admission control: halves of the memory; ROSE's sharing; a prefix cache.
`engines` has Table 1: ROSE (`dual`); a change of models where no request has been for a while (`swap`); turns without
SLOs and without a prefix cache (`multiplex`). `lease` is Table 4, `density` Table 5, `replicas` Fig. 14, with `dual`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from engines.constraints import Count, NonNegative, Positive, WholeNumber
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import in_columns, short
from experiments.processes import call_each
from experiments.rose_policies import ALIKE, Cell, Policy, check_traces, halves, latencies, slo_of
from experiments.rose_sim_cases import Case, Done, simulate

Slos = dict[Cell, tuple[float, float]]
ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class RoseSimConfig(ResultOptions):
    """Simulate rollouts that borrow serving replicas."""

    cells: Annotated[tuple[Cell, ...], Meta(min_length=1, description="one or more cells")] = ("conversation", "code")
    """Workloads of the serving model; `full` is the conversation at a rate that leaves it no time."""
    policies: tuple[Policy, ...] = (
        *("none", "ttft", "tpot", "dual_printed", "dual_cumulative", "dual", "static_split", "half_slo"),
    )
    """What admits steps of the rollout, as in rose.py; `dual` is always simulated."""
    dedicated: Count = 4
    """Replicas of the rollout alone, one GPU each."""
    serving: Count = 4
    """Serving replicas, one GPU each."""
    groups: Count = 16
    """Groups of 16 trajectories."""
    traces: Path | None = None
    """Folder of the Azure LLM traces of 2023 (CSV): each serving replica has a window of its own, 400 s after the one
    before. By default arrivals and lengths are drawn."""
    memory_gb: Positive = 12.0
    """Of a GPU, for the KV of both models: about a third of what an H100 has left, as trajectories have a fourth of the
    paper's 32K tokens."""
    leases: tuple[Positive, ...] = (10.0, 20.0, 50.0, 100.0)
    """Seconds (Table 4)."""
    densities: tuple[Annotated[float, Meta(gt=0, le=4, description="from above 0 to 4")], ...] = (1.0, 1.5, 2.0)
    """Times the requests (Table 5)."""
    replicas: tuple[Count, ...] = (2, 4, 8)
    """Serving replicas (Fig. 14)."""
    full_rate: Annotated[float, Meta(gt=0, le=4, description="from above 0 to 4")] = 4.0
    """How many times as many requests come in `full`."""
    idle_s: Positive = 1.0
    """Without requests, until `swap` changes to the rollout's model."""
    change_s: NonNegative = 0.5
    """To change the model: 16 GB over PCIe in 0.32 s, and its start (assumed)."""
    seed: WholeNumber = 0
    """Of all that is drawn."""
    quick: bool = False
    """A first look: a fourth of the GPUs and trajectories, one cell, few policies, leases and densities."""
    processes: Count | None = None
    """Rollouts that are simulated at the same time; by default one per core."""
    wandb: Literal["auto", "off"] = "auto"
    """auto: a run for each policy, by wandb's own settings and environment; offline if nobody is logged in."""
    figure: Path | None = None
    """Draw latencies, harvest and lent seconds to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_traces(self.traces)
        if self.groups <= self.dedicated:
            raise ValueError(
                f"groups={self.groups}: the dedicated={self.dedicated} replicas run all of them at once, and borrow "
                f"nothing; give more groups"
            )

    def shrunk(self) -> RoseSimConfig:
        """What `quick` simulates."""
        return replace(
            self,
            cells=self.cells[:1],
            policies=tuple(one for one in self.policies if one in ("none", "dual")),
            groups=max(2, self.groups // 4),
            dedicated=max(1, self.dedicated // 4),
            serving=max(1, self.serving // 4),
            replicas=(1,),
            **{name: getattr(self, name)[:2] for name in ("leases", "densities")},
        )


def cases_of(config: RoseSimConfig) -> dict[tuple[str, ...], Case]:
    """All cases but those before SLOs are known, by the place of their results; some are in several places."""
    found: dict[tuple[str, ...], Case] = {}
    for cell in config.cells:
        dual = Case(cell=cell, num_serving=config.serving)
        turns = replace(dual, admission="none")
        for policy in {**dict.fromkeys(config.policies), "dual": None}:
            case = replace(dual, admission=policy)
            found["policies", cell, policy] = replace(case, memory="halves") if policy == "static_split" else case
        if cell == "full":
            continue
        plain = replace(turns, has_prefix_cache=False)
        rungs = {"static": replace(plain, memory="halves"), "preempt": plain, "prefix": turns}
        found |= {("sharing", cell, rung): case for rung, case in rungs.items()}
        engines = {"rose": dual, "swap": replace(dual, admission="swap"), "multiplex": plain}
        found |= {("engines", cell, name): case for name, case in engines.items()}
        found |= {("replicas", cell, str(count)): replace(dual, num_serving=count) for count in config.replicas}
    first = Case(cell=config.cells[0], num_serving=config.serving)
    found |= {("lease", f"{lease:g}"): replace(first, lease_s=lease) for lease in config.leases}
    found |= {("density", f"{density:g}"): replace(first, density=density) for density in config.densities}
    alone = replace(first, admission=ALONE)
    found |= {("density", f"{density:g}, alone"): replace(alone, density=density) for density in config.densities}
    return found


def main() -> dict[str, Any]:
    config = launch.options(RoseSimConfig)
    config = config.shrunk() if config.quick else config
    start = time.monotonic()
    nothing = Case(cell=config.cells[0], num_serving=config.serving, density=0.0)
    before = {cell: replace(nothing, cell=cell, admission=ALONE, density=1.0) for cell in config.cells}
    alone = run(config, {}, [*before.values(), nothing])
    slos: Slos = {cell: slo_of([alone[case]]) for cell, case in before.items()}
    places = cases_of(config)
    done = run(config, slos, [case for case in places.values() if case not in alone]) | alone
    found = {place: done[case] for place, case in places.items()}
    found |= {("policies", cell, ALONE): alone[case] for cell, case in before.items()}
    found["unused",] = alone[nothing]
    facts = summary(config, found, slos)
    if not facts["tokens_equal"]:
        print("rose_sim: a sequence or a request has not ended as it should", file=sys.stderr)
    result = report(
        "rose_sim",
        config,
        {"tier": "sim", "seconds": round(time.monotonic() - start, 1), **facts},
        hidden=["processes", "wandb"],
    )
    _print_tables(result)
    if config.figure is not None:
        from experiments.rose_figures import draw_cells

        of_first = result["lent_s"][config.cells[0]]
        draw_cells(config.figure, result["slo"], result["limits"], result["harvest"], lent=of_first, tier="sim")
    if config.wandb != "off":
        _track(result)
    return result


def run(config: RoseSimConfig, slos: Slos, cases: Iterable[Case]) -> dict[Case, Done]:
    """Simulates each case once."""
    distinct = [*dict.fromkeys(cases)]
    done = call_each(partial(simulate, config, slos), distinct, processes=config.processes, unit="rollout")
    return dict(zip(distinct, done, strict=True))


def summary(config: RoseSimConfig, found: Mapping[tuple[str, ...], Done], slos: Slos) -> dict[str, Any]:
    unused = found["unused",]
    rate = unused.num_tokens / sum(unused.lent_s)
    cells: dict[str, dict[str, Any]] = {
        name: {cell: {} for cell in config.cells}
        for name in ("slo", "harvest", "rollout_s", "speedup", "lent_s", "counts", "sharing", "engines", "replicas")
    }
    flat: dict[str, dict[str, Any]] = {"lease": {}, "density": {}}
    first = config.cells[0]
    for place, done in found.items():
        cell: Cell = place[1] if place[0] in ("policies", *cells) else first  # type: ignore[assignment]
        dedicated = found["policies", cell, ALONE].rollout_s
        speedup = short(dedicated / done.rollout_s)
        row = {"rollout_s": short(done.rollout_s), "speedup": speedup}
        if done.ttft:
            row |= latencies([done], *slos[cell])
        match place:
            case ("policies", _, policy):
                cells["rollout_s"][cell][policy] = row.pop("rollout_s")
                cells["speedup"][cell][policy] = row.pop("speedup")
                cells["slo"][cell][policy] = row
                cells["counts"][cell][policy] = done.counts
                if policy != ALONE:
                    cells["harvest"][cell][policy] = short(done.num_tokens / (rate * done.free_s))
                    cells["lent_s"][cell][policy] = [short(one) for one in done.lent_s]
            case (("lease" | "density") as name, value):
                flat[name][value] = row
            case (name, _, value):
                cells[name][cell][value] = row
    a_a = {cell: short(halves([found["policies", cell, ALONE]])) for cell in config.cells}
    slo = cells["slo"]
    return {
        "tokens_equal": all(done.is_whole for done in found.values()),
        "limits": {
            cell: {"ttft_slo_ms": short(1e3 * ttft), "tpot_slo_ms": short(1e3 * tpot)}
            for cell, (ttft, tpot) in slos.items()
        },
        **cells,
        **flat,
        "unused": {
            "rollout_s": short(unused.rollout_s),
            "speedup": short(found["policies", first, ALONE].rollout_s / unused.rollout_s),
        },
        "a_a": a_a,
        "void": [cell for cell, ratio in a_a.items() if ratio > ALIKE or not slo[cell][ALONE]["ok"]],
        "proves_nothing": [cell for cell, some in slo.items() if "none" in some and some["none"]["ok"]],
        "simulated_in": short(sum(done.simulated_in for done in {id(done): done for done in found.values()}.values())),
    }


def _print_tables(result: Mapping[str, Any]) -> None:
    columns = ("rollout_s", "speedup", "ttft_p99", "tpot_p99", "ttft_mean", "tpot_mean", "ok")
    lines = [["what", "cell", "which", *columns, "harvest"]]
    rows: list[tuple[str, str, str, Mapping[str, Any]]] = []
    for cell, some in result["slo"].items():
        for policy, row in some.items():
            others = {name: result[name][cell].get(policy, "") for name in ("rollout_s", "speedup", "harvest")}
            rows.append(("policies", cell, policy, row | others))
    for name in ("sharing", "engines", "replicas"):
        rows += [(name, cell, which, row) for cell, some in result[name].items() for which, row in some.items()]
    for name in ("lease", "density"):
        rows += [(name, next(iter(result["slo"])), which, row) for which, row in result[name].items()]
    rows.append(("unused", "", "", result["unused"]))
    for what, cell, which, row in rows:
        values = (row.get(key, "") for key in (*columns, "harvest"))
        lines.append([what, cell, which, *(f"{one:g}" if isinstance(one, float) else str(one) for one in values)])
    print(in_columns(lines, str.ljust), file=sys.stderr)


def _track(result: Mapping[str, Any]) -> None:
    from experiments.tracking import start_run

    for cell, some in result["slo"].items():
        for policy, row in some.items():
            config = {**result["workload"], "cells": [cell], "policies": [policy]}
            with start_run(f"rose-sim-{cell}-{policy}", config, several=True) as tracked:
                tracked.summary.update({**row, "rollout_s": result["rollout_s"][cell][policy]})


if __name__ == "__main__":
    launch.run(main)
