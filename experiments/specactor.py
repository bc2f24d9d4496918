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
from engines.decoding import from_msgpack
from engines.sequence import Finished, SequenceId
from experiments import launch
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.parts import PartsConfig, run_parts
from experiments.comparison.real import RealWorld
from experiments.comparison.results import longer_than_paced
from experiments.comparison.rollouts import Rollout, Workload
from experiments.comparison.turns import AGAIN, interleave, make_row, short, table
from experiments.specactor_cases import CASES, NUM_PROMPT_TOKENS, PACED_MODEL, Case, CaseName, Known, Setting
from experiments.specactor_live import live_part
from experiments.specactor_planning import Planning, Seen, setting_of

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: one drafts, and one verifies; give 2 or more")


def main() -> dict[str, Any] | None:
    return run_parts("specactor", SpecActorConfig, live=live, paced=paced_part, summary=summary)


def live(config: SpecActorConfig, world: TorchGroup) -> dict[str, Any]:
    return {"live": live_part(config.models, config.turns, world)}


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The result's first fields, of all cases."""
    cases: dict[str, dict[str, Any]] = measured.get("paced", {}).get("cases", {})
    if not cases:
        return {}
    return {
        "tokens_equal": all(one["tokens_equal"] for one in cases.values()),
        "waste_max": max(one["waste_max"] for one in cases.values()),
        "cases": {name: one["modes"] for name, one in cases.items()},
        "steps_longer_than_paced": max(one["steps_longer_than_paced"] for one in cases.values()),
        "a_a": {name: one["a_a"] for name, one in cases.items()},
    }


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

    def draw(self, seed: int, shrink: int) -> Batch:
        """Rolls out plainly, at this machine's own speed, to know the tokens."""
        lengths = self.case.lengths(self.num_ranks, seed, shrink)
        prompts = random_prompts(len(lengths), NUM_PROMPT_TOKENS, PACED_MODEL.vocab, seed=seed)
        workload = self.case.workload(lengths, prompts)
        ended: dict[SequenceId, list[int]] = {}

        def hear(finished: Finished) -> None:
            ended[finished.state.sequence_id] = finished.completion.token_ids

        plain = self.case.variant(Setting(mode="off"), self.num_ranks, Known({}))
        rollout = replace(self.world, pace=None).roll_out(workload, plain, on_finished=hear)
        data = self.world.groups.world.broadcast_bytes(msgspec.msgpack.encode([*ended.items()]))
        return Batch(workload, Known(dict(from_msgpack(data, list[tuple[SequenceId, list[int]]]))), rollout.digest)

    def roll_out(self, setting: Setting, batch: Batch) -> Rollout:
        world = replace(self.world, pace=self.case.pace(setting.method, self.scale))

        def count(llm: engines.LLM) -> None:
            mine = {} if llm._draft_ranks is None else llm._draft_ranks.counts
            self.counts.extend(one for one in launch.gather(self.world.groups.world, mine) if one)

        variant = self.case.variant(setting, self.num_ranks, batch.known)
        return world.roll_out(batch.workload, variant, on_end=count)


def paced_part(config: SpecActorConfig, world: TorchGroup) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    groups = engines.GroupCache(world, [])
    found: dict[str, Any] = {}
    for case in (one for one in CASES if one.name in config.cases):
        start = time.monotonic()
        longest = NUM_PROMPT_TOKENS + case.longest
        with checkpoint(PACED_MODEL, max_positions=longest, dtype="float64", world=world) as model:
            real = RealWorld(model=model, groups=groups, pace=None, options=case.options())
            measured = measure(config, Bench(case, real, config.scale))
        if world.rank == 0:
            found[case.name] = measured | {"seconds": short(time.monotonic() - start)}
    groups.close()
    return {"paced": {"tier": "paced", "cases": found}}


def measure(config: SpecActorConfig, bench: Bench) -> dict[str, Any]:
    """Returns what `describe` does."""
    case, world = bench.case, bench.world.groups.world
    batches = [bench.draw(config.seed + turn, config.shrink) for turn in range(config.turns)]
    planning = Planning(case, bench.num_ranks, len(batches[0].known.tokens), config.scale)
    probes = {one: bench.roll_out(one, batches[0]) for one in planning.best_coupled(3)}
    best = min(probes, key=lambda one: probes[one].seconds)
    seen = Seen.of({one.method: run.steps for one, run in probes.items() if one.window})
    plan = planning.plan(seen)
    settings = {
        "coupled": best,
        **{mode: planning.best(mode, seen) for mode in ("filled", "strict", "naive")},
        "planner": setting_of(plan),
    }
    calls = {
        name: [partial(bench.roll_out, setting, batch) for batch in batches[: 1 if name == "naive" else None]]
        for name, setting in settings.items()
        if name != "planner" or setting not in (settings["coupled"], settings["filled"])
    }
    runs = interleave(calls, config.turns, name=case.name, warm_up=False)
    if "planner" not in runs:
        runs["planner"] = runs["coupled" if settings["planner"] == best else "filled"]
    if world.rank:
        return {}
    facts = {
        "settings": {name: one.name for name, one in settings.items()},
        "coupled_probed_s": {one.name: short(run.seconds) for one, run in probes.items()},
        "acceptance": {method: short(p) for method, p in seen.acceptance.items()},
        "plan": asdict(plan),
    }
    return describe(case, batches, runs, bench.counts) | facts


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

    return {
        "tokens_equal": equal,
        "modes": {
            name: {"speedup": short(1 / over(name, "seconds")), "tail": short(over(name, "tail_seconds"))}
            for name in runs
            if not name.endswith(AGAIN)
        },
        "waste_max": max((one["most_over"] for one in counts if math.isfinite(one["most_over"])), default=None),
        "a_a": row["a_a"],
        "row": row,
        **longer_than_paced(case.name, (one for some in runs.values() for one in some)),
    }


if __name__ == "__main__":
    launch.run(main)
