"""What rollouts of Seer's variants show: ratios, what was moved and preempted, and the paper's figures beside ours."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from engines.rollout.telemetry import busy_share
from engines.sequence import SequenceId
from experiments import seer_paper
from experiments.comparison.results import longer_than_paced
from experiments.comparison.rollouts import Rollout
from experiments.comparison.turns import AGAIN, make_row, median_and_range, short, table
from experiments.seer_baseline import BoundName, Tuned

BOUND: tuple[BoundName, ...] = get_args(BoundName)
STATIC, DIVIDED, CONTEXT, SPECULATION = LADDER = (BOUND[0], "divided", "context", "speculation")
ORACLE, UNGROUPED, FIXED = "oracle", "speculation, ungrouped", "speculation, no adaptation"
BOUND_DRAFTS, UNTUNED = "group static, speculation", "group static, untuned"


@dataclass(frozen=True, kw_only=True)
class Done:
    """Rollouts of one workload."""

    runs: dict[str, list[Rollout]]
    """By variant."""
    tuned: Mapping[BoundName, Tuned]
    lengths: dict[SequenceId, int]
    sim_over_paced: dict[str, float] = field(default_factory=dict)


def describe(name: str, done: Done, *, task: str | None = None) -> dict[str, Any]:
    """Returns the results of one workload. `throughput` and `variants` are ratios of medians to the ladder's first, of
    all whose assignments the median counts; `tail` is the time of the last tenth as a share of the first's. A `task` of
    the paper: its figures stand beside ours."""
    runs = done.runs
    row = make_row(name, {one: [run.seconds for run in some] for one, some in runs.items()})
    print(table([row]), file=sys.stderr, flush=True)
    seconds = {one: statistics.median(run.seconds for run in some) for one, some in runs.items()}
    tails = {one: statistics.median(run.tail_seconds for run in some) for one, some in runs.items()}
    faster = {one: short(seconds[STATIC] / took) for one, took in seconds.items()}
    context_over = {one: short(took / seconds[CONTEXT]) for one, took in seconds.items()}
    found: dict[str, Any] = {
        "tokens_equal": len({run.digest for some in runs.values() for run in some}) == 1,
        "not_exercised": not_exercised(runs),
        "throughput": {one: faster[one] for one in LADDER[1:]},
        "tail": {one: short(tails[one] / tails[STATIC]) for one in LADDER[1:]},
        "tail_share": {one: short(tails[one] / seconds[one]) for one in LADDER},
        "variants": {one: faster[one] for one in runs if one not in LADDER and not one.endswith(AGAIN)},
        "of_oracle": context_over.get(ORACLE),
        "over_bound": {one: context_over[one] for one in BOUND if one in context_over},
        "drafts_over_none": {
            one: short(seconds[CONTEXT] / seconds[one]) for one in (SPECULATION, UNGROUPED, FIXED) if one in seconds
        },
        "baselines": {one: baseline(tuned, runs[one]) for one, tuned in done.tuned.items()},
        "preemptions": {one: statistics.median(run.num_preempted for run in some) for one, some in runs.items()},
        "kv": {one: kv_moved(some[0]) for one, some in runs.items() if not one.endswith(AGAIN)},
        "tokens_per_step": {one: short(some[0].tokens_per_step) for one, some in runs.items()},
        "num_steps": {one: statistics.median(len(run.steps) for run in some) for one, some in runs.items()},
        "busy_share": {one: short(statistics.median(map(busy, some))) for one, some in runs.items()},
        "num_sequences": len(done.lengths),
        "mean_length": short(statistics.fmean(done.lengths.values())),
        "a_a": row["a_a"],
        "row": row,
    }
    if done.sim_over_paced:
        found["sim_over_paced"] = done.sim_over_paced
        found |= longer_than_paced(name, (run for some in runs.values() for run in some))
    if task is not None:
        over_none = found["drafts_over_none"]
        found["paper"] = seer_paper.compare(
            task,
            {
                **dict(zip(seer_paper.TABLE_6, found["throughput"].values(), strict=True)),
                seer_paper.TAIL: found["tail"][CONTEXT],
                seer_paper.OF_ORACLE: found["of_oracle"],
                **dict(zip(seer_paper.FIG_11, map(over_none.get, (SPECULATION, UNGROUPED, FIXED)), strict=True)),
            },
        )
        print(seer_paper.table(found["paper"]), file=sys.stderr, flush=True)
    return found


def not_exercised(runs: Mapping[str, list[Rollout]]) -> list[str]:
    """Returns what variants did not do that sets them apart, so that their equal tokens say nothing."""
    found = []
    for name, some in runs.items():
        bare = name.removesuffix(AGAIN)
        if "speculation" in bare and not any(step.num_accepted for run in some for step in run.steps):
            found.append(f"{name}: no draft token was drawn")
        if bare not in (*BOUND, UNTUNED, BOUND_DRAFTS) and not any(
            m.num_imported for run in some for m in run.kv_moves
        ):
            found.append(f"{name}: no sequence went on after a chunk")
    return found


def baseline(tuned: Tuned, runs: list[Rollout]) -> dict[str, Any]:
    """Returns how a baseline was tuned, and how long its assignments took."""
    simulated, measured = tuned.seconds, [run.seconds for run in runs]
    return {
        **tuned.report,
        "seconds": [short(one) for one in measured],
        "simulated_s": {"assignments": len(simulated), "spread": median_and_range(simulated)} if simulated else None,
    }


def busy(run: Rollout) -> float:
    """Returns the share of the rollout that a replica spends in steps, on average over the replicas."""
    return statistics.fmean(busy_share(run.steps, {step.replica_id for step in run.steps}).values())


def kv_moved(run: Rollout) -> dict[str, float]:
    """Returns how many tokens' KV was stored for each token generated, how many sequences brought their KV along and
    how many had lost it, and the share of what was loaded that was read while others stepped."""
    stored, loaded, fetched, imported, recomputed = (
        sum(getattr(moves, name) for moves in run.kv_moves)
        for name in ("stored_tokens", "loaded_tokens", "fetched_tokens", "num_imported", "num_recomputed")
    )
    return {
        "stored_per_token": short(stored / sum(run.lengths.values())),
        "imported": imported,
        "recomputed": recomputed,
        "hidden": short(fetched / loaded) if loaded else 0.0,
    }


def draw(path: Path, runs: Mapping[str, list[Rollout]], tier: str) -> None:
    from experiments.figures import draw_instances

    tails = {one: runs[one][0].ends[-1] - runs[one][0].tail_seconds for one in LADDER}
    draw_instances(path, {one: runs[one][0].steps for one in LADDER}, tails, tier)
