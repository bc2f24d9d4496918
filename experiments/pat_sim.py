"""PAT's throughput figures (10 and 11) on simulated GPUs, against every static TP size. Tier: sim.

    python experiments/pat_sim.py --output pat_sim.json --figure pat_sim.png

Batches of 128 long-tailed responses, the longest of which reaches the limit, as in the paper: in each static TP size,
by PAT's controller (`pat`, `paper`), which knows the lengths of earlier batches, and by the plan for the true
lengths (`hindsight`). The way back to the layout in which a rollout began is part of its time. Two hosts share a
batch, and each has a controller of its own; by hindsight both switch at once. The paper's ratios are of whole training
steps; `claim` is what they mean for generation alone. `true over` names the static TP sizes over which `pat` reaches
it. Prints a table, and one JSON object.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from engines.constraints import Count
from engines.parallel.layout import Layout, nested_on_hosts
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.rollouts import Rollout, Variant
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import in_columns, short
from experiments.pat_cases import Batch, Case, changing, controller, on_each_host
from experiments.policies import layout_controller
from experiments.processes import call_each
from research.pat.controller import PatController
from research.pat.deployment import Deployment
from research.pat.hindsight import PlayedPlan
from research.pat.lookahead import make_plan
from research.pat.profile import deployment_of
from research.simulator.pace import ProfilePace

GPUS_PER_HOST, BLOCK_SIZE = 8, 16
BY_PLAN = ("pat", "paper", "hindsight")
BATCH, PROMPT, SLOTS = 128, 512, 256
# With this median, and sigma 0.884, 10.85 % of responses pass 8K and 2.18 % pass 16K (Fig. 3b).
CASE: dict[str, Any] = {"batch": BATCH, "median": 2750, "num_prompt_tokens": PROMPT, "block_size": BLOCK_SIZE}
CASE |= {"token_scale": 1}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of a figure."""

    figure: str
    gpus: str
    """As in the names of latency profiles."""
    cap: int
    """Most tokens of a response."""
    hosts: int = 1
    claim: float | None = None
    """PAT's tokens per second of generation over those of the best static TP size, by the paper."""

    @property
    def name(self) -> str:
        return f"{self.figure}-{self.cap // 1024}K"


def _of_generation(ratio: float, share: float) -> float:
    """A ratio of whole steps as one of generation, which takes this share of a step with the static TP size."""
    return short(1 / (1 - (1 - 1 / ratio) / share))


# Shares: Fig. 3a at its ends, for 8 A40s, assumed for 16 too; and Fig. 11c has the times of generation.
LOW, HIGH = 0.6422, 0.817
CLAIMS = {
    ("10a", 6): _of_generation(1.05, LOW),
    ("10a", 16): _of_generation(1.27, HIGH),
    ("10b", 16): _of_generation(1.19, HIGH),
    ("10c", 6): _of_generation(1.05, LOW),
    ("10c", 16): _of_generation(1.18, HIGH),
    ("11a", 24): short(134.3 / 87.9),
    ("11b", 16): short(133.9 / 91.1),
}
CELLS = [
    Cell(figure=figure, gpus=gpus, cap=1024 * thousands, hosts=hosts, claim=CLAIMS.get((figure, thousands)))
    for figure, gpus, hosts, limits in (
        ("10a", "a40-8b", 1, (6, 8, 12, 16)),
        ("10b", "a40-8b", 2, (6, 8, 12, 16)),
        ("10c", "a40-qwen3-14b", 2, (6, 8, 12, 16)),
        ("11a", "h100-8b", 1, (24,)),
        ("11b", "h100-qwen3-14b", 1, (16,)),
    )
    for thousands in limits
]


@dataclass(frozen=True, kw_only=True)
class PatSimConfig(ResultOptions):
    """Simulate PAT's throughput figures."""

    seeds: Count = 3
    """Batches of each cell; medians are reported."""
    cells: Annotated[tuple[str, ...], Meta(min_length=1, description="one or more cells")] = tuple(
        cell.name for cell in CELLS
    )
    """Points of the figures."""
    also: tuple[str, ...] = ()
    """Policies of your own beside PAT's, each FILE.py:Class: a class that is made and answers as `PatController`."""
    processes: Count | None = None
    """Cells that are simulated at the same time; by default one per core."""
    figure: Path | None = None
    """Draw tokens per second over the limit of the lengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.cells if name not in {cell.name for cell in CELLS}]:
            raise ValueError(f"cells: {unknown[0]!r} is none of {', '.join(cell.name for cell in CELLS)}")
        for name in self.also:
            _own(name)


def main() -> dict[str, Any]:
    config = launch.options(PatSimConfig)
    cells = [cell for cell in CELLS if cell.name in config.cells]
    rows = call_each(
        partial(simulate, num_seeds=config.seeds, also=config.also), cells, processes=config.processes, unit="cell"
    )
    print_table(rows)
    if config.figure is not None:
        from experiments.pat_figures import draw_throughput

        draw_throughput(config.figure, rows)
    return report("pat_sim", config, {"tier": "sim", "batch": BATCH, "rows": rows}, hidden=["processes"])


def simulate(cell: Cell, num_seeds: int, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns medians over batches whose longest response reaches the limit."""
    runs: dict[str, list[Rollout]] = {}
    case = Case(gpus=cell.gpus, cap=cell.cap, **CASE)
    pace = case.pace()
    deployment, host = (
        deployment_of(
            pace,
            num_ranks=num_ranks,
            num_kv_tokens=case.num_kv_tokens(GPUS_PER_HOST),  # each TP size has its own
            max_num_seqs=SLOTS,
            max_model_len=PROMPT + cell.cap,
            goes_back=True,
        )
        for num_ranks in (cell.hosts * GPUS_PER_HOST, GPUS_PER_HOST)
    )
    drawn = (case.draw(seed) for seed in itertools.count())
    for batch in itertools.islice((one for one in drawn if max(one.lengths) == cell.cap), num_seeds):
        for name, variant in _variants(deployment, host, batch, also).items():
            runs.setdefault(name, []).append(world(pace, deployment).roll_out(batch.workload(), variant))
    speeds = {
        name: short(statistics.median(sum(one.lengths.values()) / one.seconds for one in some))
        for name, some in runs.items()
    }
    statics = {f"TP{size}" for size in deployment.num_kv_tokens}
    best = max((name for name in speeds if name in statics), key=speeds.__getitem__)

    def ratio(name: str, other: str) -> float:
        pairs = zip(runs[name], runs[other], strict=True)
        return short(statistics.median(its.seconds / mine.seconds for mine, its in pairs))

    over = {name: ratio("pat", name) for name in speeds if name in statics}
    return {
        **asdict(cell),
        "tokens_per_second": speeds,
        "best_static": best,
        "pat_over": over,
        "vs_best_static": {name: ratio(name, best) for name in (*BY_PLAN, *also)},
        "switches": short(statistics.fmean(len(one.switches) for one in runs["pat"])),
        "way_back_s": {
            name: short(statistics.fmean(one.way_back_s for one in some))
            for name, some in runs.items()
            if any(one.way_back_s for one in some)
        },
        "true_over": [name for name, value in over.items() if cell.claim is not None and value >= cell.claim],
    }


def _own(name: str) -> Callable[..., Any]:
    return layout_controller("also", name, ["pat, paper and hindsight, which are always there"])


def _variants(deployment: Deployment, host: Deployment, batch: Batch, also: tuple[str, ...] = ()) -> dict[str, Variant]:
    """`deployment` is of all hosts, `host` of one."""
    num_hosts = deployment.num_ranks // host.num_ranks
    hosts = [range(number * host.num_ranks, (number + 1) * host.num_ranks) for number in range(num_hosts)]

    def on_hosts(size: int) -> Layout:
        return nested_on_hosts(hosts, [size] * num_hosts)

    def by_itself(make: Callable[[], PatController]) -> Variant:
        return on_each_host(host, num_hosts, make, batch.contexts, batch.longest)

    plan = make_plan(deployment, batch.contexts, np.array(batch.lengths, float), None)
    play = partial(PlayedPlan, plan, deployment, num_hosts=num_hosts)
    return {
        **{
            f"TP{size}": Variant(layout=on_hosts(size), num_kv_tokens=count // size)
            for size, count in deployment.num_kv_tokens.items()
        },
        "pat": by_itself(partial(controller, host, batch, "lookahead")),
        "paper": by_itself(partial(controller, host, batch, "paper")),
        "hindsight": changing(deployment, play().layout(), play),
        **{name: by_itself(partial(_own(name), host, ended=batch.lifetimes)) for name in also},
    }


def world(pace: ProfilePace, deployment: Deployment) -> SimulatedWorld:
    """The GPUs of a deployment."""
    return SimulatedWorld(
        pace=pace,
        num_kv_tokens=deployment.num_kv_tokens,
        options={
            "max_num_seqs": SLOTS,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK_SIZE,
            "max_model_len": deployment.max_model_len,
        },
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["tokens_per_second"]))
    compared = ["PAT / best", "hindsight / best", "PAT's way back"]
    lines = [["figure", "limit", *names, "best", *compared, "claim", "true over"]]
    for row in rows:
        speeds = [f"{row['tokens_per_second'].get(name, float('nan')):g}" for name in names]
        ratios = [f"{row['vs_best_static'][name]:g}" for name in ("pat", "hindsight")]
        ratios.append(f"{row['way_back_s'].get('pat', 0.0):.3g} s")
        claim = [f"{row['claim'] or '-'}", ", ".join(row["true_over"]) or "-"]
        lines.append([row["figure"], f"{row['cap'] // 1024}K", *speeds, row["best_static"], *ratios, *claim])
    print(in_columns(lines), file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
