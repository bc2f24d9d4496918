"""What changing the TP size during a rollout gains (PAT), against every static TP size and against hindsight.

    python experiments/pat.py
    python experiments/pat.py --parts paced --cases a40-8b-2048 --turns 3

Parts: `live`, on two ranks, a model of hidden 2048 at this machine's own speed; `paced`, on eight ranks that rank 0
then starts, steps and switches that take what latency profiles of named GPUs say, with lengths divided by 64. Lengths
are hidden; PAT's controller knows 2,048 lengths of earlier sequences, drawn from the batch's own distribution.
Variants: each static TP size, PAT, PAT without that history, the paper's estimator, hindsight (a plan made from the
true lengths), and the best static TP size with sequences redistributed when hindsight would switch. A variant that
ends in another layout than it began in goes back, which is part of its time. They take turns on batches of several
seeds, and medians count. By default all takes about 20 minutes on two cores. A table goes to stderr, one JSON object to
stdout. docs/pat.md shows and explains a result.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

import engines
from engines.config import ModelConfig, Transport
from engines.constraints import Count
from engines.progress import Bar
from experiments import launch, pat_cases, pat_measuring
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.parts import PartsConfig, run_parts
from experiments.comparison.real import RealWorld
from experiments.comparison.results import longer_than_paced, track
from experiments.comparison.rollouts import Rollout
from experiments.comparison.turns import AGAIN, interleave, make_row, short, table
from experiments.engine_options import EngineOptions
from experiments.pat_cases import BLOCK_SIZE, CASES, Batch, Case, CaseName
from research.pat.deployment import Deployment

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

PAT, NO_HISTORY = "pat", "no history"
FAR_BEHIND = 1.3
"""A static variant that takes so many times as long as the best one is measured once."""
MOST_SEQUENCES = 512
"""Of a replica, in the paced part."""


@dataclass(frozen=True, kw_only=True)
class PatConfig(PartsConfig):
    """Measure rollouts that change their TP size."""

    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(
        one.name for one in CASES if one.name
    )
    """Cases of the paced part."""
    turns: Count = 2
    """Batches of each case and of the live part, drawn by as many seeds, `seed` the first; medians count."""
    hidden: Annotated[int, Meta(ge=256, multiple_of=256, description="a multiple of 256")] = 2048
    """Width of the live part's model, which has 4 layers."""
    transport: Transport = "gloo"
    """Between the ranks of the live part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "paced" in self.parts and self.ranks not in (2, 4, 8):
            raise ValueError(
                f"ranks={self.ranks}: the paced part needs several TP sizes for all of them; give 2, 4 or 8"
            )


def main() -> dict[str, Any] | None:
    return run_parts("pat", PatConfig, live=live, paced=paced_part)


def compare(
    bench: RealWorld,
    name: str,
    batches: Items[Batch],
    deployment: Deployment,
    num_kv_tokens: dict[int, int],
    *,
    with_hindsight: bool,
) -> dict[str, list[Rollout]]:
    """Returns the rollouts of each variant, one per batch, but one in all of static ones that are far behind. The best
    static one of the first batch is first, with its second runs. `num_kv_tokens`: of a replica, by static TP size."""
    sizes = list(deployment.steps)
    statics = {f"static TP{size}": pat_cases.static(deployment.num_ranks, size, num_kv_tokens[size]) for size in sizes}
    vocab_size = ModelConfig.from_pretrained(bench.model).vocab_size
    prompts = random_prompts(len(batches[0].lengths), batches[0].num_prompt_tokens, vocab_size)
    rolls = [partial(bench.roll_out, batch.workload(prompts)) for batch in batches]
    probes = {one: rolls[0](statics[one]) for one in Bar(statics, desc=f"{name}, static", disable=launch.rank() > 0)}
    best = min(probes, key=lambda one: probes[one].seconds)
    size = sizes[list(statics).index(best)]
    informed = [pat_cases.informed(deployment, batch, size) if with_hindsight else {} for batch in batches]
    variants = [
        {
            best: statics[best],
            PAT: pat_cases.adaptive(deployment, batch),
            **(by_lengths if all(informed) else {}),
            NO_HISTORY: pat_cases.adaptive(deployment, batch, with_history=False),
            **({"paper": pat_cases.adaptive(deployment, batch, "paper")} if with_hindsight else {}),
        }
        for batch, by_lengths in zip(batches, informed, strict=True)
    ]
    calls: dict[str, list[Callable[[], Rollout]]] = {
        one: [partial(roll, of_batch[one]) for roll, of_batch in zip(rolls, variants, strict=True)]
        for one in variants[0]
    }
    for one, variant in statics.items():
        if one != best:
            later = rolls[1:] if probes[one].seconds < FAR_BEHIND * probes[best].seconds else []
            calls[one] = [partial(probes.__getitem__, one), *(partial(roll, variant) for roll in later)]
    return interleave(calls, len(batches), name=name, warm_up=False)


def describe(name: str, runs: dict[str, list[Rollout]], facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of one case. Ratios are of the same batch, and the median over the batches."""
    ways_back = {
        one: short(statistics.median(run.way_back_s for run in some))
        for one, some in runs.items()
        if not one.endswith(AGAIN)
    }
    seconds = {one: [run.seconds for run in some] for one, some in runs.items()}
    row = make_row(
        name,
        seconds,
        history=f"{PAT} knows {pat_cases.HISTORY} lengths of the batch's own distribution, {NO_HISTORY!r} none",
        **{f"way back of {one}, in its time": f"{1e3 * took:.4g} ms" for one, took in ways_back.items() if took},
    )
    print(table([row]), file=sys.stderr, flush=True)
    base = next(iter(runs))

    def over(one: str, other: str) -> list[float]:
        return [its / mine for its, mine in zip(seconds[one], seconds[other], strict=False)]

    named = [one for one in runs if one.startswith("static") and not one.endswith(AGAIN)]
    statics = [one for one in named if len(runs[one]) == len(runs[base])]  # those that are far behind were run once
    best = min(statics, key=lambda one: statistics.median(over(one, base)))
    bounds = [min(turn) for turn in zip(seconds[best], seconds.get("hindsight", seconds[best]), strict=True)]
    regret = statistics.median(mine / least - 1 for mine, least in zip(seconds[PAT], bounds, strict=True))
    pat, log = runs[PAT], runs[PAT][0].layout_policy.log
    turns = list(zip_longest(*runs.values()))
    return {
        **facts,
        "tokens_equal": all(len({run.digest for run in turn if run is not None}) == 1 for turn in turns),
        "regret": short(regret),
        "vs_best_static": short(statistics.median(over(best, PAT))),
        "vs_best_static_by_batch": [short(one) for one in over(best, PAT)],
        "no_history_vs_best_static": short(statistics.median(over(best, NO_HISTORY))),
        "vs_rebalanced": short(statistics.median(over("rebalanced" if "rebalanced" in runs else best, PAT))),
        "switches": [[one.num_unfinished, one.tp_size, one.chosen] for one in log if one.chosen != one.tp_size],
        "switch_share": statistics.median(sum(length for _, length in run.switches) / run.seconds for run in pat),
        "way_back_s": ways_back,
        "a_a": row["a_a"],
        "row": row,
        "decisions": [asdict(one) for one in log],
    }


# -- live


def live(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    layouts = pat_measuring.nested_layouts(world.size)
    groups = engines.GroupCache(world, layouts, transport=config.transport)
    batches = [pat_cases.live_batch(config.seed + turn, config.shrink) for turn in range(config.turns)]
    batch = batches[0]
    count, longest = len(batch.lengths), batch.max_model_len
    shape = pat_cases.live_model(config.hidden)
    with checkpoint(shape, max_positions=longest, dtype="float32", world=world) as model:
        of_rank = count * (longest + BLOCK_SIZE)
        options = EngineOptions(
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=count,
            max_model_len=longest,
            kv_cache_bytes=of_rank * ModelConfig.from_pretrained(model).kv_bytes_per_token(4),
        )
        asked = pat_measuring.PatProfileConfig(
            model=model,
            output=Path(model, "profile.json"),  # not written
            batches=(1, 2, -(-count // 4)),
            contexts=(batch.num_prompt_tokens, batch.longest // 4),
            turns=1,
            prefill_tokens=0,
            switch_tokens=of_rank,
            engine=options,
        )
        profile, sizes = pat_measuring.measure(asked, model, groups), ModelConfig.from_pretrained(model)
        transport = pat_measuring.transport_of(groups)
        deployment = pat_measuring.deployment_with(profile, sizes, options, world.size, transport)
        switch_seconds = deployment.switch_seconds
        deployment = replace(deployment, way_back_seconds=lambda end, start: switch_seconds(end, start, 0.0))
        bench = RealWorld(model=model, groups=groups, pace=None, options=asdict(options))
        num_kv_tokens = {size: size * of_rank for size in deployment.steps}
        runs = compare(bench, "live", batches, deployment, num_kv_tokens, with_hindsight=False)
    groups.close()
    if world.rank:
        return {}
    errors = [
        abs(float(deployment.steps[step.tp_size].seconds(step.num_running, step.num_context_tokens)) / step.seconds - 1)
        for some in runs.values()
        for run in some
        for step in run.steps
        if step.num_tokens == step.num_running
    ]
    switch_s: dict[str, dict[int, float]] = {}
    for before, after, num_tokens, _ in profile.switches:
        took = [row[3] for row in profile.switches if row[:3] == (before, after, num_tokens)]
        switch_s.setdefault(f"TP{before} -> TP{after}", {})[num_tokens] = short(statistics.median(took))
    facts = {"workload": pat_cases.NOT_THE_PAPERS, "transport": config.transport, "switch_s_by_tokens": switch_s}
    found = {"tier": "live", **describe("live", runs, facts)}
    show(config, "live", f"live: {pat_cases.NOT_THE_PAPERS}", runs, "live")
    return {"live": found, "predictor_error": short(statistics.fmean(errors))}


# -- paced


def paced_part(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    """Results of all cases: for each name, those of each case."""
    import torch

    torch.set_num_threads(1)
    groups = engines.GroupCache(world, pat_measuring.nested_layouts(world.size))
    found: dict[str, dict[str, Any]] = {}
    with checkpoint(pat_cases.PACED_MODEL, max_positions=512, dtype="float64", world=world) as model:
        for case in (one for one in CASES if one.name in config.cases):
            start = time.monotonic()
            runs, facts = _case(config, case, model, groups)
            if world.rank == 0:
                found[case.name] = describe(case.title, runs, facts) | {"seconds": round(time.monotonic() - start, 1)}
                show(config, case.name, case.title, runs, "paced")
    groups.close()
    names = next(iter(found.values()), {})
    table = {name: {case: one[name] for case, one in found.items()} for name in names}
    return {"paced": {"tier": "paced", **table, "tokens_equal": all(table.get("tokens_equal", {}).values())}}


def _case(
    config: PatConfig, case: Case, model: str, groups: engines.GroupCache
) -> tuple[dict[str, list[Rollout]], dict[str, Any]]:
    batches = [case.draw(config.seed + turn, config.shrink) for turn in range(config.turns)]
    batch, pace, num_ranks = batches[0], case.pace(config.scale), groups.world.size
    options = {"dtype": "float64", "block_size": BLOCK_SIZE, "max_num_seqs": MOST_SEQUENCES}
    bench = RealWorld(model=model, groups=groups, pace=pace, options=options | {"max_model_len": batch.max_model_len})
    deployment = case.deployment(pace, num_ranks, MOST_SEQUENCES, batch.max_model_len)
    sizes = case.num_kv_tokens(num_ranks)
    runs = compare(bench, case.title, batches, deployment, sizes, with_hindsight=True)
    late = longer_than_paced(case.title, (run for some in runs.values() for run in some))
    without = [size for size in pace.profiles if size not in sizes and num_ranks % size == 0]
    return runs, {"workload": case.workload, "scale": pace.scale, "no_room": without, **late}


def show(config: PatConfig, name: str, title: str, runs: dict[str, list[Rollout]], tier: str) -> None:
    if config.wandb != "off":
        track(f"pat-{name}", runs)
    if config.figure is not None:
        from experiments.pat_figures import draw_switches

        chosen = {one: runs[one][0].steps for one in (PAT, next(iter(runs)))}
        switches = [start for start, _ in runs[PAT][0].switches]
        draw_switches(config.figure / f"{name}.png", title, chosen, switches, tier)


if __name__ == "__main__":
    launch.run(main)
