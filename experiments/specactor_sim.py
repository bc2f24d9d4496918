"""SpecActor's ablation without best-of-N (Fig. 13) on simulated GPUs. Tier: sim.

    python experiments/specactor_sim.py --output specactor_sim.json

Qwen2.5-32B on 256 H100, four of them a worker, with the sequences of the paper's two traces, and Qwen2.5-0.5B as
drafter: plain decoding (veRL); coupled drafting; drafters of their own that wait for the verifier (naive); that run
ahead (decoupled); with Algorithms 1 and 2 as printed (reconfigured); whose verifier never waits (filled); and what our
planner chooses. Each worker has as many sequences as in the paper. Only a part of the workers is simulated, since they
do not depend on each other. What the paper does not print is assumed: the constants below. Prints tables, and one JSON
object, in which `paper` has its figures beside ours, and `planner` what would be chosen for other drafters.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from engines.constraints import Count
from engines.coordination.policies import Static
from engines.parallel.layout import Layout, ReplicaSpec
from engines.sequence import SequenceKey
from engines.speculation.drafter import DraftPass
from experiments import launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.simulated import SimulatedWorld
from experiments.comparison.turns import in_columns, short
from experiments.processes import call_each
from research.simulator.cluster import Overheads
from research.simulator.datasheets import H100, QWEN_0_5B, QWEN_32B
from research.simulator.pace import ProfilePace
from research.simulator.stated import StatedDrafter, simulated_token
from research.specactor import plan as planner
from research.specactor.profile import Costs, Curve, Pieces, verifier_of
from research.specactor.reconfigure import Reconfiguration
from research.workloads.lengths import LogNormalLengths

CaseName = Literal["DAPO-32B-20K", "GRPO-32B-20K"]
PER_WORKER: dict[CaseName, int] = {"DAPO-32B-20K": 256, "GRPO-32B-20K": 128}
NUM_GPUS, TP_SIZE, PROMPT, CAP, MEDIAN, SIGMA = 256, 4, 256, 20_000, 3000, 0.884
WINDOW = 3
"""Of what is not planned, as in the paper's Fig. 9."""
CHANCES = (0.487, 0.723)
"""A guess of a sequence is right with a probability of its own between these: the paper's range of SpecActor's
acceptance (§5.2), the only one that it prints."""
MESSAGE_S = 0.5e-3
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 512)
METHOD = "own"
Rung = Literal["plain", "coupled", "naive", "decoupled", "reconfigured", "filled", "ours"]
RUNGS: tuple[Rung, ...] = get_args(Rung)
PAPER: dict[tuple[Rung, Rung], float] = {
    ("coupled", "plain"): 1 / (1 - 0.026),
    ("naive", "plain"): 1 / 1.334,
    ("decoupled", "coupled"): 1.3,
    ("reconfigured", "decoupled"): 1.2,
}
"""Speed of one over the other, of DAPO. Bands: each is on the paper's side of 1."""
DEARER, ACCEPTANCES = (1, 2, 4, 8), (0.5, 0.605, 0.7, 0.8, 0.9, 0.95)
"""What the planner is asked about, too: D times as much, and other acceptances."""


@dataclass(frozen=True, kw_only=True)
class SpecActorSimConfig(ResultOptions):
    """Simulate SpecActor's ablation."""

    cases: Annotated[tuple[CaseName, ...], Meta(min_length=1, description="one or more cases")] = tuple(PER_WORKER)
    shrink: Count = 64
    """Simulate one in this many workers, each with all of its sequences."""
    thin: Count = 1
    """Divides the sequences of a worker, for a first look: results are others then."""
    seed: Count = 1
    """Of the lengths, and of how often guesses are right."""
    processes: Count | None = None
    """Rollouts that are simulated at the same time; by default one per core."""
    figure: Path | None = None
    """Draw the paper's Fig. 13 to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.thin > (fewest := min(PER_WORKER[case] for case in self.cases)):
            raise ValueError(f"thin={self.thin}: a worker has {fewest} sequences; give at most as many")


@dataclass(frozen=True)
class Chances:
    """An `Acceptance`: by sequence."""

    values: tuple[float, ...]

    def __call__(self, key: SequenceKey, num_generated: int) -> float:
        return self.values[key.prompt_uid]


@dataclass(frozen=True)
class Setting:
    """How a worker decodes, and how many GPUs draft for it."""

    plan: planner.Plan
    mode: Literal["off", "coupled", "naive", "filled", "strict"]
    algorithm_2: Literal["no", "printed", "ours"] = "no"

    @property
    def num_workers(self) -> int:
        return self.plan.placement.num_verifiers


@dataclass(frozen=True)
class Traced:
    """A trace of the paper, and what is known of it before the rollout."""

    case: CaseName
    seed: int
    thin: int = 1

    @cached_property
    def pace(self) -> ProfilePace:
        return ProfilePace(device=H100, shape=QWEN_32B, draft_shapes={METHOD: QWEN_0_5B})

    @property
    def num_sequences(self) -> int:
        return PER_WORKER[self.case] // self.thin * NUM_GPUS // TP_SIZE

    @cached_property
    def lengths(self) -> list[int]:
        return LogNormalLengths(median=MEDIAN, sigma=SIGMA, cap=CAP).draw(self.num_sequences, self.seed)

    @cached_property
    def costs(self) -> Costs:
        """D and V with the context that a sequence has on average while it is generated."""
        context = PROMPT + sum(one * one for one in self.lengths) // (2 * sum(self.lengths))
        worker, alone = (ReplicaSpec(id=0, ranks=(*range(size),)) for size in (TP_SIZE, 1))
        passes = ((rows, [DraftPass(rows, rows * context)]) for rows in BATCHES)
        drafts = Pieces.fit((rows, self.pace.draft(alone, METHOD, some)) for rows, some in passes)
        verify = verifier_of(self.pace, worker, batches=BATCHES, max_rows=planner.MAX_WINDOW + 1, context=context)
        return Costs(drafts={METHOD: drafts}, verifiers={TP_SIZE: verify}, delay_s=MESSAGE_S)

    def settings(self) -> dict[Rung, Setting]:
        """A drafter of one GPU for each worker is the paper's smallest, and the planner's way without Algorithm 1."""
        rollout = planner.Rollout(num_sequences=self.num_sequences, num_gpus=NUM_GPUS)
        p = sum(CHANCES) / 2
        plain, apart = (self._plan(draft_gpus) for draft_gpus in (0, 1))
        printed = planner.printed_plan(self.costs, rollout, METHOD, p)
        ours = planner.make_plan(self.costs, rollout, {METHOD: p}, ("filled", "strict"))
        return {
            "plain": Setting(plain, "off"),
            "coupled": Setting(plain, "coupled"),
            "naive": Setting(apart, "naive"),
            "decoupled": Setting(apart, "strict"),
            "reconfigured": Setting(printed, "strict", "printed"),
            "filled": Setting(apart, "filled"),
            "ours": Setting(ours, ours.mode, "ours"),
        }

    def planned(self) -> list[dict[str, Any]]:
        """What the planner chooses where drafting is dearer, or guesses are right more often."""
        rollout, found = planner.Rollout(num_sequences=self.num_sequences, num_gpus=NUM_GPUS), []
        drafts = self.costs.drafts[METHOD]
        for dearer, p in itertools.product(DEARER, ACCEPTANCES):
            costs = replace(self.costs, drafts={METHOD: partial(_dearer, drafts, dearer)})
            best = planner.make_plan(costs, rollout, {METHOD: p}, ("filled", "strict"))
            coupled = planner.make_plan(costs, rollout, {METHOD: p}, ())
            over = best.tokens_per_second / coupled.tokens_per_second
            found.append({"dearer": dearer, "acceptance": p, "mode": best.mode, "over_coupled": short(over)})
        return found

    def _plan(self, draft_gpus: int) -> planner.Plan:
        """Returns the placement with so many drafters for each worker, and the paper's window."""
        count, leftover = divmod(NUM_GPUS, TP_SIZE + draft_gpus)
        return planner.Plan(
            placement=planner.Placement(count if draft_gpus else 0, draft_gpus, count, TP_SIZE),
            batch=math.ceil(self.num_sequences / count),
            leftover_gpus=leftover,
            mode="strict" if draft_gpus else "coupled",
            method=METHOD,
            window=WINDOW,
            tokens_per_second=0.0,
        )

    def roll_out(self, setting: Setting, shrink: int) -> Rollout:
        """Simulates one in `shrink` workers, with the first sequences."""
        plan, placement = setting.plan, setting.plan.placement
        num_workers = max(1, round(placement.num_verifiers / shrink))
        lengths = self.lengths[: num_workers * self.num_sequences // placement.num_verifiers]
        drawn = Random(self.seed)
        chances = Chances(tuple(drawn.uniform(*CHANCES) for _ in lengths))
        options: dict[str, Any] = {}
        if setting.mode != "off":
            own = partial(StatedDrafter, simulated_token, chances, seed=self.seed)
            options = {"drafter": "own", "own_drafter": own, "max_draft_tokens": plan.window, "draft_lengths": "fixed"}
        if placement.num_drafters:
            options["draft_mode"] = setting.mode
        if setting.algorithm_2 != "no" and setting.mode != "off":
            is_printed = setting.algorithm_2 == "printed"
            options |= {
                "draft_lengths": "adaptive",
                "max_draft_tokens": planner.MAX_WINDOW,
                "draft_policy": lambda _: Reconfiguration(self.costs, plan, printed=is_printed),
            }
        world = SimulatedWorld(
            pace=self.pace,
            options={
                "block_size": 256,
                "max_num_seqs": 1024,
                "max_num_batched_tokens": 8192,
                "max_model_len": PROMPT + CAP,
            },
            num_kv_tokens=self.pace.num_kv_tokens(PROMPT + CAP),
            cluster={"overheads": Overheads(message_s=MESSAGE_S)},
        )
        workload = Workload.forced([[one] for one in lengths], num_prompt_tokens=PROMPT, most=CAP)
        layout = layout_of(num_workers, placement.draft_gpus if placement.num_drafters else 0)
        return world.roll_out(workload, Variant(layout=layout, schedule=Static, options=options))


def _dearer(draft_s: Curve, factor: float, batch: float) -> float:
    return factor * draft_s(batch)


def layout_of(num_workers: int, drafters_each: int) -> Layout:
    """Returns workers, then drafters of one GPU, of which each worker has as many."""
    first = num_workers * TP_SIZE
    workers = [ReplicaSpec(id=one, ranks=(*range(one, one + TP_SIZE),)) for one in range(0, first, TP_SIZE)]
    last = first + num_workers * drafters_each
    drafters = [ReplicaSpec(id=one, ranks=(one,), role="draft") for one in range(first, last)]
    return Layout(epoch=0, replicas=(*workers, *drafters))


def simulate(config: SpecActorSimConfig, run: tuple[CaseName, Rung]) -> dict[str, Any]:
    """Returns what one rollout did."""
    case, rung = run
    start = time.perf_counter()
    traced = Traced(case, config.seed, config.thin)
    setting = traced.settings()[rung]
    done = traced.roll_out(setting, config.shrink)
    steps, plan = done.steps, setting.plan
    busy = sum(step.seconds for step in steps)
    num_workers = len({step.replica_id for step in steps})
    drafted = sum(step.num_drafted for step in steps)
    verify = traced.costs.verifiers[TP_SIZE]
    return {
        "seconds": done.seconds,
        "tail_seconds": done.tail_seconds,
        "tokens_per_step": done.tokens_per_step,
        "accepted": sum(step.num_accepted for step in steps) / drafted if drafted else 0.0,
        "rows_per_sequence": 1 + drafted / sum(step.num_running for step in steps),
        "busy": busy / num_workers / done.seconds,
        "num_preempted": done.num_preempted,
        "simulated_workers": num_workers,
        "setting": {"mode": setting.mode, "algorithm_2": setting.algorithm_2, **asdict(plan)},
        "plain_pass_ms": 1e3 * verify(plan.batch, 1),
        "verify_ms": 1e3 * verify(plan.batch, plan.window + 1),
        "draft_ms": 1e3 * traced.costs.draft(METHOD, plan.batch, max(1, plan.placement.draft_gpus or TP_SIZE)),
        "simulated_in": time.perf_counter() - start,
    }


def main() -> dict[str, Any]:
    config = launch.options(SpecActorSimConfig)
    keys = [(case, rung) for case in config.cases for rung in RUNGS]
    done = dict(
        zip(keys, call_each(partial(simulate, config), keys, processes=config.processes, unit="rollout"), strict=True)
    )
    rows = [describe(case, {rung: done[case, rung] for rung in RUNGS}) for case in config.cases]
    for row in rows:
        row["planner"] = Traced(row["case"], config.seed, config.thin).planned()
    _print_table(rows)
    if config.figure is not None:
        from experiments.figures import Bars, draw_tasks

        bars: dict[str, Bars] = {
            rung: {row["case"]: (row["rungs"][rung]["seconds"],) for row in rows} for rung in RUNGS
        }
        draw_tasks(config.figure, "SpecActor without best-of-N", [("Fig. 13: rollout", "seconds", bars)], "sim")
    return report("specactor_sim", config, {"tier": "sim", "rows": rows}, hidden=["processes"])


def describe(case: CaseName, rungs: Mapping[Rung, dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the result, with the speed of each rung over plain decoding, and over those of the paper."""
    base = rungs["plain"]["seconds"]
    shown = {
        rung: {"speed": short(base / one["seconds"])}
        | {name: short(value) if isinstance(value, float) else value for name, value in one.items()}
        for rung, one in rungs.items()
    }
    paper = []
    for (rung, other), theirs in PAPER.items():
        ours = rungs[other]["seconds"] / rungs[rung]["seconds"]
        inside = (ours > 1) == (theirs > 1)
        paper.append({"name": f"{rung} over {other}", "paper": short(theirs), "ours": short(ours), "inside": inside})
    return {"case": case, "rungs": shown, "paper": paper}


def _print_table(rows: list[dict[str, Any]]) -> None:
    keys = ("speed", "seconds", "tail_seconds", "tokens_per_step", "accepted", "rows_per_sequence", "busy")
    lines = [["case", "rung", *keys, "draft GPUs", "batch", "window"]]
    for row in rows:
        for rung, one in row["rungs"].items():
            plan = one["setting"]
            placed = [plan["placement"]["draft_gpus"], plan["batch"], plan["window"]]
            lines.append([row["case"], rung, *(f"{one[key]:g}" for key in keys), *map(str, placed)])
    print(in_columns(lines), file=sys.stderr)
    for row in rows:
        for one in row["paper"]:
            print(f"{row['case']}, {one['name']}: {one['ours']:g}, paper {one['paper']:g}", file=sys.stderr)


if __name__ == "__main__":
    launch.run(main)
