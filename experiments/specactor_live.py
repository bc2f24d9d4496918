"""The live part of `specactor.py`: a drafter and a verifier against two replicas that draft for themselves, with real
models at this machine's own speed, and what the formulas predict from passes that were measured here."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import engines
from algos.warmstart_config import ModelSize
from engines.rollout.telemetry import StepRecord
from experiments import launch
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.turns import AGAIN, interleave, short
from experiments.specactor_cases import Setting, layout
from experiments.specactor_planning import accepted_share, setting_of
from experiments.trained import dtype, encode, make_model, prompts, trained
from research.specactor.plan import Rollout as Planned
from research.specactor.plan import make_plan
from research.specactor.profile import Costs, Pieces
from research.specactor.throughput import Pair, coupled, decoupled, drawn, renewal_tau

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

WINDOWS, BATCHES = (2, 4, 6), (2, 4, 8)
"""Batches of each of the two replicas; a verifier alone has both."""
PROFILE_WINDOW = 8
LENGTH, MAX_LEN = 96, 256
METHOD: ModelSize = "draft-2l"
PLAIN = Setting(mode="off", method=METHOD)


@dataclass(frozen=True)
class Bench:
    """Two ranks, which call its methods together."""

    world: RealWorld
    draft_model: str
    prompts: list[list[int]]
    row_seconds: dict[int, float] = field(default_factory=dict)
    """Rows -> seconds of the target's pass, as this engine measures it."""

    def roll_out(self, setting: Setting, batch: int) -> Rollout:
        """`batch`: of each rank, where none drafts."""
        options: dict[str, Any] = {}
        if setting.window:
            options = {"drafter": "model", "draft_model": self.draft_model, "draft_lengths": "fixed"}
            options["max_draft_tokens"] = setting.window
        if setting.num_drafters:
            options["draft_mode"] = setting.mode
        groups = [[LENGTH]] * (2 * batch)
        workload = Workload.forced(groups, num_prompt_tokens=1, most=LENGTH, prompts=self.prompts[: 2 * batch])
        variant = Variant(layout=layout(2, setting.num_drafters), num_kv_tokens=64 * MAX_LEN, options=options)
        return self.world.roll_out(workload, variant, on_end=self._time_rows if setting == PLAIN else lambda _: None)

    def _time_rows(self, llm: engines.LLM) -> None:
        for rows in (2**power for power in range(9)):
            self.row_seconds.setdefault(rows, llm._engine.row_times(rows))


def tokens_per_second(steps: Iterable[StepRecord]) -> float:
    """Of all replicas, while each of them has all of its sequences: behind its first two passes."""
    by_replica = defaultdict[int, list[StepRecord]](list)
    for step in steps:
        by_replica[step.replica_id].append(step)
    return sum(_rate(some)[0] for some in by_replica.values())


def seconds_of_pass(steps: Iterable[StepRecord]) -> float:
    """Of one replica after the other: the median over them, what is between passes included."""
    by_replica = defaultdict[int, list[StepRecord]](list)
    for step in steps:
        by_replica[step.replica_id].append(step)
    return statistics.median(_rate(some)[1] for some in by_replica.values())


def _rate(steps: list[StepRecord]) -> tuple[float, float]:
    """Returns tokens per second of a replica, and seconds per pass."""
    most = max(step.num_running for step in steps)
    full = [step for step in steps if step.num_running == most][2:]
    took = full[-1].start + full[-1].seconds - full[0].start
    return sum(step.num_running + step.num_accepted for step in full) / took, took / len(full)


@dataclass(frozen=True)
class Profile:
    """D and V as measured here."""

    plain_s: Mapping[int, float]
    """Batch -> seconds of a pass without drafts."""
    row_s: Mapping[int, float]
    draft_s: Mapping[int, float]
    """Batch -> seconds of a drafter's pass."""
    acceptance: float

    def verify(self, batch: float, rows: float) -> float:
        counts, seconds = [*self.row_s], [*self.row_s.values()]
        more = np.interp(batch * max(1.0, rows), counts, seconds) - np.interp(batch, counts, seconds)
        return float(np.interp(batch, [*self.plain_s], [*self.plain_s.values()]) + max(0.0, more))

    @property
    def costs(self) -> Costs:
        return Costs(drafts={METHOD: Pieces.fit(self.draft_s.items())}, verifiers={1: self.verify}, delay_s=2e-4)

    def predict(self, setting: Setting, batch: int) -> float:
        """Tokens per second of all sequences."""
        costs, window = self.costs, setting.window
        if setting.num_drafters == 0:
            drafting_s = costs.whole_drafts(METHOD, batch, 1, window)
            return 2 * batch * coupled(self.acceptance, window, drafting_s, self.verify(batch, window + 1))
        pair = Pair(self.draft_s[2 * batch], lambda rows: self.verify(2 * batch, rows), 2 * batch, costs.delay_s)
        return 2 * batch * decoupled(pair, self.acceptance, window, "filled").tokens_per_second

    def bound(self, window: int, batch: int) -> float:
        """What decoupling may gain: whole windows of a verifier with twice the batch, over coupled drafting."""
        ratio = renewal_tau(self.acceptance, window) / drawn(self.acceptance, window + 1)
        alone = window * self.draft_s[batch] + self.verify(batch, window + 1)
        return ratio * alone / max(window * self.draft_s[2 * batch], self.verify(2 * batch, window))

    def plan(self, batch: int) -> Setting:
        plan = make_plan(self.costs, Planned(num_sequences=2 * batch, num_gpus=2), {METHOD: self.acceptance})
        return setting_of(plan)


def profile(bench: Bench) -> Profile:
    batches = sorted({size for batch in BATCHES for size in (batch, 2 * batch)})
    plain_s, draft_s, drafted = {}, {}, []
    for batch in batches:
        plain_s[batch] = seconds_of_pass(bench.roll_out(PLAIN, batch).steps)
    found = Profile(plain_s, bench.row_seconds, {}, 0.0)
    for batch in batches:
        steps = bench.roll_out(Setting(mode="coupled", method=METHOD, window=PROFILE_WINDOW), batch).steps
        drafting_s = seconds_of_pass(steps) - found.verify(batch, PROFILE_WINDOW + 1)
        draft_s[batch] = max(1e-5, drafting_s / PROFILE_WINDOW)
        drafted += steps
    return replace(found, draft_s=draft_s, acceptance=accepted_share(drafted))


def live_part(models: Path, turns: int, world: TorchGroup) -> dict[str, Any]:
    paths = launch.on_rank_0(world, lambda: [str(make_model(models, 8)), str(trained(models, METHOD))])
    groups = engines.GroupCache(world, [])
    options = {"dtype": dtype(), "block_size": 16, "max_num_seqs": 64, "max_model_len": MAX_LEN}
    real = RealWorld(model=paths[0], groups=groups, pace=None, options=options)
    bench = Bench(real, paths[1], encode(Path(paths[0]), prompts(4 * max(BATCHES))))
    start = time.monotonic()
    bench.roll_out(Setting(mode="coupled", method=METHOD, window=2), BATCHES[0])  # warms up
    known = profile(bench)
    found = {batch: _measure(bench, known, batch, turns) for batch in BATCHES}
    groups.close()
    errors = [row["error"] for one in found.values() for row in one["settings"].values()]
    return {
        "tier": "live",
        "seconds": short(time.monotonic() - start),
        "acceptance": short(known.acceptance),
        "draft_ms": {batch: short(1e3 * one) for batch, one in known.draft_s.items()},
        "verify_ms": {
            batch: [short(1e3 * known.verify(batch, rows)) for rows in (1, 3, 5, 7)] for batch in known.plain_s
        },
        "live_bound": {f"{w},{b}": short(known.bound(w, b)) for w in WINDOWS for b in BATCHES},
        "tgs_error": short(statistics.fmean(errors)),
        "planner_vs_best_fixed": short(min(one["planner_vs_best_fixed"] for one in found.values())),
        "batches": found,
    }


def _measure(bench: Bench, known: Profile, batch: int, turns: int) -> dict[str, Any]:
    """Measures all settings of a batch; of an even number of turns the first half finds the best fixed one."""
    settings = [
        Setting(mode=mode, method=METHOD, window=window, num_drafters=int(mode == "filled"))
        for window in WINDOWS
        for mode in ("coupled", "filled")
    ]
    planned = launch.on_rank_0(bench.world.groups.world, lambda: _as_dict(known.plan(batch)))
    planner = replace(Setting(**planned), method=METHOD)
    every = {one.name: one for one in dict.fromkeys([*settings, planner])}
    calls = {name: lambda one=one: tokens_per_second(bench.roll_out(one, batch).steps) for name, one in every.items()}
    rates = interleave(calls, 2 * turns, name=f"live, {batch}", warm_up=False)
    first = {name: statistics.median(some[:turns]) for name, some in rates.items() if not name.endswith(AGAIN)}
    best = max(first, key=lambda name: first[name])
    later = {name: statistics.median(some[turns:]) for name, some in rates.items()}
    base = next(iter(rates))
    rows = {}
    for name, one in every.items():
        predicted, measured = known.predict(one, batch), statistics.median(rates[name])
        rows[name] = {
            "predicted": short(predicted),
            "measured": short(measured),
            "error": short(abs(predicted / measured - 1)),
        }
    return {
        "planner": planner.name,
        "best_fixed": best,
        "planner_vs_best_fixed": short(later[planner.name] / later[best]),
        "a_a": short(statistics.median(rates[base + AGAIN]) / statistics.median(rates[base])),
        "settings": rows,
    }


def _as_dict(setting: Setting) -> dict[str, Any]:
    return {"mode": setting.mode, "window": setting.window, "num_drafters": setting.num_drafters}
