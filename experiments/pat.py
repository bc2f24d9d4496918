"""What changing the TP size during a rollout gains (PAT), against every static TP size and against hindsight.

    torchrun --standalone --nproc-per-node 2 experiments/pat.py
    python experiments/pat.py --parts paced --cases a40-8b-2048 --turns 3

Parts: `live`, on two ranks, a model of hidden 2048 at this machine's own speed; `paced`, on eight ranks that rank 0
then starts, steps and switches that take what latency profiles of named GPUs say, with lengths divided by 64. Lengths
are hidden; the controller knows lengths of earlier sequences. Variants: each static TP size, PAT, hindsight (a plan
made from the true lengths), and the best static TP size with sequences redistributed when hindsight would switch;
unscored: the paper's estimator, and PAT without history. They take turns, and medians count. A table goes to stderr,
one JSON object to stdout. docs/pat.md shows and explains a result.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from tqdm import tqdm

from engines.config import ModelConfig
from engines.constraints import Count
from engines.parallel.collectives import TorchGroup
from engines.parallel.groups import GroupCache, Transport
from experiments import launch, paced, pat_cases, pat_profile
from experiments.bench import harness
from experiments.bench.models import checkpoint, random_prompts
from experiments.engine_options import EngineOptions
from experiments.paced import Bench, Rollout, Variant
from experiments.pat_cases import BLOCK_SIZE, CASES, Batch, Case, CaseName
from research.pat.lookahead import Deployment

PAT = "pat"
FAR_BEHIND = 1.3
"""A static variant that takes so many times as long as the best one is measured once."""
MOST_SEQUENCES = 512
"""Of a replica, in the paced part."""


@dataclass(frozen=True, kw_only=True)
class PatConfig(paced.PacedConfig):
    """Measure rollouts that change their TP size."""

    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(
        one.name for one in CASES if one.name
    )
    """Cases of the paced part."""
    turns: Count = 3
    """Interleaved measurements of each variant, in the live part and in the first and the last case; medians count."""
    full: bool = False
    """As many turns in all cases; without it the others have one."""
    hidden: Annotated[int, Meta(ge=256, multiple_of=256, description="a multiple of 256")] = 2048
    """Width of the live part's model, which has 4 layers."""
    transport: Transport = "gloo"
    """Between the ranks of the live part."""
    figure: Path | None = None
    """Draw a figure of each case into this folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "paced" in self.parts and self.ranks not in (2, 4, 8):
            raise ValueError(
                f"ranks={self.ranks}: the paced part needs several TP sizes for all of them; give 2, 4 or 8"
            )
        if self.figure is not None and not self.figure.is_dir():
            raise ValueError(f"figure={str(self.figure)!r}: there is no such folder; make it")


def main() -> dict[str, Any] | None:
    return paced.run("pat", PatConfig, live=live, paced=paced_part)


def compare(
    bench: Bench,
    name: str,
    batch: Batch,
    deployment: Deployment,
    num_kv_tokens: dict[int, int],
    turns: int,
    *,
    with_hindsight: bool,
) -> dict[str, list[Rollout]]:
    """Returns the rollouts of each variant: the best static one first, with its second runs. `num_kv_tokens`: of a
    replica, by static TP size."""
    sizes = list(deployment.steps)
    statics = {f"static TP{size}": pat_cases.static(deployment.num_ranks, size, num_kv_tokens[size]) for size in sizes}
    vocab_size = ModelConfig.from_pretrained(bench.model).vocab_size
    prompts = random_prompts(len(batch.lengths), batch.num_prompt_tokens, vocab_size)
    roll = partial(bench.roll_out, batch.workload(prompts))
    probes = {one: roll(statics[one]) for one in tqdm(statics, desc=f"{name}, static", disable=launch.rank() > 0)}
    best = min(probes, key=lambda one: probes[one].seconds)
    near = [one for one, run in probes.items() if run.seconds < FAR_BEHIND * probes[best].seconds and one != best]
    variants = {best: statics[best], PAT: pat_cases.adaptive(deployment, batch)}
    unscored: dict[str, Variant] = {}
    if with_hindsight:
        variants |= pat_cases.informed(deployment, batch, sizes[list(statics).index(best)])
        unscored["paper"] = pat_cases.adaptive(deployment, batch, "paper")
        unscored["no history"] = pat_cases.adaptive(deployment, batch, with_history=False)
    variants |= {one: statics[one] for one in near} | unscored
    calls = {one: partial(roll, variant) for one, variant in variants.items()}
    most_turns = dict.fromkeys(near, turns - 1) | dict.fromkeys(unscored, 1)
    runs = harness.interleave(calls, turns, name=name, warm_up=False, most_turns=most_turns)
    for one in statics:
        if one != best:
            runs.setdefault(one, []).append(probes[one])
    return runs


def describe(name: str, runs: dict[str, list[Rollout]], facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of one case."""
    row = harness.compare(name, {one: [run.seconds for run in some] for one, some in runs.items()})
    print(harness.table([row]), file=sys.stderr, flush=True)
    seconds = {one: statistics.median(run.seconds for run in some) for one, some in runs.items()}
    best = min(seconds[one] for one in runs if one.startswith("static") and not one.endswith(harness.AGAIN))
    pat, log = runs[PAT], runs[PAT][0].layout_policy.log
    return {
        **facts,
        "tokens_equal": len({run.digest for some in runs.values() for run in some}) == 1,
        "regret": harness.short(seconds[PAT] / min(best, seconds.get("hindsight", best)) - 1),
        "vs_best_static": harness.short(best / seconds[PAT]),
        "vs_rebalanced": harness.short(seconds.get("rebalanced", best) / seconds[PAT]),
        "switches": [[one.num_unfinished, one.tp_size, one.chosen] for one in log if one.chosen != one.tp_size],
        "switch_share": statistics.median(sum(length for _, length in run.switches) / run.seconds for run in pat),
        "a_a": row["a_a"],
        "row": row,
        "decisions": [asdict(one) for one in log],
    }


# -- live


def live(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    layouts = pat_profile.nested_layouts(world.size)
    groups = GroupCache(world, layouts, transport=config.transport)
    batch = pat_cases.live_batch(config.seed, config.shrink)
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
        asked = pat_profile.PatProfileConfig(
            model=model,
            output=Path(model, "profile.json"),  # not written
            batches=(1, 2, -(-count // 4)),
            contexts=(batch.num_prompt_tokens, batch.longest // 4),
            turns=1,
            prefill_tokens=0,
            switch_tokens=count * batch.num_prompt_tokens,
            engine=options,
        )
        deployment = pat_profile.deployment_here(pat_profile.measure(asked, model, groups), model, options, groups)
        bench = Bench(model=model, groups=groups, pace=None, options=asdict(options))
        num_kv_tokens = {size: size * of_rank for size in deployment.steps}
        runs = compare(bench, "live", batch, deployment, num_kv_tokens, config.turns, with_hindsight=False)
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
    found = {"tier": "live", **describe("live", runs, {"transport": config.transport})}
    show(config, "live", runs)
    return {"live": found, "predictor_error": harness.short(statistics.fmean(errors))}


# -- paced


def paced_part(config: PatConfig, world: TorchGroup) -> dict[str, Any]:
    """Results of all cases: for each name, those of each case."""
    torch.set_num_threads(1)
    groups = GroupCache(world, pat_profile.nested_layouts(world.size))
    found: dict[str, dict[str, Any]] = {}
    with checkpoint(pat_cases.PACED_MODEL, max_positions=512, dtype="float64", world=world) as model:
        for case in (one for one in CASES if one.name in config.cases):
            turns = config.turns if config.full or case in (CASES[0], CASES[-1]) else 1
            start = time.monotonic()
            runs, facts = _case(config, case, model, groups, turns)
            if world.rank == 0:
                found[case.name] = describe(case.name, runs, facts) | {"seconds": round(time.monotonic() - start, 1)}
                show(config, case.name, runs)
    groups.close()
    names = next(iter(found.values()), {})
    table = {name: {case: one[name] for case, one in found.items()} for name in names}
    return {"paced": {"tier": "paced", **table, "tokens_equal": all(table.get("tokens_equal", {}).values())}}


def _case(
    config: PatConfig, case: Case, model: str, groups: GroupCache, turns: int
) -> tuple[dict[str, list[Rollout]], dict[str, Any]]:
    batch, pace, num_ranks = case.draw(config.seed, config.shrink), case.pace(config.scale), groups.world.size
    options = {"dtype": "float64", "block_size": BLOCK_SIZE, "max_num_seqs": MOST_SEQUENCES}
    bench = Bench(model=model, groups=groups, pace=pace, options=options | {"max_model_len": batch.max_model_len})
    deployment = case.deployment(pace, num_ranks, MOST_SEQUENCES, batch.max_model_len)
    sizes = case.num_kv_tokens(num_ranks)
    runs = compare(bench, case.name, batch, deployment, sizes, turns, with_hindsight=True)
    slow = paced.longer_than_paced(run for some in runs.values() for run in some)
    without = [size for size in case.profiles if size not in sizes and num_ranks % size == 0]
    return runs, {"scale": pace.scale, "no_room": without, "steps_longer_than_paced": slow}


def show(config: PatConfig, name: str, runs: dict[str, list[Rollout]]) -> None:
    if config.wandb != "off":
        paced.track(f"pat-{name}", runs)
    if config.figure is not None:
        from experiments.pat_figures import draw_switches

        chosen = {one: runs[one][0].steps for one in (PAT, next(iter(runs)))}
        draw_switches(config.figure / f"{name}.png", chosen, [start for start, _ in runs[PAT][0].switches])


if __name__ == "__main__":
    launch.run(main)
