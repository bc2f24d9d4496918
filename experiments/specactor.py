"""What drafting on ranks of their own gains (SpecActor §4.1), and where it loses, against drafting between passes.

    torchrun --standalone --nproc-per-node 2 experiments/specactor.py
    python experiments/specactor.py --parts paced --cases even --turns 1

Parts: `paced`, on eight ranks that rank 0 starts, each of which stands for a 32B replica on H100. Guesses are right
with a stated probability. Tables go to stderr, one JSON object to stdout. docs/specactor.md shows and explains a
result.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

import engines
from engines.constraints import Count
from engines.decoding import from_msgpack
from engines.sequence import Finished, SequenceId
from engines.speculation.policy import DraftPolicy
from experiments import launch
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.parts import PartsConfig, run_parts
from experiments.comparison.real import RealWorld
from experiments.comparison.results import longer_than_paced, track
from experiments.comparison.rollouts import Rollout, Workload
from experiments.comparison.turns import AGAIN, interleave, make_row, short, table
from experiments.specactor_cases import CASES, NUM_PROMPT_TOKENS, PACED_MODEL, Case, CaseName, Known, Setting
from experiments.specactor_live import LIVE_FIELDS, live_part
from experiments.specactor_planning import (
    Planning,
    Seen,
    plan_ms,
    renewal_error,
    seen_in,
    setting_of,
    tokens_per_second,
)

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup


@dataclass(frozen=True, kw_only=True)
class SpecActorConfig(PartsConfig):
    """Measure drafting on ranks of their own."""

    models: Path = Path("runs/models")
    """Folder of the live part's models. What is missing is made."""
    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(
        one.name for one in CASES
    )
    """Cases of the paced part."""
    processes: Count | None = None
    """Simulations at a time while the coupled settings are tried; by default one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: one drafts, and one verifies; give 2 or more")
        if "live" in self.parts and self.live_ranks != 2:
            raise ValueError(f"live_ranks={self.live_ranks}: one drafts, and one verifies; give 2")


def main() -> dict[str, Any] | None:
    return run_parts("specactor", SpecActorConfig, live=live, paced=paced_part, summary=summary)


def live(config: SpecActorConfig, world: TorchGroup) -> dict[str, Any]:
    if world.size != 2:
        raise ValueError(f"nproc-per-node={world.size}: one rank drafts, and one verifies; give 2")
    return {"live": live_part(config.models, config.turns, world)}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The result's first fields, of all cases."""
    paced, of_live = measured.get("paced", {}), measured.get("live", {})
    cases: dict[str, dict[str, Any]] = paced.get("cases", {})
    found: dict[str, Any] = {}
    if cases:
        found = {
            "tokens_equal": all(one["tokens_equal"] for one in [*cases.values(), paced["steady"]]),
            "plan_equal": all(one["plan_equal"] for one in cases.values()),
            "waste_max": max(one["waste_max"] for one in [*cases.values(), paced["steady"]]),
            "renewal_error": short(renewal_error()),
            "plan_ms": short(plan_ms()),
            "cases": {name: one["modes"] for name, one in cases.items()},
            "steps_longer_than_paced": max(one["steps_longer_than_paced"] for one in cases.values()),
            "a_a": {name: one["a_a"] for name, one in cases.items()},
        }
    return found | {name: of_live[name] for name in LIVE_FIELDS if name in of_live}


@dataclass(frozen=True)
class Batch:
    """Sequences of one seed, and the tokens that plain decoding draws."""

    workload: Workload
    known: Known
    digest: str


@dataclass(frozen=True)
class Bench:
    """A case on this job's ranks. All of them call its methods together."""

    case: Case
    world: RealWorld
    scale: float
    counts: list[dict[str, float]] = field(default_factory=list)
    """Of all draft ranks of all rollouts: see `DraftRanks.counts`."""

    @property
    def num_ranks(self) -> int:
        return self.world.groups.world.size

    def draw(self, lengths: list[int], seed: int) -> Batch:
        """Rolls out plainly, at this machine's own speed, to know the tokens."""
        prompts = random_prompts(len(lengths), NUM_PROMPT_TOKENS, PACED_MODEL.vocab, seed=seed)
        workload = self.case.workload(lengths, prompts)
        ended: dict[SequenceId, list[int]] = {}

        def hear(finished: Finished) -> None:
            ended[finished.state.sequence_id] = finished.completion.token_ids

        plain = self.case.variant(Setting(mode="off"), self.num_ranks, Known({}))
        rollout = replace(self.world, pace=None).roll_out(workload, plain, on_finished=hear)
        data = self.world.groups.world.broadcast_bytes(msgspec.msgpack.encode([*ended.items()]))
        return Batch(workload, Known(dict(from_msgpack(data, list[tuple[SequenceId, list[int]]]))), rollout.digest)

    def roll_out(
        self, setting: Setting, batch: Batch, policy: DraftPolicy | None = None, dearer: float = 1.0
    ) -> Rollout:
        """`policy` adapts windows; `dearer`: see `Case.pace`."""
        world = replace(self.world, pace=self.case.pace(setting.method, self.scale, dearer))

        def count(llm: engines.LLM) -> None:
            counts = launch.gather(self.world.groups.world, llm.draft_counts)
            self.counts.extend(one for one in counts if one and math.isfinite(one["most_over"]))

        variant = self.case.variant(setting, self.num_ranks, batch.known, policy)
        return world.roll_out(batch.workload, variant, on_end=count)


def paced_part(config: SpecActorConfig, world: TorchGroup) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    groups = engines.GroupCache(world, [])
    found: dict[str, Any] = {}
    cases = [one for one in CASES if one.name in config.cases]
    longest = NUM_PROMPT_TOKENS + max(one.longest for one in cases)
    with checkpoint(PACED_MODEL, max_positions=longest, dtype="float64", world=world) as model:
        benches = [
            Bench(case, RealWorld(model=model, groups=groups, pace=None, options=case.options()), config.scale)
            for case in cases
        ]
        for bench in benches:
            start = time.monotonic()
            measured = measure(config, bench)
            found[bench.case.name] = measured | {"seconds": short(time.monotonic() - start)}
        steady_states = steady(replace(benches[0], counts=[]), config)
    groups.close()
    return {"paced": {"tier": "paced", "cases": found, "steady": steady_states}}


def measure(config: SpecActorConfig, bench: Bench) -> dict[str, Any]:
    """Returns what `describe` does; on other ranks than the first, nothing."""
    case, world, shrink = bench.case, bench.world.groups.world, config.shrink
    seeds = range(config.seed, config.seed + config.turns)
    batches = [bench.draw(case.lengths(bench.num_ranks, seed, shrink), seed) for seed in seeds]
    workload = batches[0].workload
    planning = Planning(case, bench.num_ranks, len(workload.prompts), config.scale)
    ranked = launch.on_rank_0(
        world, lambda: [asdict(one) for one in planning.best_coupled(workload, 3, config.processes)]
    )
    probes = {(setting := Setting(**one)): bench.roll_out(setting, batches[0]) for one in ranked}
    best = min(probes, key=lambda one: probes[one].seconds)
    seen = seen_in(probes)
    plan = planning.plan(seen)
    settings = {
        "coupled": best,
        **{mode: planning.best(mode, seen) for mode in ("filled", "strict", "naive")},
        "planner": setting_of(plan),
    }
    settings["reconfigured"] = settings["filled" if settings["planner"].num_drafters == 0 else "planner"]
    decoupled = plan if settings["planner"].num_drafters else planning.plan_of(settings["filled"], seen)
    policies = {"reconfigured": planning.reconfigured(decoupled, seen)}
    calls = {
        name: [partial(bench.roll_out, setting, batch, policies.get(name)) for batch in batches]
        for name, setting in settings.items()
        if name != "planner" or setting not in (best, settings["filled"])
    }
    for name in ("strict", "naive"):
        calls[name] = calls[name][:1]
    runs = interleave(calls, config.turns, name=case.name, warm_up=False)
    if world.rank:
        return {}
    if "planner" not in runs:  # it is another mode's setting
        runs["planner"] = runs["coupled" if settings["planner"] == best else "filled"]
    if config.wandb != "off":
        track(f"specactor-{case.name}", runs)
    simulated = planning.plan(seen_in({one: planning.simulate(one, workload) for one in probes}))
    if config.figure is not None:
        from experiments.specactor_figures import draw_gains, draw_roles  # matplotlib takes half a second

        draw_gains(config.figure / f"specactor_{case.name}_gains.png", planning, case.chances[0], seen.context)
        draw_roles(config.figure / f"specactor_{case.name}.png", case, runs, settings, bench.num_ranks)
    return describe(case, batches, runs, bench.counts) | {
        "plan_equal": plan == simulated,
        "settings": {name: f"{one.name}, {one.num_drafters} draft" for name, one in settings.items()},
        "coupled_probed_s": {one.name: short(run.seconds) for one, run in probes.items()},
        "acceptance": {method: short(p) for method, p in seen.acceptance.items()},
        "plan": asdict(plan),
    }


def describe(
    case: Case, batches: list[Batch], runs: dict[str, list[Rollout]], counts: list[dict[str, float]]
) -> dict[str, Any]:
    """Returns the results of a case."""
    row = make_row(case.name, {name: [one.seconds for one in some] for name, some in runs.items()})
    print(table([row]), file=sys.stderr, flush=True)
    equal = all(one.digest == batch.digest for some in runs.values() for one, batch in zip(some, batches, strict=False))
    base = runs["coupled"]

    def over(name: str, attribute: str) -> float:
        """The mode's median over coupled's, of the same batches."""
        pairs = [*zip(runs[name], base, strict=False)]
        ours, its = zip(*((getattr(one, attribute), getattr(other, attribute)) for one, other in pairs), strict=True)
        return statistics.median(ours) / statistics.median(its)

    def half(one: Rollout) -> float:
        """Seconds until half of the sequences have ended, while replicas are crowded."""
        return one.ends[len(one.ends) // 2] - min(step.start for step in one.steps)

    return {
        "tokens_equal": equal,
        "modes": {
            name: {"speedup": short(1 / over(name, "seconds")), "tail": short(over(name, "tail_seconds"))}
            for name in runs
            if not name.endswith(AGAIN)
        },
        "first_half": {
            name: short(statistics.median(half(one) for one in base) / statistics.median(half(one) for one in some))
            for name, some in runs.items()
            if not name.endswith(AGAIN)
        },
        "waste_max": max((one["most_over"] for one in counts), default=0),
        "a_a": row["a_a"],
        "row": row,
        **longer_than_paced(case.name, (one for some in runs.values() for one in some)),
    }


def steady(bench: Bench, config: SpecActorConfig) -> dict[str, Any]:
    """Equally long sequences, of which none ends for a while: tokens per second of one, over what is expected."""
    case, num_ranks, world = bench.case, bench.num_ranks, bench.world.groups.world
    per_rank = max(2, case.per_rank // config.shrink)
    shared = per_rank * (num_ranks - 1)
    batches = {length: bench.draw([length] * shared, config.seed) for length in (96, 160, 240)}
    plain_batch = bench.draw([96] * (per_rank * num_ranks), config.seed)
    planning = Planning(case, num_ranks, shared, config.scale)
    seen = Seen({"0.5B": case.chances[0]}, 2 * case.interval)
    longest = max(batches)
    filled, costs = planning.best("filled", seen, 1), planning.costs(NUM_PROMPT_TOKENS + longest // 2)
    runs, found = dict[str, tuple[Rollout, Batch]](), dict[str, Any]()

    def rate(name: str, setting: Setting, batch: Batch, chance: float | None = None, **options: Any) -> float:
        chances = case.chances if chance is None else (chance, chance)
        run = replace(bench, case=replace(case, chances=chances)).roll_out(setting, batch, **options)
        runs[name] = run, batch
        return short(tokens_per_second(run.steps) / len(batch.workload.prompts))

    for window in (4, 8):
        strict = Setting(mode="strict", window=window, num_drafters=1)
        drafting_s = window * costs.draft("0.5B", shared, case.tp_size)
        best = window / max(drafting_s, costs.verifiers[case.tp_size](per_rank, window))
        found[f"oracle, w={window}"] = short(rate(f"oracle {window}", strict, batches[longest], 1.0) / best)
    plan = planning.plan_of(filled, seen)
    plain = rate("plain", Setting(mode="off"), plain_batch)
    policy = planning.reconfigured(plan, seen)
    found["always wrong, reconfigured"] = short(rate("wrong", filled, batches[96], 0.0, policy=policy) / plain)
    found["always wrong"] = short(rate("wrong, fixed", filled, batches[96], 0.0) / plain)
    found["drafter of twice the price"] = short(
        rate("dearer", filled, batches[160], dearer=2.0) / rate("filled", filled, batches[160])
    )
    windows = planning.strict_windows(0.7, 2 * case.interval)
    rates = {
        name: rate(name, Setting(mode="strict", window=window, num_drafters=1), batches[160], 0.7)
        for name, window in windows.items()
    }
    found["printed tau's window"] = short(rates["printed"] / rates["renewal"])
    late = longer_than_paced("steady", (run for run, _ in runs.values())) if world.rank == 0 else {}
    return {
        "tokens_equal": all(run.digest == batch.digest for run, batch in runs.values()),
        "rates": found,
        "windows": windows,
        "waste_max": max((one["most_over"] for one in bench.counts), default=0),
        **late,
    }


if __name__ == "__main__":
    launch.run(main)
