"""Rollouts in the idle memory and time of a serving replica (ROSE §4.1): latencies, and what the rollout harvests.

    torchrun --standalone --nproc-per-node 2 experiments/rose.py --traces path/to/azure_llm_trace --figure rose.png

Each rank is a serving process of its own that also hosts a rollout of a model of another architecture. Requests arrive
as in the Azure LLM traces of 2023; their tokens and the gaps between them are divided by 8. Prompts and decodes share
the serving replica's passes. `cells` is paced: a step lasts what it takes on an H100. SLOs are fixed before anything is
lent, from serving alone: 1.6 times its P99 TTFT and 4 times its median gap between tokens. `live` runs a conversation
at this machine's own speed, and is not scored. `borrowed` is paced, too: a job with replicas of its own borrows serving
processes over HTTP, and the simulator does the same. All tokens are compared with those of serving alone, and of the
rollout alone. Prints a table and one JSON object.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from engines.constraints import Count, NonNegative, Positive, WholeNumber
from experiments import launch
from experiments.comparison.results import ResultOptions, check_figure, report
from experiments.comparison.turns import in_columns
from experiments.rose_policies import DRAWN, FILES, SLOTS, Cell, Policy, check_traces
from research.simulator.latency import profile
from research.workloads.arrivals import Arrival, read_trace

if TYPE_CHECKING:
    from experiments.rose_cells import Measured

Part = Literal["cells", "live", "borrowed", "pool"]


@dataclass(frozen=True, kw_only=True)
class RoseConfig(ResultOptions):
    """Measure rollouts beside a serving model, under SLOs."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] = (
        *("cells", "live", "borrowed", "pool"),
    )
    """What to measure. borrowed: a job with replicas of its own that borrows serving processes, paced and simulated;
    pool: what a step in pages takes over one with a KV cache of its own."""
    endpoint_model: Path | None = None
    """Also load a serving endpoint over this model, as serving_load.py does by default (needs OpenAI's client)."""
    cells: Annotated[tuple[Cell, ...], Meta(min_length=1)] = ("conversation", "code", "full")
    """Workloads of the serving model; `full` is the conversation at a rate that leaves it no time."""
    policies: tuple[Policy, ...] = (
        *("none", "ttft", "tpot", "dual_printed", "dual_cumulative", "dual", "static_split", "half_slo"),
    )
    """What admits steps of the rollout. none: turns; ttft, tpot: turns within one SLO; dual_printed: Eq. 1 and 2;
    dual_cumulative: with the work ahead of each request; dual: that, and a bound on how long a queue is delayed in all;
    half_slo: dual with half of both SLOs. All share memory as the paper does, but for static_split: dual with half of
    the pages."""
    traces: Path | None = None
    """Folder of the Azure LLM traces of 2023 (CSV); by default arrivals and lengths are drawn."""
    requests: Count = 300
    """Requests of a run."""
    runs: Count = 3
    """Runs of each cell and policy, over different windows of the trace; P99s are over all of them."""
    shorten: Count = 8
    """Divides tokens, and gaps between requests."""
    full_rate: Count = 4
    """How many times as many requests come in `full`, in the same time."""
    live_rate: Positive = 0.15
    """The same in the live part, for a machine that is slower than an H100."""
    guard_ms: NonNegative = 3.0
    """Slack that must be left when a step of the rollout is admitted, for what host and machine add to passes."""
    profile: str = "h100-8b-tp1"
    """Latency profile of both models."""
    scale: Positive = 1.0
    """Multiplies the time of paced steps, of gaps and of SLOs: larger where this machine is too slow to follow."""
    own: Count = 4
    """Replicas of the job in the part `borrowed`."""
    lenders: Count = 4
    """Serving processes that it borrows."""
    sequences: Count = 1200
    """Sequences that it rolls out."""
    borrowed_scale: Positive = 4.0
    """`scale` of the part `borrowed`, which has more processes."""
    ranks: Count = 2
    """Processes to start; under torchrun, its number of processes applies instead."""
    seed: WholeNumber = 0
    """Of all that is drawn."""
    figure: Path | None = None
    """Draw latencies and harvest to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_figure(self.figure)
        check_traces(self.traces)
        if "cells" in self.parts and not self.policies:
            raise ValueError("policies: give one or more")
        if "borrowed" in self.parts and self.sequences <= SLOTS * self.own:
            raise ValueError(
                f"sequences={self.sequences}: the own={self.own} replicas run all of them at once, and borrow nothing; "
                f"give more than {SLOTS * self.own}"
            )

    def arrivals(self, cell: Cell, run: int) -> list[Arrival]:
        """The requests of a run, with times and lengths as they are here. Raises ValueError for a short trace."""
        count = self.requests * (self.full_rate if cell == "full" else 1)
        first, last = run * count, (run + 1) * count
        if self.traces is None:
            drawn = DRAWN[cell]
            found = drawn.draw(1.5 * last / drawn.rate + 60, self.seed)[first:last]
        else:
            found = read_trace(self.traces / FILES[cell])[first:last]
        if len(found) < count:
            raise ValueError(f"requests={self.requests}: the trace has too few for {self.runs} runs; ask for fewer")
        faster = self.shorten * count / self.requests / self.scale
        return [
            replace(
                one,
                time_s=(one.time_s - found[0].time_s) / faster,
                num_prompt_tokens=max(1, round(one.num_prompt_tokens / self.shorten)),
                num_generated_tokens=max(1, round(one.num_generated_tokens / self.shorten)),
            )
            for one in found
        ]

    def arrivals_of_lender(self, number: int) -> list[Arrival]:
        """More than come during the rollout of the part `borrowed`. Raises ValueError for a short trace."""
        return replace(self, requests=2 * self.requests, runs=self.lenders).arrivals(self.cells[0], number)


def main() -> dict[str, Any] | None:
    config = launch.options(RoseConfig)
    start = time.monotonic()
    for cell in config.cells:
        config.arrivals(cell, config.runs - 1)
    if "borrowed" in config.parts:
        config.arrivals_of_lender(config.lenders - 1)
    world = launch.join_world(config.ranks)
    from experiments.rose_cells import measure

    measured = measure(config, world)
    if world.rank:
        return None
    facts = {**({"tokens_equal": measured.tokens_equal} if measured.is_compared else {}), **others(config)}
    facts |= {"slo": measured.slo, "harvest": measured.harvest, "a_a": measured.a_a, **measured.facts}
    result = report("rose", config, {"seconds": round(time.monotonic() - start, 1), **facts})
    if config.figure is not None and measured.slo:
        draw(config, measured)
    print(as_table(result), file=sys.stderr)
    return result


def draw(config: RoseConfig, measured: Measured) -> None:
    from experiments.rose_figures import draw_cells

    assert config.figure is not None
    one = profile(config.profile)
    tier = f"paced, {one.device.name}, {one.shape.name}"
    draw_cells(config.figure, measured.slo, measured.limits, measured.harvest, measured.timeline, tier=tier)


def others(config: RoseConfig) -> dict[str, Any]:
    """What other commands measure."""
    folder = Path(__file__).parent
    found: dict[str, Any] = {"endpoint": None}
    if "pool" in config.parts:
        found["pool_overhead"] = launch.result_of([str(folder / "bench" / "page_pool.py")])["pool_overhead"]
    if config.endpoint_model is not None:
        load = launch.result_of([str(folder / "serving_load.py"), str(config.endpoint_model)])
        found["endpoint"] = {"requests": load["requests"], "failed": load["failed"], "vs_vllm": None}
    return found


def as_table(result: dict[str, Any]) -> str:
    head = ("cell", "policy", "TTFT P99", "TPOT P99", "TTFT mean", "TPOT mean", "ok", "harvest")
    rows = [head]
    for cell, policies in result["slo"].items():
        for policy, one in policies.items():
            figures = [f"{one[name]:g}" for name in ("ttft_p99", "tpot_p99", "ttft_mean", "tpot_mean")]
            harvest = result["harvest"][cell].get(policy)
            rows.append((cell, policy, *figures, str(one["ok"]), "" if harvest is None else f"{harvest:g}"))
    return in_columns(rows)


if __name__ == "__main__":
    launch.run(main)
